"""Triton kernels of the routed experts. Importing this file needs triton; experts_triton.py imports it on first use.

Weights are the rows of every product and tokens its columns: decoding has many weights and few tokens. Each weight tile is read
once for all tokens of its expert. Activations stay float32 in memory; a product takes them as two bfloat16 parts (high + low,
16 bits of mantissa), weights are exact in bfloat16, and sums are float32. A weight tile has fewer than 64 rows, so that every
token count is computed by the same instruction (a warp's 16 x 8 x 16 product) in the same order: what a token gets does not
depend on how many others chose its expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE_BLOCK = tl.constexpr(128)  # of FP8 weights: one scale per 128 x 128 values


@triton.jit(do_not_specialize=["pair_count"])
def group_pairs(
    index,
    hit_experts,
    starts,
    counts,
    pairs,
    pair_count,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program per slot s: finds the s-th smallest hit expert and lists its (token, slot) pairs, in ascending order.

    index: int64 [pair_count], flat; outside [0, EXPERTS) a pair is of a padding row and is listed nowhere. Writes, int32:
    hit_experts, starts, counts [slots] (count 0: no s-th expert) and pairs [pair_count], where slot s owns counts[s] entries
    from starts[s] on. BINS > EXPERTS and PAIRS >= pair_count are powers of two.
    """
    slot = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    expert = tl.load(index + pair, mask=pair < pair_count, other=EXPERTS)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS).to(tl.int32)
    bins = tl.arange(0, BINS)
    loads = tl.where(bins < EXPERTS, tl.histogram(expert, BINS), 0)
    mine = (loads > 0) & (tl.cumsum((loads > 0).to(tl.int32), 0) == slot + 1)
    count = tl.sum(tl.where(mine, loads, 0), 0)
    tl.store(counts + slot, count)
    if count > 0:
        chosen = tl.sum(tl.where(mine, bins, 0), 0)
        start = tl.sum(tl.where(bins < chosen, loads, 0), 0)
        is_mine = expert == chosen
        place = start + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(hit_experts + slot, chosen)
        tl.store(starts + slot, start)
        tl.store(pairs + place, pair, mask=is_mine)


@triton.jit
def _add_product(total, weight, high, low, scale, QUANTISED: tl.constexpr):
    """total + scale * weight @ (high + low); weight [rows, k], high and low bfloat16 [k, tokens], scale float32 [rows]."""
    if QUANTISED:
        exact = weight.to(tl.bfloat16)
        part = tl.dot(exact, high)
        part = tl.dot(exact, low, part)
        total += part * scale[:, None]
    else:
        total = tl.dot(weight, high, total)
        total = tl.dot(weight, low, total)
    return total


