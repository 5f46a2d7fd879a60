"""Triton kernels of tree-masked attention over a paged cache. Importing this file needs triton.

Every row is computed by itself, from what the arrays say it sees: no shape depends on the step, and no result on other rows.
Products are of float32 in three TensorFloat-32 parts, which is float32 to its last bits and runs on the matrix units.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(32)  # slots at a time: the most that a 192-wide head compiles for without spilling registers


@triton.jit(do_not_specialize=["table_width"])
def write_rows(
    key,
    value,
    keys,
    values,
    pages,
    slot,
    table_width,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put each row's key and value into its slot of the cache. Grid: (rows, KV_HEADS). Arrays as in attend.

    key, value: float32 [rows, KV_HEADS, KEY or VALUE]. A row of slot -1 is padding and is written nowhere.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(slot + row)
    if place >= 0:
        page = tl.load(pages + row * table_width + place // PAGE)
        at = (page * KV_HEADS + head) * PAGE + place % PAGE
        column = tl.arange(0, BLOCK)
        source = (row * KV_HEADS + head).to(tl.int64)
        k = tl.load(key + source * KEY + column, mask=column < KEY, other=0.0)
        v = tl.load(value + source * VALUE + column, mask=column < VALUE, other=0.0)
        tl.store(keys + at * KEY + column, k, mask=column < KEY)
        tl.store(values + at * VALUE + column, v, mask=column < VALUE)


@triton.jit(do_not_specialize=["table_width", "own_width", "window"])
def attend(
    query,
    keys,
    values,
    pages,
    run,
    own,
    own_count,
    sinks,
    out,
    scaling,
    window,
    table_width,
    own_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    SINKS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Attention of one row's GROUP query heads over the slots that it sees. Grid: (rows, KV_HEADS).

    query: float32 [rows, KV_HEADS GROUP, KEY]; keys, values: float32 [pages, KV_HEADS, PAGE, KEY or VALUE]; pages: int64
    [rows, table_width], the pages of the row's sequence; run: int64 [rows], slots seen from 0 on; own: int64
    [rows, own_width], slots seen behind these, of which own_count [rows] are real; window: of all seen slots only so many of
    the last ones count (0: all); sinks: float32 [KV_HEADS GROUP], read if SINKS; out: float32 [rows, KV_HEADS GROUP, VALUE].
    A row that sees nothing (padding) gets zeros.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    in_run = tl.load(run + row)
    seen = in_run + tl.load(own_count + row)
    first = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    member, k_column, v_column = tl.arange(0, GROUP_BLOCK), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    query_head = (row * KV_HEADS + head).to(tl.int64) * GROUP + member
    q = tl.load(
        query + query_head[:, None] * KEY + k_column[None, :],
        mask=(member[:, None] < GROUP) & (k_column[None, :] < KEY),
        other=0.0,
    )
    if SINKS:  # a logit that takes its share and gives nothing
        top = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0)
        total = tl.full((GROUP_BLOCK,), 1.0, tl.float32)
    else:
        top = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_BLOCK,), tl.float32)
    mixed = tl.zeros((GROUP_BLOCK, VALUE_BLOCK), tl.float32)
    for begin in range(first, seen, TILE):
        number = begin + tl.arange(0, TILE)
        real = number < seen
        behind = number >= in_run
        place = tl.load(own + row * own_width + number - in_run, mask=real & behind, other=0)
        place = tl.where(behind, place, number)
        page = tl.load(pages + row * table_width + place // PAGE, mask=real, other=0)
        at = (page * KV_HEADS + head) * PAGE + place % PAGE
        k = tl.load(
            keys + at[None, :] * KEY + k_column[:, None], mask=real[None, :] & (k_column[:, None] < KEY), other=0.0
        )
        score = tl.dot(q, k, input_precision="tf32x3") * scaling
        score = tl.where(real[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        share = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        v = tl.load(
            values + at[:, None] * VALUE + v_column[None, :],
            mask=real[:, None] & (v_column[None, :] < VALUE),
            other=0.0,
        )
        total = total * shrink + tl.sum(share, 1)
        mixed = mixed * shrink[:, None] + tl.dot(share, v, input_precision="tf32x3")
        top = higher
    tl.store(
        out + query_head[:, None] * VALUE + v_column[None, :],
        mixed / tl.where(total > 0, total, 1.0)[:, None],
        mask=(member[:, None] < GROUP) & (v_column[None, :] < VALUE),
    )
