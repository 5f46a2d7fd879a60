"""Acceptance: greedy against a step-by-step reference, sampling against the target's distribution, seeds against text.

The target is a table: the logits after a token depend on that token alone. So "the target's distribution" is known
exactly, and a drafter with another table makes trees that are partly right.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from scipy.stats import chisquare

from ecospec_orchestrator.core import ROOT, DraftTree, Footprints, SamplingParams
from ecospec_orchestrator.selection import SelectionPolicy, make_policy
from ecospec_orchestrator.verification import Acceptance, accept, logprobs, pick, seeded_uniform, target_distribution

GREEDY = SamplingParams()
ONE = SamplingParams(temperature=1.0)
VOCABULARY = 12
TARGET = np.random.default_rng(1).normal(0, 1.3, (VOCABULARY, VOCABULARY)).astype(np.float32)
DRAFTER = TARGET + np.random.default_rng(2).normal(0, 0.8, TARGET.shape).astype(np.float32)
ROOT_TOKEN = int(np.exp(log_softmax(TARGET, axis=1)).max(axis=1).argmax())  # so the rule broken at p > 0.2 acts at once
DRAWS = 20_000


def no_uniform(position: int) -> float:
    raise AssertionError("greedy decoding draws no random number")


# ---------------------------------------------------------------- greedy


@st.composite
def greedy_case(draw):
    vocabulary = draw(st.integers(1, 5))
    table = np.array([[draw(st.integers(0, 3)) for _ in range(vocabulary)] for _ in range(vocabulary)], np.float32)
    nodes = draw(st.integers(0, 10))
    parents = np.array([-1] + [draw(st.integers(0, row)) for row in range(nodes)], np.int64)
    tokens = np.array([draw(st.integers(0, vocabulary - 1)) for _ in range(nodes + 1)], np.int64)
    stop = frozenset(draw(st.sets(st.integers(0, vocabulary - 1), max_size=1)))
    return table, tokens, parents, stop


@settings(max_examples=400, deadline=None)
@given(greedy_case())
def test_greedy_acceptance_is_step_by_step_decoding_as_far_as_the_tree_goes(case):
    table, tokens, parents, stop = case
    got = accept(table[tokens], tokens, parents, GREEDY, no_uniform, 0, stop)
    # Reference: decode one token at a time; go on while the text so far is a path of the tree.
    # (Of siblings with equal tokens only the first counts; no drafter proposes a token twice.)
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for row in range(1, len(tokens)):
        if int(parents[row]) in paths and (path := (*paths[int(parents[row])], int(tokens[row]))) not in paths.values():
            paths[row] = path
    expected: list[int] = []
    last = int(tokens[0])
    while True:
        last = max(range(len(table)), key=lambda token: (table[last, token], -token))
        expected.append(last)
        if last in stop or tuple(expected) not in paths.values():
            break
    assert got.tokens.tolist() == expected
    assert len(got.rows) == len(got.tokens) == got.accepted + 1
    assert got.rows[0] == 0 and (np.diff(got.rows) > 0).all()
    assert tokens[got.rows[1:]].tolist() == expected[:-1]
    assert [int(parents[row]) for row in got.rows[1:]] == got.rows[:-1].tolist()


@settings(max_examples=200, deadline=None)
@given(greedy_case())
def test_greedy_mass_is_one_for_the_targets_token_and_zero_beside_it(case):
    table, tokens, parents, stop = case
    got = accept(table[tokens], tokens, parents, GREEDY, no_uniform, 0, stop)
    walked = set(got.rows.tolist())
    assert got.mass.shape == (len(tokens),) and got.mass.dtype == np.float64
    for row, mass in enumerate(got.mass.tolist()):
        if row == 0 or int(parents[row]) not in walked:
            assert math.isnan(mass)
        else:
            assert mass == float(tokens[row] == table[tokens[parents[row]]].argmax())
    assert (got.mass[got.rows[1:]] == 1).all()


@settings(max_examples=200, deadline=None)
@given(
    greedy_case(),
    st.sampled_from([ONE, SamplingParams(0.7, top_p=0.9), SamplingParams(1.3, top_p=0.8, top_k=2)]),
    st.integers(0, 99),
)
def test_sampled_mass_is_the_processed_distribution_where_the_walk_came_by(case, sampling, seed):
    table, tokens, parents, stop = case
    uniform = seeded_uniform(seed)
    got = accept(table[tokens], tokens, parents, sampling, uniform, 3, stop)
    walked = got.rows.tolist()
    # The same tokens as one pick after the other, so nothing was drawn for the masses.
    assert got.tokens.tolist() == [pick(table[tokens[r]], sampling, uniform, 3 + i) for i, r in enumerate(walked)]
    for row in range(len(tokens)):
        if row == 0 or int(parents[row]) not in walked:
            assert math.isnan(got.mass[row])
        else:
            assert got.mass[row] == target_distribution(table[tokens[parents[row]]], sampling)[tokens[row]]
    for row in walked:
        below = np.flatnonzero(parents == row)
        _, first = np.unique(tokens[below], return_index=True)
        assert got.mass[below[first]].sum() <= 1 + 1e-12
    assert (got.mass[got.rows[1:]] > 0).all()


def test_mass_by_hand():
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [1 / 3, 1 / 3, 1 / 3]])).astype(
        np.float32
    )
    tokens, parents = np.array([0, 0, 1, 1]), np.array([-1, 0, 0, 1])
    first = accept(logits, tokens, parents, ONE, lambda _: 0.0, 0)  # token 0, then token 0 again: not drafted
    np.testing.assert_allclose(first.mass, [np.nan, 0.5, 0.3, 0.8], rtol=1e-6)
    last = accept(logits, tokens, parents, ONE, lambda _: 0.99, 0)  # token 2: not drafted
    np.testing.assert_allclose(last.mass, [np.nan, 0.5, 0.3, np.nan], rtol=1e-6)
    filtered = accept(logits, tokens, parents, SamplingParams(1.0, top_k=1), lambda _: 0.5, 0)
    np.testing.assert_allclose(filtered.mass, [np.nan, 1, 0, 1])
    # A drafted stop token has its mass, and what hangs below it was never looked at.
    stopped = accept(logits, tokens, parents, GREEDY, no_uniform, 0, frozenset({0}))
    np.testing.assert_allclose(stopped.mass, [np.nan, 1, 0, np.nan])
    assert stopped.rows.tolist() == [0] and stopped.tokens.tolist() == [0]


def test_the_distribution_is_computed_once_per_walked_row(monkeypatch):
    calls = []
    monkeypatch.setattr(
        sys.modules["ecospec_orchestrator.verification.accept"],  # the package's attribute of that name is the function
        "target_distribution",
        lambda row, sampling: calls.append(1) or target_distribution(row, sampling),
    )
    tokens, parents = policy_trees("likelihood")[ROOT_TOKEN]
    for seed in range(20):
        calls.clear()
        got = accept(TARGET[tokens], tokens, parents, ONE, seeded_uniform(seed), 0)
        assert len(calls) == len(got.rows)


def test_arrays_that_do_not_fit_are_refused():
    logits = np.zeros((2, 3), np.float32)
    tokens = np.array([0, 1])
    with pytest.raises(ValueError, match="1 logit rows, 2 tokens and 2 parents"):
        accept(logits[:1], tokens, np.array([-1, 0]), GREEDY, no_uniform, 0)
    with pytest.raises(ValueError, match="row 0 has parent 0"):
        accept(logits, tokens, np.array([0, 0]), GREEDY, no_uniform, 0)
    with pytest.raises(ValueError, match="row 1 has parent 1"):
        accept(logits, tokens, np.array([-1, 1]), GREEDY, no_uniform, 0)
    for broken in (np.nan, np.inf):
        for sampling in (GREEDY, ONE):
            with pytest.raises(ValueError, match=f"largest logit is {broken}"):
                accept(np.full((1, 3), broken, np.float32), tokens[:1], np.array([-1]), sampling, lambda _: 0.5, 0)


# ---------------------------------------------------------------- a text generator around accept


def draft_tree(root: int) -> DraftTree:
    """The drafter's three best tokens, their two best each, and theirs again: deterministic, as EAGLE-3's trees are."""
    probabilities = np.exp(log_softmax(DRAFTER.astype(np.float64), axis=1))
    tokens, parents, path, depths = [], [], [], []
    level = [(ROOT, root, 1.0)]
    for depth, width in ((1, 3), (2, 2), (3, 2)):
        coming = []
        for parent, token, p in level:
            for child in np.argsort(-probabilities[token], kind="stable")[:width].tolist():
                coming.append((len(tokens), child, p * probabilities[token, child]))
                tokens.append(child)
                parents.append(parent)
                path.append(coming[-1][2])
                depths.append(depth)
        level = coming
    ids, above, levels = (np.array(values, np.int32) for values in (tokens, parents, depths))
    return DraftTree(ids, above, np.array(path, np.float32), levels)


def token_footprints(tree: DraftTree, root: int) -> Footprints:
    """Two experts of six in each of two layers, by token."""
    table = np.zeros((VOCABULARY, 2, 1), np.uint64)
    generator = np.random.default_rng(5)
    for token in range(VOCABULARY):
        for layer in range(2):
            table[token, layer, 0] = sum(1 << int(e) for e in generator.permutation(6)[:2])
    return Footprints(table[[root, *tree.tokens.tolist()]], np.ones(len(tree) + 1, bool))


def selected_trees(policy: SelectionPolicy) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each root token: (tokens, parents) of the rows sent to verification."""
    result = []
    for root in range(VOCABULARY):
        tree = draft_tree(root) if policy.needs_drafts else DraftTree.empty()
        (chosen,) = policy.choose([tree], [token_footprints(tree, root)] if policy.needs_footprints else None)
        row_of = {ROOT: 0} | {int(node): row for row, node in enumerate(chosen, 1)}
        parents = [-1] + [row_of[int(tree.parents[node])] for node in chosen]
        result.append((np.array([root, *tree.tokens[chosen].tolist()]), np.array(parents)))
    return result


