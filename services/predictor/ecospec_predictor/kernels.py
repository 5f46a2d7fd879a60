"""What lies between the matrix products of the predictor, compiled: at the sizes of one draft tree, a library call for each
small operation costs more than its arithmetic.

Arrays of activations are float32, or uint16 that holds the bits of bfloat16; sums are float32. A row's result does not depend
on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

EPSILON = np.float32(np.finfo(np.float32).eps)  # of the norms; torch's default


def _compiled(function: Callable[..., Any]) -> Callable[..., None]:
    """Compile on first use, with a disk cache where one can be written, else without (a read-only container)."""
    options = {"fastmath": {"contract", "reassoc", "nsz"}, "nogil": True}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


def _wide(value):  # type: ignore[no-untyped-def]
    """An activation as float32; compiled code only."""
    raise NotImplementedError


@overload(_wide, inline="always")
def _wide_of(value):  # type: ignore[no-untyped-def]
    if isinstance(value, types.Float):
        return lambda value: value
    return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _store(array, row, column, value):  # type: ignore[no-untyped-def]
    """Write a float32, rounded to the array's kind of activation; compiled code only."""
    raise NotImplementedError


@overload(_store, inline="always")
def _store_into(array, row, column, value):  # type: ignore[no-untyped-def]
    def as_float(array, row, column, value):  # type: ignore[no-untyped-def]
        array[row, column] = value

    def as_bits(array, row, column, value):  # type: ignore[no-untyped-def]
        bits = np.float32(value).view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        array[row, column] = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

    return as_float if isinstance(array.dtype, types.Float) else as_bits


@_compiled
def gather_norm(table: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """out[i] = table[rows[i]] over its root mean square. table [n, size], out [len(rows), size]: activations."""
    for i in range(len(rows)):
        row, total = table[rows[i]], np.float32(0)
        for j in range(len(row)):
            value = _wide(row[j])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(table.shape[1]) + EPSILON)
        for j in range(len(row)):
            _store(out, i, j, _wide(row[j]) * factor)


@_compiled
def add_norm(x: np.ndarray, more: np.ndarray, out: np.ndarray) -> None:
    """x += more; out = x over its root mean square. x: float32 [n, size]; more, out: activations [n, size]."""
    for i in range(len(x)):
        total = np.float32(0)
        for j in range(x.shape[1]):
            value = x[i, j] + _wide(more[i, j])
            x[i, j] = value
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(x.shape[1]) + EPSILON)
        for j in range(x.shape[1]):
            _store(out, i, j, x[i, j] * factor)


@_compiled
def attend(
    qkv: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    places: np.ndarray,
    first: np.ndarray,
    seen: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    heads: int,
    out: np.ndarray,
) -> None:
    """Attention of n rows, each over the places that it may look at. qkv: activations [n, 3 * size], out: [n, size]; cos, sin:
    float32 [n, head size / 2] of the rows' positions; keys (turned), values: float32 [places, size], where row i writes its
    own at places[i]; row i looks at places seen[first[i]:first[i + 1]]."""
    n, size = out.shape
    head, half = size // heads, size // heads // 2
    for i in range(n):
        row, key = qkv[i], keys[places[i]]
        for h in range(heads):
            begin = h * head
            for j in range(half):
                a, b = _wide(row[size + begin + j]), _wide(row[size + begin + half + j])
                key[begin + j] = a * cos[i, j] - b * sin[i, j]
                key[begin + half + j] = b * cos[i, j] + a * sin[i, j]
        value = values[places[i]]
        for j in range(size):
            value[j] = _wide(row[2 * size + j])
    query, total = np.empty(head, np.float32), np.empty(head, np.float32)
    scores = np.empty(max(1, np.max(first[1:] - first[:-1])), np.float32)
    scale = np.float32(1 / np.sqrt(head))
    for i in range(n):
        row, looks = qkv[i], seen[first[i] : first[i + 1]]
        for h in range(heads):
            begin = h * head
            for j in range(half):
                a, b = _wide(row[begin + j]) * scale, _wide(row[begin + half + j]) * scale
                query[j] = a * cos[i, j] - b * sin[i, j]
                query[half + j] = b * cos[i, j] + a * sin[i, j]
            for k in range(len(looks)):
                key = keys[looks[k]]  # one row at a time: the loops over it become vector code
                score = np.float32(0)
                for j in range(head):
                    score += query[j] * key[begin + j]
                scores[k] = score
            highest = scores[0]
            for k in range(1, len(looks)):
                highest = max(highest, scores[k])
            weights = np.float32(0)
            for k in range(len(looks)):
                scores[k] = np.exp(scores[k] - highest)
                weights += scores[k]
            total[:] = np.float32(0)
            for k in range(len(looks)):
                weight, value = scores[k], values[looks[k]]
                for j in range(head):
                    total[j] += weight * value[begin + j]
            for j in range(head):
                _store(out, i, begin + j, total[j] / weights)


@_compiled
def top_k(scores: np.ndarray, out: np.ndarray) -> None:
    """The columns of the highest scores of each row, best first, of equal ones the lower column. scores: activations
    [n, columns], at most 65,536 columns, no NaN; out: an unsigned integer array [n, k]."""
    columns = scores.shape[1]
    order = np.empty(
        columns, np.uint64
    )  # the score's bits, made to sort as a number, above the complement of the column
    for i in range(len(scores)):
        for j in range(columns):
            bits = np.float32(_wide(scores[i, j])).view(np.uint32)
            flip = np.uint32(0xFFFFFFFF) if bits >> np.uint32(31) else np.uint32(0x80000000)
            order[j] = (np.uint64(bits ^ flip) << np.uint64(16)) | np.uint64(65535 - j)
        for k in range(out.shape[1]):
            best = np.uint64(0)
            for j in range(columns):
                best = max(best, order[j])
            out[i, k] = np.uint64(65535) - (best & np.uint64(65535))
            for j in range(columns):
                order[j] = np.uint64(0) if order[j] == best else order[j]
