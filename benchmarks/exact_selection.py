"""The exact choice of most tokens per second, by minimum cuts: a yardstick for tests and benchmarks, too slow to serve.

For a fixed rate the best ancestor-closed set is a maximum-weight closure (a project-selection network): nodes earn
P - rate * token_seconds, need their parent and their (layer, expert) pairs, and each pair costs rate * pair_seconds once
for the whole batch. Dinkelbach's iteration around it gives the best ratio of a step alone. One rank, every node known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ecospec_orchestrator.selection.pack import Pack

MAX_CAPACITY = 2**30  # of scipy's flow, which counts in int32


def new_pairs(packed: Pack) -> list[np.ndarray]:
    """Per row, the numbers of its (layer, expert) bits beyond the union of all roots; empty for roots."""
    bits = np.unpackbits(np.ascontiguousarray(packed.experts, "<u8").view(np.uint8), axis=1, bitorder="little").astype(
        bool
    )
    roots = packed.parents < 0
    bits &= ~bits[roots].any(axis=0)
    bits[roots] = False
    return [np.flatnonzero(row) for row in bits]


def objective(
    packed: Pack, chosen: np.ndarray, pairs: Sequence[np.ndarray], token_seconds: Fraction, pair_seconds: Fraction
) -> tuple[Fraction, Fraction]:
    """Exactly, for a bool [rows] mask: the sum of P, and the seconds beyond those of the empty set."""
    rows = np.flatnonzero(chosen)
    distinct: set[int] = set().union(*(pairs[row].tolist() for row in rows))
    gain = sum((Fraction(float(packed.values[row])) for row in rows), Fraction(0))
    return gain, token_seconds * len(rows) + pair_seconds * len(distinct)


def best_closure_at_rate(
    packed: Pack, pairs: Sequence[np.ndarray], rate: Fraction, token_seconds: Fraction, pair_seconds: Fraction
) -> np.ndarray:
    """bool [rows]: the smallest set that maximises the sum of P - rate * seconds.

    Weights become whole numbers: without loss where their common denominator allows, else rounded to a billionth of the
    sum of P, so that the objective is off by at most that much per node and pair.
    """
    nodes = np.flatnonzero(packed.parents >= 0)
    chosen = np.zeros(len(packed.parents), bool)
    weights = [Fraction(float(packed.values[row])) - rate * token_seconds for row in nodes]
    earned = sum((weight for weight in weights if weight > 0), Fraction(0))
    if not earned:
        return chosen
    price = rate * pair_seconds
    scale: Any = math.lcm(price.denominator, *(weight.denominator for weight in weights))
    if scale * max(earned, price, *(abs(weight) for weight in weights)) > MAX_CAPACITY:
        scale = Fraction(MAX_CAPACITY) / earned
    used = np.unique(np.concatenate([pairs[row] for row in nodes])) if len(nodes) else np.empty(0, np.int64)
    source, sink, first_pair = 0, 1, 2 + len(packed.parents)
    pair_price = min(round(price * scale), MAX_CAPACITY)
    edges: list[tuple[int, int, int]] = [(first_pair + at, sink, pair_price) for at in range(len(used)) if pair_price]
    for row, weight in zip(nodes.tolist(), weights, strict=True):
        capacity = min(round(abs(weight) * scale), MAX_CAPACITY)
        if capacity:
            edges.append((source, 2 + row, capacity) if weight > 0 else (2 + row, sink, capacity))
        if packed.parents[packed.parents[row]] >= 0:
            edges.append((2 + row, 2 + int(packed.parents[row]), MAX_CAPACITY))
        edges.extend((2 + row, first_pair + int(at), MAX_CAPACITY) for at in np.searchsorted(used, pairs[row]))
    starts, ends, capacities = (np.array(column, np.int32) for column in zip(*edges, strict=True))
    size = first_pair + len(used)
    network = csr_array((capacities, (starts, ends)), shape=(size, size))
    residual = csr_array(network - maximum_flow(network, source, sink).flow)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, source, return_predecessors=False)
    chosen[[at - 2 for at in reached.tolist() if 2 <= at < first_pair]] = True
    return chosen


def best_closure_exact(
    packed: Pack, fixed_seconds: float, token_seconds: float, pair_seconds: float, rate: float = 0.0
) -> tuple[np.ndarray, float, float]:
    """As goodput_kernel.best_closure: bool [rows], R + sum of P, and seconds. rate at most 0: the step's own best ratio."""
    fixed, token, pair = (Fraction(value) for value in (fixed_seconds, token_seconds, pair_seconds))
    pairs = new_pairs(packed)
    trees = len(packed.offsets) - 1

    def value(chosen: np.ndarray) -> tuple[Fraction, Fraction]:
        gain, extra = objective(packed, chosen, pairs, token, pair)
        return trees + gain, fixed + extra

    if rate > 0:
        chosen = best_closure_at_rate(packed, pairs, Fraction(rate), token, pair)
        tokens, seconds = value(chosen)
        return chosen, float(tokens), float(seconds)
    chosen = np.zeros(len(packed.parents), bool)
    tokens, seconds = value(chosen)
    while True:
        following = best_closure_at_rate(packed, pairs, tokens / seconds, token, pair)
        more, longer = value(following)
        if more * seconds <= tokens * longer:
            return chosen, float(tokens), float(seconds)
        chosen, tokens, seconds = following, more, longer
