"""CPU attention over the pages of the KV cache: all rows and heads of a step in one launch, without copies.

A row sees a list of slots, ascending: a run of committed positions, then the chosen rows behind them (itself and its ancestors).
Scores, softmax and weighted sum follow that list in blocks of BLOCK, so a row's result depends, in every bit, on what it sees
alone: not on its companions, nor on whether it was computed in a tree, in a plain step or in a prefill.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from .cache import PAGE_TOKENS
from .kernels import dot, exp, weighted_sum

BLOCK = 256  # seen slots per softmax block
FEW_TASKS = 32  # with fewer (row, kv head) pairs than this, their blocks are shared out among the threads, too


@njit
def _seen(row, plan, window):  # type: ignore[no-untyped-def]
    """(first committed position, number of committed ones, first own slot, number of own ones) that a row sees."""
    committed, own = plan[2][row], plan[4][row]
    if window <= 0:
        return 0, committed, 0, own
    kept = min(own, window)
    first = max(0, committed - (window - kept))
    return first, committed - first, own - kept, kept


@njit
def _attend_block(q, row, kv_head, group, keys, values, plan, seen, block, scaling, part):  # type: ignore[no-untyped-def]
    """The softmax of one block, unnormalised. part: float32 [group, value_size + 2] gets the weighted values, their weights' sum
    and the largest score."""
    first, committed, own_from, own = seen
    begin = block * BLOCK
    count = min(committed + own, begin + BLOCK) - begin
    kv_heads, size = values.shape[1], values.shape[3]
    table, own_slots = plan[0][plan[1][row]], plan[3][row]
    rows, score = np.empty(count, np.int64), np.empty((group, BLOCK), np.float32)
    for i in range(count):
        at = begin + i
        slot = first + at if at < committed else own_slots[own_from + at - committed]
        rows[i] = (table[slot // PAGE_TOKENS] * kv_heads + kv_head) * PAGE_TOKENS + slot % PAGE_TOKENS
    head, queries, key_rows = kv_head * group, q[row], keys.reshape(-1, keys.shape[3])
    for i in range(count):
        for g in range(group):
            score[g, i] = dot(key_rows, rows[i], queries, head + g) * scaling
    value_rows = values.reshape(-1, size)
    for g in range(group):
        scores, highest = score[g], score[g, 0]
        for i in range(count):
            highest = max(highest, scores[i])
        for i in range(count):
            scores[i] = exp(scores[i] - highest)
        scores[count:] = 0
        a = b = c = d = np.float32(0)  # four sums side by side wait less for each other
        for i in range(0, BLOCK, 4):
            a, b, c, d = a + scores[i], b + scores[i + 1], c + scores[i + 2], d + scores[i + 3]
        weighted_sum(score, g, rows, count, value_rows, part)
        part[g, size], part[g, size + 1] = (a + b) + (c + d), highest


@njit
def _merge(total, part):  # type: ignore[no-untyped-def]
    """Add a further block to `total`; both as part in _attend_block."""
    size = part.shape[1] - 2
    for g in range(part.shape[0]):
        highest = max(total[g, size + 1], part[g, size + 1])
        old, new = exp(total[g, size + 1] - highest), exp(part[g, size + 1] - highest)
        for d in range(size + 1):
            total[g, d] = total[g, d] * old + part[g, d] * new
        total[g, size + 1] = highest


@njit(error_model="numpy")
def _finish(total, row, head, sinks, out):  # type: ignore[no-untyped-def]
    """Normalise the heads from `head` on. A sink takes its share of the softmax and gives no value."""
    size = total.shape[1] - 2
    for g in range(total.shape[0]):
        scale, weights = np.float32(1), total[g, size]
        if sinks.shape[0]:
            highest = max(total[g, size + 1], sinks[head + g])
            scale = exp(total[g, size + 1] - highest)
            weights = weights * scale + exp(sinks[head + g] - highest)
        factor = scale / weights
        for d in range(size):
            out[row, head + g, d] = total[g, d] * factor


@njit
def _blocks(seen):  # type: ignore[no-untyped-def]
    return (seen[1] + seen[3] + BLOCK - 1) // BLOCK


@njit
def _attend_row(q, row, kv_head, group, keys, values, plan, scaling, window, sinks, out):  # type: ignore[no-untyped-def]
    seen = _seen(row, plan, window)
    total = np.empty((group, values.shape[3] + 2), np.float32)
    _attend_block(q, row, kv_head, group, keys, values, plan, seen, 0, scaling, total)
    if _blocks(seen) > 1:
        part = np.empty_like(total)
        for block in range(1, _blocks(seen)):
            _attend_block(q, row, kv_head, group, keys, values, plan, seen, block, scaling, part)
            _merge(total, part)
    _finish(total, row, kv_head * group, sinks, out)


@njit
def _longest(plan, window):  # type: ignore[no-untyped-def]
    """Blocks of the row that sees most."""
    blocks = 1
    for row in range(plan[1].shape[0]):
        blocks = max(blocks, _blocks(_seen(row, plan, window)))
    return blocks


@njit(parallel=True)
def attend(q, keys, values, plan, scaling, window, sinks, out):  # type: ignore[no-untyped-def]
    """q: float32 [R, heads, key_size]; keys: float32 [pages, kv_heads, PAGE_TOKENS, key_size] and values, of one layer; plan: as
    step_plan.StepPlan.arrays; window: positions that a row sees at most, itself included, 0 for all; sinks: float32 [heads] or [0];
    out: float32 [R, heads, value_size]."""
    rows, heads, kv_heads = q.shape[0], q.shape[1], keys.shape[1]
    group = heads // kv_heads
    blocks = _longest(plan, window) if rows * kv_heads < FEW_TASKS else 1
    if blocks == 1:
        for task in prange(rows * kv_heads):
            _attend_row(q, task // kv_heads, task % kv_heads, group, keys, values, plan, scaling, window, sinks, out)
    else:
        parts = np.empty((rows * kv_heads, blocks, group, values.shape[3] + 2), np.float32)
        for task in prange(rows * kv_heads * blocks):
            pair, block = task // blocks, task % blocks
            seen = _seen(pair // kv_heads, plan, window)
            if block < _blocks(seen):
                _attend_block(
                    q,
                    pair // kv_heads,
                    pair % kv_heads,
                    group,
                    keys,
                    values,
                    plan,
                    seen,
                    block,
                    scaling,
                    parts[pair, block],
                )
        for pair in prange(rows * kv_heads):
            row = pair // kv_heads
            for block in range(1, _blocks(_seen(row, plan, window))):
                _merge(parts[pair, 0], parts[pair, block])
            _finish(parts[pair, 0], row, pair % kv_heads * group, sinks, out)


@njit
def write_row(row, key, value, plan, keys, values):  # type: ignore[no-untyped-def]
    """Put a row's key, float32 [kv_heads, key_size], and value into its slot of the cache."""
    slot = plan[5][row]
    page, offset = plan[0][plan[1][row], slot // PAGE_TOKENS], slot % PAGE_TOKENS
    for head in range(key.shape[0]):
        for d in range(key.shape[1]):
            keys[page, head, offset, d] = key[head, d]
        for d in range(value.shape[1]):
            values[page, head, offset, d] = value[head, d]


@njit(parallel=True, cache=True)
def write_and_attend(q, key, value, keys, values, plan, scaling, window, sinks, out):  # type: ignore[no-untyped-def]
    """As attend(), after putting key, float32 [R, kv_heads, key_size], and value into the cache."""
    for row in prange(q.shape[0]):
        write_row(row, key[row], value[row], plan, keys, values)
    attend(q, keys, values, plan, scaling, window, sinks, out)
