"""The inner loop of pack_bitsets, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

# Views of received bytes are read-only; a writable array may be passed for a read-only one, but not the reverse.
_SIGNATURES = [
    types.int64(types.Array(dtype, 2, "C", readonly=True), types.int64, types.uint64[:, ::1])
    for dtype in (types.uint8, types.uint16, types.int64)
]


def _compiled(function: Callable[..., Any]) -> Callable[..., int]:
    """Compile with a disk cache where one can be written, else without (a read-only container)."""
    try:
        return njit(_SIGNATURES, cache=True)(function)
    except RuntimeError:
        return njit(_SIGNATURES)(function)


@_compiled
def pack(experts: np.ndarray, count: int, bits: np.ndarray) -> int:
    """experts [rows, k]; bits uint64 [rows, words], zeroed, is filled. Returns the first bad row, or -1 when all is well."""
    for row in range(experts.shape[0]):
        for j in range(experts.shape[1]):
            expert = np.int64(experts[row, j])
            if expert < 0 or expert >= count:
                return row
            bits[row, expert >> 6] |= np.uint64(1) << np.uint64(expert & 63)
    return -1
