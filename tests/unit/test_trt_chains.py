"""Draft lengths by batch size, as the engine's schedule says them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ecospec_orchestrator.engine.tensorrt_llm.plugin import chains


def test_acceptance_by_place_from_counted_steps() -> None:
    # 10 steps: 4 accepted none, 3 one, 1 two, 2 three.
    assert chains.conditional_acceptance([4, 3, 1, 2]) == [6 / 10, 3 / 6, 2 / 3]
    assert chains.conditional_acceptance([5, 0, 0]) == [0.0, 0.0]
    assert chains.conditional_acceptance([0]) == []


def test_expected_tokens_are_those_of_a_simulation() -> None:
    rng = np.random.default_rng(0)
    acceptance = [0.9, 0.6, 0.5]
    held = rng.random((200_000, 3)) < acceptance
    for length in range(4):
        simulated = 1 + np.cumprod(held[:, :length], axis=1).sum(1).mean()
        assert chains.expected_tokens(acceptance, length) == pytest.approx(simulated, rel=5e-3)
    assert chains.expected_tokens(acceptance, 9) == chains.expected_tokens(acceptance, 3)


def seconds(requests: int, length: int) -> float:
    return 0.010 + 0.0005 * requests * (1 + length) + 0.001 * length


def test_the_best_length_has_the_most_tokens_per_second() -> None:
    for requests, first in itertools.product((1, 4, 32), (0.2, 0.6, 0.95)):
        acceptance = [first, first * 0.9, first * 0.8, first * 0.7]
        rates = [requests * chains.expected_tokens(acceptance, n) / seconds(requests, n) for n in range(5)]
        assert chains.best_length(requests, acceptance, seconds, 4) == int(np.argmax(rates))
    assert chains.best_length(8, [0.0] * 4, seconds, 4) == 0
    assert chains.best_length(8, [0.0] * 4, seconds, 4, shortest=1) == 1
    with pytest.raises(ValueError, match="costs 0.0 s"):
        chains.best_length(1, [0.5], lambda requests, length: 0.0, 1)


def test_lengths_never_grow_with_the_batch() -> None:
    lengths = chains.best_lengths(64, [0.8, 0.7, 0.6, 0.5], seconds, 4)
    assert len(lengths) == 64 and lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 2
    assert min(chains.best_lengths(64, [0.3, 0.2], seconds, 2)) == 0
    assert min(chains.best_lengths(64, [0.3, 0.2], seconds, 2, shortest=1)) == 1
    # Where a larger batch would pay for more, the smaller one's length stays.
    odd = chains.best_lengths(2, [0.9, 0.9], lambda r, n: 1.0 + (n if r == 1 else 0), 2)
    assert odd == [0, 0]


def length_in(table: dict[int, int], requests: int) -> int:
    """The length that the engine takes from a schedule for so many requests."""
    return next((length for bound, length in sorted(table.items()) if requests <= bound), 0)


def test_a_schedule_says_every_length_and_begins_with_the_longest() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        lengths = sorted(rng.integers(0, 5, rng.integers(1, 20)).tolist(), reverse=True)
        if lengths[0] == 0:
            continue
        table = chains.schedule(lengths)
        assert [length_in(table, n) for n in range(1, len(lengths) + 1)] == lengths
        assert table[min(table)] == lengths[0]  # max_draft_len, or the engine refuses it
        assert len(table) == len(set(lengths))
        assert length_in(table, len(lengths) + 1) == 0


def test_the_documented_example() -> None:
    assert chains.schedule([4] * 4 + [2] * 4 + [1] * 24) == {4: 4, 8: 2, 32: 1}


@pytest.mark.parametrize("lengths", [[], [0, 0], [2, 3], [1, -1]])
def test_lengths_that_no_schedule_can_say_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="must start with at least 1 and never grow"):
        chains.schedule(lengths)
