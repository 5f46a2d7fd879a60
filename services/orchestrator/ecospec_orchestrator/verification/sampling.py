"""From one row of logits to one token: the processed distribution, the draw, and log-probabilities for the user."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core import SamplingParams, TokenLogprob

_FIRST_SORT = 1024  # candidates sorted at first for top-p; enough for nearly every row


def pick(row: np.ndarray, sampling: SamplingParams, uniform: Callable[[int], float], position: int) -> int:
    """The target's token for logits float32 [vocabulary].

    Temperature 0: greedy, and uniform is not called. Else one draw from target_distribution with uniform(position).
    """
    if sampling.temperature == 0:
        return greedy(row)
    return draw(target_distribution(row, sampling), uniform(position))


def greedy(row: np.ndarray) -> int:
    """The largest logit, the lowest id among equals. Raises ValueError for logits without a finite maximum."""
    best = int(row.argmax())
    _check_finite(row[best])
    return best


def draw(distribution: np.ndarray, u: float) -> int:
    """Inverse CDF in order of token id: the first token whose cumulative probability exceeds u, for u in [0, 1)."""
    cumulative = np.cumsum(distribution)
    total = cumulative[-1]
    token = int(np.searchsorted(cumulative, u * total, side="right"))
    # Rounding may lift the product to the total itself; then it is the last token that has any probability.
    return min(token, int(np.searchsorted(cumulative, total, side="left")))


def target_distribution(row: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """What a sampled token is drawn from, float64 [vocabulary], in this order:

    1. softmax((logit - largest) / temperature);
    2. min_p > 0: what is at least min_p times as probable as the most probable token stays;
    3. top_k > 0: of all, exactly the top_k largest logits stay, among equals the lower ids;
    4. top_p < 1: of what is left, renormalised, the smallest set of most probable tokens (among equals the lower ids
       first) whose sum reaches top_p stays, at least one token;
    5. renormalised to sum 1.

    temperature must be above 0. Raises ValueError for logits without a finite maximum.
    """
    highest = row.max()
    _check_finite(highest)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, then probability 0, is what is meant
        weights = np.exp((row.astype(np.float64) - float(highest)) / sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0.0  # the most probable token has weight 1
    if 0 < sampling.top_k < len(row):
        weights[_beyond_top_k(row, sampling.top_k)] = 0.0
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p)
        filtered = np.zeros_like(weights)
        filtered[kept] = weights[kept]
        weights = filtered
    return weights / weights.sum()


def _beyond_top_k(row: np.ndarray, top_k: int) -> np.ndarray:
    """Mask [vocabulary] of everything but the top_k largest, among equals the lower ids."""
    threshold = np.partition(row, len(row) - top_k)[len(row) - top_k]
    beyond = row < threshold
    equal = np.flatnonzero(row == threshold)
    surplus = len(row) - int(beyond.sum()) - top_k
    if surplus:
        beyond[equal[len(equal) - surplus :]] = True
    return beyond


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Ids of the smallest most-probable-first set whose share of the sum reaches top_p."""
    positive = np.flatnonzero(weights)
    values = weights[positive]
    goal = top_p * values.sum()
    size = min(_FIRST_SORT, len(values))
    while True:
        # All at or above the size-th largest, so that sorting them is a prefix of sorting everything.
        floor = np.partition(values, len(values) - size)[len(values) - size]
        best = np.flatnonzero(values >= floor)
        best = best[np.argsort(-values[best], kind="stable")]
        cumulative = np.cumsum(values[best])
        if cumulative[-1] >= goal or size == len(values):
            return positive[best[: int(np.searchsorted(cumulative, goal, side="left")) + 1]]
        size = min(size * 8, len(values))


def seeded_uniform(seed: int) -> Callable[[int], float]:
    """Random numbers by output position, float64 in [0, 1) with 53 bits: one Philox4x64 block per (seed, position).

    Counter-based, so position 7 has the same number whether it comes alone, in a batch or after accepted drafts: one
    seed, one text, under every policy. Seeds are taken modulo 2^64.
    """
    key = int(seed) % 2**64

    def uniform(position: int) -> float:
        return int(np.random.Philox(key=key, counter=position).random_raw() >> 11) * 2.0**-53

    return uniform


def logprobs(row: np.ndarray, token: int, k: int) -> TokenLogprob:
    """Natural log-probability of token and of the k best tokens (among equals the lower ids) for logits float32
    [vocabulary], under the softmax as it is: no temperature, no filter. k 0 gives no alternatives. Of tokens as probable as
    others, the rank is the best one."""
    highest = row.max()
    _check_finite(highest)
    shifted = row.astype(np.float64) - float(highest)
    with np.errstate(under="ignore"):
        normaliser = float(np.log(np.exp(shifted).sum()))
    best: list[int] = []
    k = min(k, len(row))
    if k > 0:
        floor = np.partition(row, len(row) - k)[len(row) - k]
        candidates = np.flatnonzero(row >= floor)
        best = candidates[np.argsort(-row[candidates], kind="stable")][:k].tolist()
    return TokenLogprob(
        token=int(token),
        logprob=float(shifted[token]) - normaliser,
        alternatives=tuple((other, float(shifted[other]) - normaliser) for other in best),
        rank=int((row > row[token]).sum()) + 1,
    )


def _check_finite(highest: float) -> None:
    if not np.isfinite(highest):
        raise ValueError(f"the target's largest logit is {highest}; it must be finite. Check the target's weights.")
