"""CPU kernels that read bfloat16 weights once and compute in float32.

Decoding reads far more weight bytes than it computes on, so weights stay bfloat16 in memory and are widened in registers.
Every output element is one dot product in a fixed order, so a row's result does not depend on which rows share the step.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

CHUNK = 32  # output elements per parallel task


@intrinsic
def _widen(typing_context, bits):  # type: ignore[no-untyped-def]
    """bfloat16 bits (uint16) -> float32: the bits are the upper half of the float."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(32)
        wide = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.uint16), generate


@njit(fastmath=True, inline="always")
def _dot(weight, x):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += _widen(weight[i]) * x[i]
    return total


@njit(fastmath=True, parallel=True, cache=True)
def linear_rows(weight, x, out):  # type: ignore[no-untyped-def]
    """out[r] = weight @ x[r]. weight: uint16 (bfloat16 bits) [O, I]; x: float32 [R, I]; out: float32 [R, O]."""
    outputs, rows = weight.shape[0], x.shape[0]
    for chunk in prange((outputs + CHUNK - 1) // CHUNK):
        for o in range(chunk * CHUNK, min(outputs, chunk * CHUNK + CHUNK)):
            for r in range(rows):
                out[r, o] = _dot(weight[o], x[r])


@njit(fastmath=True, parallel=True, cache=True)
def experts_rows(gate_up, down, x, hit, starts, rows, shares, inner, parts):  # type: ignore[no-untyped-def]
    """SwiGLU of the hit experts only, each read once for all of its rows.

    gate_up: uint16 [E, 2 I, H]; down: uint16 [E, H, I]; x: float32 [R, H]; hit: int64 [D] distinct experts;
    starts: int64 [D + 1] into the (expert, row) pairs; rows: int64 [P] row of each pair; shares: float32 [P] routing
    weight; inner: float32 [P, I] scratch; parts: float32 [P, H] result of each pair, weighted.
    """
    width, hidden = down.shape[2], down.shape[1]
    chunks = (width + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * chunks):
        d, chunk = task // chunks, task % chunks
        for o in range(chunk * CHUNK, min(width, chunk * CHUNK + CHUNK)):
            for p in range(starts[d], starts[d + 1]):
                gate = _dot(gate_up[hit[d], o], x[rows[p]])
                up = _dot(gate_up[hit[d], width + o], x[rows[p]])
                inner[p, o] = gate / (np.float32(1) + np.exp(-gate)) * up
    chunks = (hidden + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * chunks):
        d, chunk = task // chunks, task % chunks
        for o in range(chunk * CHUNK, min(hidden, chunk * CHUNK + CHUNK)):
            for p in range(starts[d], starts[d + 1]):
                parts[p, o] = shares[p] * _dot(down[hit[d], o], inner[p])


def set_threads(count: int) -> None:
    """Threads of these kernels, at most the machine's cores."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