@triton.jit
def _two_parts(x):
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _gate_up_tile(
    weights,
    scales,
    hidden,
    inner,
    pairs,
    count,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """inner[pair, rows] of one expert; weights, scales and pairs point at its own."""
    scale_rows: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    scale_columns: tl.constexpr = (HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK
    for first in range(0, count, TOKENS):
        place = first + tl.arange(0, TOKENS)
        pair = tl.load(pairs + place, mask=place < count, other=0)
        token = (pair // TOP_K).to(tl.int64)
        gate = tl.zeros((rows.shape[0], TOKENS), tl.float32)
        up = tl.zeros((rows.shape[0], TOKENS), tl.float32)
        gate_scale = tl.zeros((rows.shape[0],), tl.float32)
        up_scale = tl.zeros((rows.shape[0],), tl.float32)
        for begin in range(0, HIDDEN, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(
                hidden + token[None, :] * HIDDEN + k[:, None],
                mask=(k[:, None] < HIDDEN) & (place[None, :] < count),
                other=0.0,
            )
            high, low = _two_parts(x)
            inside = (rows[:, None] < WIDTH) & (k[None, :] < HIDDEN)
            at = rows[:, None] * HIDDEN + k[None, :]
            gate_weight = tl.load(weights + at, mask=inside, other=0.0)
            up_weight = tl.load(weights + WIDTH * HIDDEN + at, mask=inside, other=0.0)
            if QUANTISED:
                own_scale = scales + rows // SCALE_BLOCK * scale_columns + begin // SCALE_BLOCK
                gate_scale = tl.load(own_scale, mask=rows < WIDTH, other=0.0)
                up_scale = tl.load(own_scale + scale_rows * scale_columns, mask=rows < WIDTH, other=0.0)
            gate = _add_product(gate, gate_weight, high, low, gate_scale, QUANTISED)
            up = _add_product(up, up_weight, high, low, up_scale, QUANTISED)
        tl.store(
            inner + pair[None, :] * WIDTH + rows[:, None],
            gate / (1 + tl.exp(-gate)) * up,
            mask=(rows[:, None] < WIDTH) & (place[None, :] < count),
        )


@triton.jit
def gate_up(
    weights,
    scales,
    hidden,
    inner,
    hit_experts,
    starts,
    counts,
    pairs,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
):
    """inner = silu(gate . x) * (up . x) for every pair. Grid: (blocks of BLOCK_ROWS of the WIDTH rows, slots).

    weights: bfloat16 or float8 e4m3 [E, 2 WIDTH, HIDDEN], gate rows first; scales: float32
    [E, 2 ceil(WIDTH / 128), ceil(HIDDEN / 128)], the gate's and behind them up's (read if QUANTISED); hidden: float32 [T, HIDDEN]; inner: float32 [T TOP_K, WIDTH]. MOST_TOKENS: 16, 32 or 64,
    the widest tile compiled; an expert with more tokens is read again for the next tile.
    """
    slot = tl.program_id(1)
    count = tl.load(counts + slot)
    if count == 0:
        return
    expert = tl.load(hit_experts + slot).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    blocks: tl.constexpr = 2 * ((WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK) * ((HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK)
    own, own_scales = weights + expert * (2 * WIDTH * HIDDEN), scales + expert * blocks
    own_pairs = pairs + tl.load(starts + slot)
    if MOST_TOKENS == 16 or count <= 16:
        _gate_up_tile(
            own, own_scales, hidden, inner, own_pairs, count, rows, HIDDEN, WIDTH, TOP_K, QUANTISED, BLOCK_K, 16
        )
    elif MOST_TOKENS == 32 or count <= 32:
        _gate_up_tile(
            own, own_scales, hidden, inner, own_pairs, count, rows, HIDDEN, WIDTH, TOP_K, QUANTISED, BLOCK_K, 32
        )
    else:
        _gate_up_tile(
            own, own_scales, hidden, inner, own_pairs, count, rows, HIDDEN, WIDTH, TOP_K, QUANTISED, BLOCK_K, 64
        )


@triton.jit
def _down_tile(
    weights,
    scales,
    inner,
    parts,
    pairs,
    count,
    rows,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """parts[pair, rows] of one expert; weights, scales and pairs point at its own."""
    scale_columns: tl.constexpr = (WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK
    for first in range(0, count, TOKENS):
        place = first + tl.arange(0, TOKENS)
        pair = tl.load(pairs + place, mask=place < count, other=0)
        total = tl.zeros((rows.shape[0], TOKENS), tl.float32)
        scale = tl.zeros((rows.shape[0],), tl.float32)
        for begin in range(0, WIDTH, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(
                inner + pair[None, :] * WIDTH + k[:, None],
                mask=(k[:, None] < WIDTH) & (place[None, :] < count),
                other=0.0,
            )
            high, low = _two_parts(x)
            weight = tl.load(
                weights + rows[:, None] * WIDTH + k[None, :],
                mask=(rows[:, None] < HIDDEN) & (k[None, :] < WIDTH),
                other=0.0,
            )
            if QUANTISED:
                scale = tl.load(
                    scales + rows // SCALE_BLOCK * scale_columns + begin // SCALE_BLOCK, mask=rows < HIDDEN, other=0.0
                )
            total = _add_product(total, weight, high, low, scale, QUANTISED)
        tl.store(
            parts + pair[None, :] * HIDDEN + rows[:, None],
            total,
            mask=(rows[:, None] < HIDDEN) & (place[None, :] < count),
        )


@triton.jit
def down(
    weights,
    scales,
    inner,
    parts,
    hit_experts,
    starts,
    counts,
    pairs,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
):
    """parts = down . inner for every pair. Grid: (blocks of BLOCK_ROWS of the HIDDEN rows, slots).

    weights: bfloat16 or float8 e4m3 [E, HIDDEN, WIDTH]; scales: float32 [E, ceil(HIDDEN / 128), ceil(WIDTH / 128)]; parts:
    float32 [T TOP_K, HIDDEN]; the rest as in gate_up.
    """
    slot = tl.program_id(1)
    count = tl.load(counts + slot)
    if count == 0:
        return
    expert = tl.load(hit_experts + slot).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    blocks: tl.constexpr = ((HIDDEN + SCALE_BLOCK - 1) // SCALE_BLOCK) * ((WIDTH + SCALE_BLOCK - 1) // SCALE_BLOCK)
    own, own_scales = weights + expert * (HIDDEN * WIDTH), scales + expert * blocks
    own_pairs = pairs + tl.load(starts + slot)
    if MOST_TOKENS == 16 or count <= 16:
        _down_tile(own, own_scales, inner, parts, own_pairs, count, rows, HIDDEN, WIDTH, QUANTISED, BLOCK_K, 16)
    elif MOST_TOKENS == 32 or count <= 32:
        _down_tile(own, own_scales, inner, parts, own_pairs, count, rows, HIDDEN, WIDTH, QUANTISED, BLOCK_K, 32)
    else:
        _down_tile(own, own_scales, inner, parts, own_pairs, count, rows, HIDDEN, WIDTH, QUANTISED, BLOCK_K, 64)


@triton.jit
def combine(
    parts,
    index,
    shares,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = sum over its slots, in their order, of share * part. Grid: (tokens, blocks of HIDDEN).

    A slot outside [0, EXPERTS) (a padding row) adds nothing; its part was never written.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(index + pair)
        written = tl.where((expert >= 0) & (expert < EXPERTS), HIDDEN, 0)
        part = tl.load(parts + pair * HIDDEN + column, mask=column < written, other=0.0)
        total += tl.load(shares + pair) * part
    tl.store(out + token * HIDDEN + column, total, mask=column < HIDDEN)
