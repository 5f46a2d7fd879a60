"""Selection against a slow, independent reading of the paper's formula: Python sets, exact fractions, no frontier."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ecospec_orchestrator.core import ROOT, DraftTree, Footprints, SettingsError
from ecospec_orchestrator.selection import EcoSpecPolicy, LikelihoodPolicy, make_policy, warm_up
from ecospec_orchestrator.selection.kernel import greedy_marginal

EPS = (1.0, 0.5, 0.125, 2.0)  # exact in binary, so the oracle's fractions and float64 order scores alike


def path(tree: DraftTree, node: int) -> list[int]:
    nodes = []
    while node != ROOT:
        nodes.append(node)
        node = int(tree.parents[node])
    return nodes


def closed(tree: DraftTree, nodes: np.ndarray) -> bool:
    chosen = set(nodes.tolist())
    return all(int(tree.parents[node]) in chosen | {ROOT} for node in chosen)


def assert_well_formed(tree: DraftTree, nodes: np.ndarray, gamma: int) -> None:
    assert nodes.dtype == np.int32
    assert len(nodes) == min(gamma, len(tree))
    assert (np.diff(nodes) > 0).all()
    assert closed(tree, nodes)


def best_of(scores: dict[tuple[int, int], Fraction], trees: list[DraftTree]) -> tuple[tuple[int, int], int]:
    """The winner with the tie rule written out (ancestors first, then the lower (tree, node)), and how many tied."""
    top = max(scores.values())
    tied = {key for key, score in scores.items() if score == top}
    without_tied_ancestor = [
        (tree, node) for tree, node in tied if not any((tree, above) in tied for above in path(trees[tree], node)[1:])
    ]
    return min(without_tied_ancestor), len(tied)


def pairs(footprint: Footprints, row: int) -> set[tuple[int, int]]:
    layers, words = footprint.experts.shape[1:]
    return {
        (layer, 64 * word + bit)
        for layer in range(layers)
        for word in range(words)
        for bit in range(64)
        if int(footprint.experts[row, layer, word]) >> bit & 1
    }


def oracle(trees, footprints, top_k, gamma, eps, seed_root, expert_buffer):
    """Prices every unchosen node over its whole path at every pick. Returns the choice and the number of tied picks."""
    experts: dict[tuple[int, int], set] = {}
    buffers: list[set] = [set()] * len(trees) if expert_buffer == "batch" else [set() for _ in trees]
    for t, (tree, footprint) in enumerate(zip(trees, footprints, strict=True)):
        if seed_root and footprint.known[0]:
            buffers[t] |= pairs(footprint, 0)
        for node in range(len(tree)):
            if footprint.known[1 + node]:
                experts[t, node] = pairs(footprint, 1 + node)
            else:
                experts[t, node] = {("private", t, node, n) for n in range(top_k * footprint.experts.shape[1])}
    trajectory = {(t, n): set().union(*(experts[t, above] for above in path(trees[t], n))) for t, n in experts}
    chosen: list[list[int]] = [[] for _ in trees]
    ties = 0
    while True:
        scores = {
            (t, n): Fraction(float(trees[t].probabilities[n])) / (len(trajectory[t, n] - buffers[t]) + Fraction(eps))
            for t, n in experts
            if n not in chosen[t] and len(chosen[t]) < gamma
        }
        if not scores:
            return [sorted(nodes) for nodes in chosen], ties
        (t, n), tied = best_of(scores, trees)
        ties += tied > 1
        chosen[t].append(n)
        if expert_buffer != "none":
            buffers[t] |= trajectory[t, n]


def random_tree(generator: np.random.Generator, nodes: int) -> DraftTree:
    parents = np.array([generator.integers(-1, n) for n in range(nodes)], np.int32)
    probabilities = np.zeros(nodes, np.float32)
    depths = np.zeros(nodes, np.int32)
    for n, parent in enumerate(parents):
        above, depth = (1.0, 0) if parent == ROOT else (probabilities[parent], depths[parent])
        # Exact products; 1: as probable as the parent.
        probabilities[n] = above * generator.choice([1.0, 1.0, 0.5, 0.75, 0.25])
        depths[n] = depth + 1
    return DraftTree(generator.integers(0, 50, nodes, dtype=np.int32), parents, probabilities, depths)


def random_footprints(generator, nodes, layers, num_experts, top_k, known_share) -> Footprints:
    experts = np.zeros((1 + nodes, layers, -(-num_experts // 64)), np.uint64)
    for row in range(1 + nodes):
        for layer in range(layers):
            for expert in generator.permutation(num_experts)[:top_k]:
                experts[row, layer, expert // 64] |= np.uint64(1) << np.uint64(expert % 64)
    return Footprints(experts, generator.random(1 + nodes) < known_share)


@pytest.mark.parametrize("expert_buffer", ["batch", "request", "none"])
def test_ecospec_equals_brute_force_on_thousands_of_random_batches(expert_buffer):
    generator = np.random.default_rng(20260714)
    tied_picks = trees_seen = differs_from_likelihood = 0
    for _ in range(1500):
        top_k = int(generator.integers(1, 3))
        layers, num_experts = int(generator.integers(1, 4)), int(generator.choice([3, 4, 6, 70]))
        gamma, eps, seed_root = int(generator.integers(1, 6)), float(generator.choice(EPS)), bool(generator.integers(2))
        trees = [random_tree(generator, int(generator.integers(0, 9))) for _ in range(generator.integers(1, 5))]
        known = float(generator.choice([1.0, 0.7, 0.0]))
        footprints = [random_footprints(generator, len(t), layers, num_experts, top_k, known) for t in trees]
        chosen = EcoSpecPolicy(top_k, gamma, eps, seed_root, expert_buffer).choose(trees, footprints)
        expected, ties = oracle(trees, footprints, top_k, gamma, eps, seed_root, expert_buffer)
        assert [nodes.tolist() for nodes in chosen] == expected
        for tree, nodes in zip(trees, chosen, strict=True):
            assert_well_formed(tree, nodes, gamma)
        tied_picks += ties
        trees_seen += len(trees)
        likelihood = LikelihoodPolicy(gamma).choose(trees, None)
        differs_from_likelihood += any(a.tolist() != b.tolist() for a, b in zip(chosen, likelihood, strict=True))
    assert trees_seen > 3000 and tied_picks > 1000 and differs_from_likelihood > 100  # the cases are worth something


def test_likelihood_equals_brute_force():
    generator = np.random.default_rng(3)
    for _ in range(2000):
        tree, gamma = random_tree(generator, int(generator.integers(0, 20))), int(generator.integers(1, 8))
        expected: list[int] = []
        while len(expected) < min(gamma, len(tree)):
            left = {(0, n): Fraction(float(tree.probabilities[n])) for n in range(len(tree)) if n not in expected}
            expected.append(best_of(left, [tree])[0][1])
        (nodes,) = LikelihoodPolicy(gamma).choose([tree], None)
        assert nodes.tolist() == sorted(expected)
        assert_well_formed(tree, nodes, gamma)


@pytest.mark.parametrize("seed", range(5))
def test_closed_even_when_a_child_claims_more_than_its_parent(seed):
    generator = np.random.default_rng(seed)
    for _ in range(200):
        tree = random_tree(generator, 12)
        wrong = DraftTree(tree.tokens, tree.parents, generator.random(12, np.float32), tree.depths)
        footprint = random_footprints(generator, 12, 2, 6, 2, 0.8)
        for policy in (LikelihoodPolicy(5), EcoSpecPolicy(2, 5)):
            assert_well_formed(wrong, policy.choose([wrong], [footprint])[0], 5)


def bits(*rows: tuple[int, ...]) -> Footprints:
    """One layer; each row given by its expert ids."""
    experts = np.array([[[sum(1 << e for e in row)]] for row in rows], np.uint64)
    return Footprints(experts, np.ones(len(rows), bool))


def chain_or_star(parents: list[int], probabilities: list[float]) -> DraftTree:
    n = len(parents)
    return DraftTree(
        np.arange(n, dtype=np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.ones(n, np.int32),
    )


def test_the_buffer_is_shared_by_the_batch():
    # Tree 0 takes experts 0 and 1. In tree 1 the less probable node uses just these: cheap only beside tree 0.
    first = (chain_or_star([-1], [0.9]), bits((9,), (0, 1)))
    second = (chain_or_star([-1, -1], [0.5, 0.4]), bits((9,), (2, 3), (0, 1)))
    policy = make_policy("ecospec", top_k=2, gamma=1)
    alone = policy.choose([second[0]], [second[1]])
    together = policy.choose([first[0], second[0]], [first[1], second[1]])
    assert alone[0].tolist() == [0]
    assert [nodes.tolist() for nodes in together] == [[0], [1]]
    for expert_buffer in ("request", "none"):
        apart = make_policy("ecospec", top_k=2, gamma=1, expert_buffer=expert_buffer)
        nodes = apart.choose([first[0], second[0]], [first[1], second[1]])
        assert [chosen.tolist() for chosen in nodes] == [[0], [0]]


def test_without_a_buffer_the_trajectory_keeps_its_full_price():
    # After node 0 its child is nearly free, and beats node 2 only where a buffer says so.
    tree, footprint = chain_or_star([-1, 0, -1], [0.9, 0.4, 0.5]), bits((9,), (0, 1), (0, 1), (2, 3))
    for expert_buffer, nodes in (("batch", [0, 1]), ("request", [0, 1]), ("none", [0, 2])):
        policy = make_policy("ecospec", top_k=2, gamma=2, expert_buffer=expert_buffer)
        assert policy.choose([tree], [footprint])[0].tolist() == nodes


def test_seeding_makes_the_roots_experts_free():
    tree, footprint = chain_or_star([-1, -1], [0.5, 0.4]), bits((4, 5), (2, 3), (4, 5))
    assert make_policy("ecospec", top_k=2, gamma=1, seed_root=True).choose([tree], [footprint])[0].tolist() == [1]
    assert make_policy("ecospec", top_k=2, gamma=1, seed_root=False).choose([tree], [footprint])[0].tolist() == [0]


def test_an_unknown_node_is_charged_and_never_free():
    tree = chain_or_star([-1, -1], [0.5, 0.4])
    footprint = Footprints(np.zeros((3, 1, 1), np.uint64), np.array([True, False, True]))
    assert make_policy("ecospec", top_k=2, gamma=1).choose([tree], [footprint])[0].tolist() == [1]


def test_without_footprints_ecospec_is_likelihood_and_none_chooses_nothing():
    generator = np.random.default_rng(1)
    trees = [random_tree(generator, 10), random_tree(generator, 3), DraftTree.empty()]
    fallback = make_policy("ecospec", top_k=2, gamma=4).choose(trees, None)
    likelihood = make_policy("likelihood", gamma=4).choose(trees, None)
    assert [a.tolist() for a in fallback] == [a.tolist() for a in likelihood]
    none = make_policy("none")
    assert not none.needs_drafts and not none.needs_footprints
    assert [nodes.tolist() for nodes in none.choose(trees, None)] == [[], [], []]
    assert make_policy("ecospec", top_k=2).choose([], []) == []


def test_no_input_of_a_request_compiles_the_kernel_again():
    warm_up()
    tree, footprint = chain_or_star([-1, 0], [0.5, 0.5]), bits((1,), (2,), (3,))
    read_only = Footprints(np.frombuffer(footprint.experts.tobytes(), np.uint64).reshape(3, 1, 1), footprint.known)
    strided = Footprints(np.repeat(footprint.experts, 2, axis=0)[::2], np.repeat(footprint.known, 2)[::2])
    for given in (footprint, read_only, strided):
        assert make_policy("ecospec", top_k=1, gamma=1, eps=1).choose([tree], [given])[0].tolist() == [0]
    assert len(greedy_marginal.signatures) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("magic", {}, "selection policy is 'magic'; it must be one of none, likelihood, ecospec"),
        ("none", {"gamma": 4}, "none has no option gamma; allowed are keep_drafter"),
        ("likelihood", {"eps": 1.0}, "likelihood has no option eps; allowed are gamma"),
        ("likelihood", {"gamma": 0}, "gamma is 0; it must be a whole number from 1 to 64"),
        ("likelihood", {"gamma": 65}, "gamma is 65"),
        ("ecospec", {"top_k": 2, "gamma": True}, "gamma is True"),
        ("ecospec", {"top_k": 2, "gamma": 4.0}, "gamma is 4.0"),
        ("ecospec", {"top_k": 2, "eps": 0}, "eps is 0; it must be a finite number above 0"),
        ("ecospec", {"top_k": 2, "eps": float("nan")}, "eps is nan"),
        ("ecospec", {"top_k": 2, "eps": "1"}, "eps is '1'"),
        ("ecospec", {"top_k": 0}, "top_k is 0; it must be a whole number of at least 1"),
        ("ecospec", {"top_k": 2, "seed_root": 1}, "seed_root is 1; it must be true or false"),
        (
            "ecospec",
            {"top_k": 2, "expert_buffer": "all"},
            "expert_buffer is 'all'; it must be one of batch, request, none",
        ),
        ("ecospec", {"top_k": 2, "expert_buffer": None}, "expert_buffer is None"),
        ("ecospec", {}, "ecospec needs the option top_k"),
    ],
)
def test_wrong_options_stop_the_start(name, options, message):
    with pytest.raises(SettingsError) as error:
        make_policy(name, **options)
    assert message in str(error.value)


def test_arrays_that_do_not_fit_are_refused():
    tree, footprint = chain_or_star([-1, 0], [0.5, 0.5]), bits((1,), (2,), (3,))
    policy = make_policy("ecospec", top_k=1)
    with pytest.raises(ValueError, match="1 footprints for 2 trees"):
        policy.choose([tree, tree], [footprint])
    with pytest.raises(ValueError, match="footprint 0 holds int64"):
        policy.choose([tree], [Footprints(footprint.experts.astype(np.int64), footprint.known)])
    with pytest.raises(ValueError, match=r"footprint 1 holds uint64 \(2, 1, 1\)"):
        policy.choose([tree, tree], [footprint, bits((1,), (2,))])
    with pytest.raises(ValueError, match="known of footprint 0"):
        policy.choose([tree], [Footprints(footprint.experts, footprint.known[:2])])
    for parents in ([-1, 1], [-1, 5], [-2, 0]):
        with pytest.raises(ValueError, match="parent that does not come before"):
            policy.choose([chain_or_star(parents, [0.5, 0.5])], [footprint])