def policy_trees(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    options = {"none": {}, "likelihood": {"gamma": 4}, "ecospec": {"gamma": 4, "top_k": 2}}[name]
    return selected_trees(make_policy(name, **options))


Rule = Callable[..., Acceptance]


def generate(
    trees, root: int, length: int, sampling: SamplingParams, seed: int, rule: Rule = accept
) -> tuple[list[int], int]:
    """`length` tokens after root, and the number of steps that they took."""
    uniform = seeded_uniform(seed)
    text: list[int] = []
    steps = 0
    while len(text) < length:
        tokens, parents = trees[text[-1] if text else root]
        text += rule(TARGET[tokens], tokens, parents, sampling, uniform, len(text)).tokens.tolist()
        steps += 1
    return text[:length], steps


# ---------------------------------------------------------------- the distribution


def prefers_likely_drafts(logits, tokens, parents, sampling, uniform, first_position) -> Acceptance:
    """Broken on purpose: a drafted child of target probability above 0.2 is taken without a draw."""
    rows, emitted = [0], []
    while True:
        row = rows[-1]
        p = target_distribution(logits[row], sampling)
        likely = [child for child in np.flatnonzero(parents == row) if p[tokens[child]] > 0.2]
        if not likely:
            emitted.append(pick(logits[row], sampling, uniform, first_position + len(emitted)))
            return Acceptance(np.array(rows), np.array(emitted), np.full(len(tokens), np.nan))
        rows.append(int(likely[0]))
        emitted.append(int(tokens[likely[0]]))


def rejection_without_sampled_drafts(logits, tokens, parents, sampling, uniform, first_position) -> Acceptance:
    """Broken on purpose: accepts a deterministic top-k draft with min(1, p/q), as if it had been sampled from q."""
    rows, emitted = [0], []
    while True:
        row = rows[-1]
        p = target_distribution(logits[row], sampling)
        q = np.exp(log_softmax(DRAFTER[tokens[row]].astype(np.float64)))
        draws = np.random.default_rng(int(uniform(first_position + len(emitted)) * 2**53)).random
        taken = [c for c in np.flatnonzero(parents == row) if draws() < p[tokens[c]] / q[tokens[c]]][:1]
        if not taken:
            emitted.append(pick(logits[row], sampling, uniform, first_position + len(emitted)))
            return Acceptance(np.array(rows), np.array(emitted), np.full(len(tokens), np.nan))
        rows.append(int(taken[0]))
        emitted.append(int(tokens[taken[0]]))


def p_values(trees, rule: Rule, root: int = ROOT_TOKEN) -> tuple[float, float]:
    """Chi-square of DRAWS first tokens, and of the (first, second) pairs, against the target table."""
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for seed in range(DRAWS):
        (first, second), _ = generate(trees, root, 2, ONE, seed, rule)
        counts[first, second] += 1
    p = np.exp(log_softmax(TARGET.astype(np.float64), axis=1))
    expected = p[root][:, None] * p * DRAWS
    first_p = chisquare(counts.sum(1), expected.sum(1)).pvalue
    common = expected >= 5  # rare pairs are counted together, as the chi-square approximation needs
    observed = np.append(counts[common], counts[~common].sum())
    return float(first_p), float(chisquare(observed, np.append(expected[common], expected[~common].sum())).pvalue)


@pytest.mark.parametrize("name", ["none", "likelihood", "ecospec"])
def test_sampled_tokens_have_the_targets_distribution(name):
    first, pairs = p_values(policy_trees(name), accept)
    assert first > 1e-3 and pairs > 1e-3
    if name != "none":  # the same test must see a wrong rule
        for broken in (prefers_likely_drafts, rejection_without_sampled_drafts):
            first, pairs = p_values(policy_trees(name), broken)
            assert first < 1e-6 and pairs < 1e-6, broken.__name__


@pytest.mark.parametrize(
    "sampling", [ONE, SamplingParams(0.7, top_p=0.9), SamplingParams(1.3, top_p=0.8, top_k=6), GREEDY]
)
def test_same_seed_same_text_under_every_policy(sampling):
    policies = {name: policy_trees(name) for name in ("none", "likelihood", "ecospec")}
    texts = set()
    for seed in range(20):
        runs = {name: generate(trees, ROOT_TOKEN, 64, sampling, seed) for name, trees in policies.items()}
        assert runs["likelihood"][0] == runs["ecospec"][0] == runs["none"][0]
        assert runs["none"][1] == 64  # one step per token
        assert max(runs["likelihood"][1], runs["ecospec"][1]) < 60  # here drafts were accepted
        texts.add(tuple(runs["none"][0]))
    assert len(texts) == (1 if sampling is GREEDY else 20)


def test_uniform_numbers_depend_on_seed_and_position_only():
    one, again, other = seeded_uniform(5), seeded_uniform(5), seeded_uniform(6)
    values = [one(position) for position in range(2000)]
    assert [again(position) for position in reversed(range(2000))] == values[::-1]
    assert len({*values, *(other(position) for position in range(2000))}) == 4000
    assert all(0 <= value < 1 for value in values)
    assert chisquare(np.histogram(values, 20, (0, 1))[0]).pvalue > 1e-3
    assert seeded_uniform(-1)(0) == seeded_uniform(2**64 - 1)(0) != seeded_uniform(1)(0)


# ---------------------------------------------------------------- filters, draw, log-probabilities


def reference_distribution(row, temperature, top_k, top_p):
    """The documented definition with sorted lists."""
    highest = max(row)
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    weights = {token: math.exp((float(row[token]) - float(highest)) / temperature) for token in order[: top_k or None]}
    total, running, kept = math.fsum(weights.values()), 0.0, {}
    for token, weight in weights.items():
        kept[token] = weight
        running += weight
        if running >= top_p * total:
            break
    total = math.fsum(kept.values())
    return np.array([kept.get(token, 0.0) / total for token in range(len(row))])


@pytest.mark.parametrize("vocabulary", [1, 7, 40, 3000])
def test_processed_distribution_equals_its_definition(vocabulary):
    generator = np.random.default_rng(vocabulary)
    for _ in range(150 if vocabulary < 3000 else 10):
        row = generator.integers(-3, 4, vocabulary).astype(np.float32)  # many ties
        if generator.random() < 0.5:
            row += generator.normal(0, 1e-3, vocabulary).astype(np.float32)
        temperature, top_p = generator.uniform(0.3, 2), generator.choice([1.0, generator.uniform(0.01, 0.99)])
        top_k = int(generator.choice([0, 1, 3, vocabulary, vocabulary + 5]))
        got = target_distribution(row, SamplingParams(temperature, top_p, top_k))
        np.testing.assert_allclose(got, reference_distribution(row, temperature, top_k, top_p), rtol=1e-12, atol=0)


def test_filters_at_their_edges():
    row = np.array([1.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    assert target_distribution(row, SamplingParams(1.0, top_k=2)).tolist() == [0, 0.5, 0.5, 0, 0]
    assert target_distribution(row, SamplingParams(1.0, top_p=1e-9)).tolist() == [0, 1, 0, 0, 0]
    assert target_distribution(row, SamplingParams(1e-310)).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    masked = np.array([-np.inf, 0.0, 0.0], np.float32)
    assert target_distribution(masked, ONE).tolist() == [0, 0.5, 0.5]
    assert target_distribution(np.zeros(4, np.float32), SamplingParams(1.0, top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]


def test_the_draw_is_the_inverse_of_the_cumulative_distribution():
    row = np.log(np.array([0.25, 1e-30, 0.5, 0.25])).astype(np.float32)
    row[1] = -np.inf
    for u, token in ((0.0, 0), (0.2499, 0), (0.2501, 2), (0.7499, 2), (0.7501, 3), (1 - 2**-53, 3)):
        assert pick(row, ONE, lambda _, u=u: u, 0) == token
    last_impossible = np.array([0.3, 0.1, -np.inf], np.float32)
    assert pick(last_impossible, ONE, lambda _: 1.0, 0) == 1  # even where rounding reaches the total
    seen = []
    pick(row, ONE, lambda position: seen.append(position) or 0.5, 17)
    assert seen == [17]


def test_logprobs_are_those_of_the_unmodified_distribution():
    row = np.random.default_rng(4).normal(0, 5, 1000).astype(np.float32)
    expected = log_softmax(row.astype(np.float64))
    got = logprobs(row, 17, 5)
    assert got.token == 17 and got.logprob == pytest.approx(expected[17], abs=1e-9)
    assert [token for token, _ in got.alternatives] == np.argsort(-row, kind="stable")[:5].tolist()
    assert [value for _, value in got.alternatives] == pytest.approx([expected[token] for token, _ in got.alternatives])
    assert logprobs(row, 17, 0).alternatives == ()
    tied = logprobs(np.array([0, 1, 1, 1], np.float32), 0, 2)
    assert [token for token, _ in tied.alternatives] == [1, 2]
    assert len(logprobs(np.zeros(3, np.float32), 0, 20).alternatives) == 3
    assert type(tied.alternatives[0][0]) is int and type(tied.logprob) is float
