"""Grammar, bias and penalties: by hand, against their definition, and over draft trees against decoding token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from toy_grammar import ToyGrammar, allowed_after

from ecospec_orchestrator.core import Request, SamplingParams
from ecospec_orchestrator.verification import (
    LogitProcessor,
    accept,
    pick,
    processor_for,
    seeded_uniform,
    target_distribution,
)

VOCABULARY = 7


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_logits_stay_untouched_without_settings() -> None:
    assert processor_for(Request("a", (1, 2), 4, SamplingParams(1.0, 0.9, 3, 5, min_p=0.1))) is None
    logits = row(1, 2, 3)
    LogitProcessor(SamplingParams(logit_bias=((0, 5.0),)))(logits)
    assert logits.tolist() == [1, 2, 3], "the engine's own array was written to"


@pytest.mark.parametrize(
    "field",
    [
        {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.1}, {"min_tokens": 1},
        {"logit_bias": ((0, 1.0),)},
    ],
)  # fmt: skip
def test_every_setting_brings_a_processor(field: dict[str, Any]) -> None:
    assert processor_for(Request("a", (1,), 4, SamplingParams(**field))) is not None


def test_penalties_by_hand() -> None:
    processor = LogitProcessor(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt_tokens=(1,))
    assert processor(row(1, 1, 1)).tolist() == [1, 1, 1], "the prompt does not count"
    for token in (2, 0, 2):
        processor.advance(token)
    assert processor(row(1, 1, 1)).tolist() == [0.25, 1, 0]
    repetition = LogitProcessor(SamplingParams(repetition_penalty=2), prompt_tokens=(1,))
    assert repetition(row(4, 4, -4)).tolist() == [4, 2, -4], "the prompt counts"
    repetition.advance(2)
    assert repetition(row(4, 4, -4)).tolist() == [4, 2, -8]


def test_bias_moves_single_tokens_and_comes_before_the_penalties() -> None:
    processor = LogitProcessor(
        SamplingParams(logit_bias=((2, -100.0), (0, 1.0)), repetition_penalty=2), prompt_tokens=(0,)
    )
    assert processor(row(3, 0, 5)).tolist() == [2, 0, -95]


def test_no_stop_token_before_min_tokens() -> None:
    processor = LogitProcessor(SamplingParams(min_tokens=2), stop=frozenset({1, 99}))
    for _ in range(2):
        assert processor(row(0, 9, 0)).argmax() == 0
        processor.advance(0)
    assert processor(row(0, 9, 0)).argmax() == 1


def test_what_a_grammar_rules_out_cannot_be_biased_back_and_padding_is_no_text() -> None:
    grammar = ToyGrammar(3)
    processor = LogitProcessor(SamplingParams(logit_bias=((0, 100.0),)), grammar=grammar.start())
    assert processor(row(9, 1, 1, 9)).tolist() == [-np.inf, 1, 1, -np.inf]


def test_a_grammar_at_its_end_ends_the_text_whatever_min_tokens_says() -> None:
    class Ended:
        error = None

        def allowed(self) -> np.ndarray:
            return np.array([False, False, True])

        def advance(self, token: int) -> None:
            raise AssertionError

    processor = LogitProcessor(SamplingParams(min_tokens=9), stop=frozenset({2}), grammar=Ended())
    assert processor(row(5, 5, 1)).tolist() == [-np.inf, -np.inf, 1]


# Against the definition.


def reference(
    logits: np.ndarray, s: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop: frozenset[int]
) -> list[float]:
    """The class's docstring token by token in exact order."""
    result = []
    for token, value in enumerate(logits.tolist()):
        if len(output) < s.min_tokens and token in stop:
            result.append(-np.inf)
            continue
        value += dict(s.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        value -= s.frequency_penalty * output.count(token) + s.presence_penalty * (token in output)
        result.append(value)
    return result


TOKENS = st.integers(0, VOCABULARY - 1)
SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.75, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.sampled_from([(), ((1, 2.0), (4, -100.0)), ((0, -3.0),)]),
    min_tokens=st.integers(0, 3),
)


