"""CPU kernel of the routed experts: each one that is hit is read once for all of its rows, in parallel over experts and outputs."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from .kernels import CHUNK, _count_up, exp, silu_gate
from .quantised_kernels import products

SILU, GPT_OSS = 0, 1  # gates


@njit
def _group(index, experts):  # type: ignore[no-untyped-def]
    """The (row, slot) pairs of index, int64 [R, k], ordered by expert: the distinct experts [D], where each one's pairs start
    [D + 1], the row and the expert of each pair [R k], and the place in this order of every row's slots [R, k]."""
    rows, top_k = index.shape
    end = np.zeros(experts + 1, np.int64)  # of expert e's pairs so far, at e + 1
    for row in range(rows):
        for slot in range(top_k):
            end[index[row, slot] + 1] += 1
    hit, starts = np.empty(experts, np.int64), np.zeros(experts + 1, np.int64)
    distinct = 0
    for expert in range(experts):
        if end[expert + 1]:
            hit[distinct] = expert
            distinct += 1
            starts[distinct] = starts[distinct - 1] + end[expert + 1]
        end[expert + 1] += end[expert]
    pairs = rows * top_k
    row_of_pair, expert_of_pair = np.empty(pairs, np.int64), np.empty(pairs, np.int64)
    place = np.empty((rows, top_k), np.int64)
    for row in range(rows):
        for slot in range(top_k):
            expert = index[row, slot]
            pair = end[expert]
            end[expert] += 1
            row_of_pair[pair], expert_of_pair[pair], place[row, slot] = row, expert, pair
    return hit[:distinct], starts[: distinct + 1], row_of_pair, expert_of_pair, place


@njit
def _add(values, more):  # type: ignore[no-untyped-def]
    for i in range(values.shape[0]):
        values[i] += more[i]


@njit(error_model="numpy")
def _gpt_oss_gate(gate, up, alpha, limit):  # type: ignore[no-untyped-def]
    """gate = (up + 1) * gate * sigmoid(alpha * gate), both clamped before; float32 [I] each."""
    for i in range(gate.shape[0]):
        g, u = min(gate[i], limit), min(max(up[i], -limit), limit)
        gate[i] = (u + np.float32(1)) * (g / (np.float32(1) + exp(-alpha * g)))


@njit
def _combine(row, parts, place, index, shares, down_bias, out):  # type: ignore[no-untyped-def]
    """A row's weighted sum over its experts, in its own order."""
    for o in range(out.shape[1]):
        out[row, o] = 0
    for slot in range(index.shape[1]):
        expert, share, part = index[row, slot], shares[row, slot], parts[place[row, slot]]
        if down_bias.shape[0]:
            _add(part, down_bias[expert])
        for o in range(out.shape[1]):
            out[row, o] += share * part[o]


@njit(parallel=True, cache=True)
def experts_rows(gate_up, down, gate_up_bias, down_bias, gate, x, index, shares, out):  # type: ignore[no-untyped-def]
    """Gated feed-forward of the routed experts only; a row's experts are summed in its own order.

    gate_up: as in quantised_kernels.products, of 2 E matrices [I, H]: expert e's gate is 2 e, its up projection 2 e + 1;
    down: the same of E matrices [H, I]; gate_up_bias: float32 [E, 2 I] (gate first) and down_bias: float32 [E, H], or both
    without rows; gate: (SILU or GPT_OSS, float32 alpha, float32 limit); x: float32 [R, H]; index: int64 [R, k]; shares:
    float32 [R, k] routing weights; out: float32 [R, H].
    """
    experts, hidden, width = down[0].shape[0], x.shape[1], gate_up[0].shape[1]
    kind, alpha, limit = gate
    biased = gate_up_bias.shape[0] > 0
    hit, starts, row_of_pair, expert_of_pair, place = _group(index, experts)
    pairs = row_of_pair.shape[0]
    both, parts = np.empty((2, pairs, width), np.float32), np.empty((pairs, hidden), np.float32)
    chunks = (width + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * 2 * chunks):
        d, half, chunk = task // (2 * chunks), task // chunks % 2, task % chunks
        begin, end = chunk * CHUNK, min(width, chunk * CHUNK + CHUNK)
        products(gate_up, 2 * hit[d] + half, begin, end, x, row_of_pair, starts[d], starts[d + 1], both[half])
    inner = both[0]
    for p in prange(pairs):
        gate_row, up_row, expert = both[0, p], both[1, p], expert_of_pair[p]
        if biased:
            _add(gate_row, gate_up_bias[expert, :width])
            _add(up_row, gate_up_bias[expert, width:])
        if kind == SILU:
            silu_gate(gate_row, up_row)
        else:
            _gpt_oss_gate(gate_row, up_row, alpha, limit)
    identity = _count_up(pairs)
    chunks = (hidden + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * chunks):
        d, chunk = task // chunks, task % chunks
        begin, end = chunk * CHUNK, min(hidden, chunk * CHUNK + CHUNK)
        products(down, hit[d], begin, end, inner, identity, starts[d], starts[d + 1], parts)
    if index.shape[0] == 1:
        _combine(0, parts, place, index, shares, down_bias, out)
    else:
        for row in prange(index.shape[0]):
            _combine(row, parts, place, index, shares, down_bias, out)