@settings(max_examples=200, deadline=None)
@given(SETTINGS, st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=6), st.integers(0, 1000))
def test_the_logits_are_what_the_definition_says(
    sampling: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> None:
    stop = frozenset({2})
    logits = np.random.default_rng(seed).normal(0, 2, VOCABULARY).astype(np.float32)
    processor = LogitProcessor(sampling, prompt, stop)
    for token in output:
        processor.advance(token)
    np.testing.assert_allclose(
        processor(logits), reference(logits, sampling, prompt, output, stop), rtol=1e-5, atol=1e-5
    )


# Over trees.


@st.composite
def trees(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    nodes = draw(st.integers(0, 8))
    parents = np.array([-1] + [draw(st.integers(0, n)) for n in range(nodes)], np.int64)
    return np.array([draw(TOKENS) for _ in range(nodes + 1)], np.int64), parents


def decode(
    table: np.ndarray, root: int, request: Request, length: int, forest: Sequence[tuple[np.ndarray, np.ndarray]]
) -> list[int]:
    """`length` tokens or to the first stop token, verifying the forest's trees in turn, each with the last token as its root."""
    processor, uniform = processor_for(request), seeded_uniform(request.sampling.seed or 0)
    text: list[int] = []
    while len(text) < length and not set(text) & request.stop_token_ids:
        tokens, parents = forest[len(text) % len(forest)]
        tokens = np.concatenate([[text[-1] if text else root], tokens[1:]])
        found = accept(
            table[tokens], tokens, parents, request.sampling, uniform, len(text), request.stop_token_ids, processor
        )
        text += found.tokens.tolist()
    return text[:length]


NO_TREES = [(np.array([0]), np.array([-1]))]


@settings(max_examples=300, deadline=None)
@given(SETTINGS, st.lists(trees(), min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_text_does_not_depend_on_what_was_drafted(
    sampling: SamplingParams, forest: list[tuple[np.ndarray, np.ndarray]], seed: int, grammar: bool
) -> None:
    table = np.random.default_rng(seed).normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)
    made = ToyGrammar(VOCABULARY, ends=(2,), ends_after=4) if grammar else None
    request = Request("a", (3, 4), 12, SamplingParams(**{**vars(sampling), "seed": seed}), frozenset({2}), grammar=made)
    assert decode(table, 5, request, 12, forest) == decode(table, 5, request, 12, NO_TREES)


def test_a_grammar_hears_of_emitted_tokens_alone() -> None:
    """Two drafts of which one is right: the other's token never reaches the state."""
    grammar = ToyGrammar(VOCABULARY, ends=(), ends_after=99)
    state = grammar.start()
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[0, 4], logits[1, 1], logits[2, 2] = 5, 5, 5
    got = accept(
        logits, np.array([0, 4, 2]), np.array([-1, 0, 0]), SamplingParams(), seeded_uniform(0), 0,
        processor=LogitProcessor(SamplingParams(), grammar=state),
    )  # fmt: skip
    assert got.tokens.tolist() == [4, 1] and state.path == [4, 1] and got.rows.tolist() == [0, 1]


def test_two_tokens_have_the_processed_distribution() -> None:
    """Chi-square of drafted decoding against every pair's exact probability under penalties and a grammar."""
    draws = 8000
    table = np.random.default_rng(3).normal(0, 1, (VOCABULARY, VOCABULARY)).astype(np.float32)
    sampling = SamplingParams(temperature=1.0, min_p=0.02, presence_penalty=1.0, repetition_penalty=1.3)
    forest = [(np.array([0, 1, 4, 5, 2]), np.array([-1, 0, 0, 1, 2]))]

    def probabilities(path: list[int]) -> np.ndarray:
        processor = LogitProcessor(sampling, (3,), grammar=ToyGrammar(VOCABULARY).start())
        for token in path:
            processor.advance(token)
        assert (processor(table[path[-1] if path else 5]) == -np.inf).tolist() == (
            ~allowed_after(path, VOCABULARY, (), 0)
        ).tolist()
        return target_distribution(processor(table[path[-1] if path else 5]), sampling)

    first = probabilities([])
    expected = np.array([p * probabilities([t]) if p else np.zeros(VOCABULARY) for t, p in enumerate(first)]) * draws
    observed = np.zeros_like(expected)
    for seed in range(draws):
        request = Request(
            "a", (3,), 2, SamplingParams(**{**vars(sampling), "seed": seed}), grammar=ToyGrammar(VOCABULARY)
        )
        observed[tuple(decode(table, 5, request, 2, forest))] += 1
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    assert expected[~common].sum() < 20, "too many rare pairs to leave them out"
    scale = observed[common].sum() / expected[common].sum()
    assert chisquare(observed[common], expected[common] * scale).pvalue > 1e-3


def test_min_p_cuts_relative_to_the_best() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    assert np.flatnonzero(target_distribution(logits, SamplingParams(1.0, min_p=0.2))).tolist() == [0, 1, 2]
    assert np.flatnonzero(target_distribution(logits, SamplingParams(1.0, min_p=1.0))).tolist() == [0]
    assert pick(logits, SamplingParams(1.0, min_p=1.0), lambda _: 0.999, 0) == 0
    # After the temperature, like the other filters.
    assert np.flatnonzero(target_distribution(logits, SamplingParams(2.0, min_p=0.4))).tolist() == [0, 1, 2]
