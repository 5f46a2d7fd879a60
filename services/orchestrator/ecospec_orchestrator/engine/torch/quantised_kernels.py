"""CPU kernels over float32, MXFP4 and FP8 weights: the stored bytes are read once, whatever the rows of the step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import njit, prange
from numba.core.errors import TypingError
from numba.extending import overload

from .kernels import CHUNK, OUTPUTS, ROWS, _count_up, _products
from .tiles import FLOAT32, FP8, MXFP4, Format, decoder_of, tile_of


def _tiles_of(format: Format) -> Callable[..., None]:
    """A compiled function for up to ROWS rows of OUTPUTS outputs."""
    one, two, three, four = (tile_of(format, OUTPUTS, rows) for rows in (1, 2, 3, 4))

    @njit
    def few_rows(weight, scale, o, x, row_of_pair, first, last, out, column):  # type: ignore[no-untyped-def]
        if last - first == 4:
            four(weight, scale, o, x, row_of_pair, first, out, column)
        elif last - first == 1:
            one(weight, scale, o, x, row_of_pair, first, out, column)
        elif last - first == 2:
            two(weight, scale, o, x, row_of_pair, first, out, column)
        elif last - first == 3:
            three(weight, scale, o, x, row_of_pair, first, out, column)

    return few_rows  # type: ignore[no-any-return]


_float32_rows, _float32_single = _tiles_of(FLOAT32), tile_of(FLOAT32, 1, 1)


@njit
def _float32_products(weight, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
    """As kernels._products, of float32 weights."""
    o = begin
    while o + OUTPUTS <= end:
        for p in range(first, last, ROWS):
            _float32_rows(weight, weight, o, x, row_of_pair, p, min(last, p + ROWS), out, o)
        o += OUTPUTS
    while o < end:
        for p in range(first, last):
            _float32_single(weight, weight, o, x, row_of_pair, p, out, o)
        o += 1


def _quantised_products(format: Format) -> Callable[..., None]:
    """kernels._products of a format's weights and scales.

    A few rows widen as they go; more rows share what was widened once into the first-level cache. The sums are the same.
    """
    rows_at_once, single, decode = _tiles_of(format), tile_of(format, 1, 1), decoder_of(format, OUTPUTS)

    @njit
    def products(weight, scale, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
        many = last - first > ROWS
        widened = np.empty((OUTPUTS if many else 0, x.shape[1]), np.float32)
        o = begin
        while o + OUTPUTS <= end:
            if many:
                decode(weight, scale, o, widened)
                for p in range(first, last, ROWS):
                    _float32_rows(widened, widened, 0, x, row_of_pair, p, min(last, p + ROWS), out, o)
            else:
                rows_at_once(weight, scale, o, x, row_of_pair, first, last, out, o)
            o += OUTPUTS
        while o < end:
            for p in range(first, last):
                single(weight, scale, o, x, row_of_pair, p, out, o)
            o += 1

    return products  # type: ignore[no-any-return]


_mxfp4_products, _fp8_products = _quantised_products(MXFP4), _quantised_products(FP8)


def products(weights, matrix, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
    """For compiled code: out[p, o] = weights[matrix][o] . x[row_of_pair[p]] for p in [first, last), o in [begin, end).

    weights: of M matrices [O, I], one of: (uint16 [M, O, I],) bfloat16 bits; (float32 [M, O, I],); MXFP4 (uint8 [M, O, I/2],
    uint8 [M, O, I/32]); FP8 (uint8 [M, O, I], float32 [M, ceil(O/128), ceil(I/128)], the scales times 2^FP8_SHIFT).
    All rows pass while a few weight rows are in the first-level cache: they come from memory once.
    """
    raise NotImplementedError("only compiled code can call this.")


@overload(products)
def _products_of(weights, matrix, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
    kinds = [str(array.dtype) for array in weights]
    if kinds == ["uint16"]:
        return lambda weights, matrix, begin, end, x, row_of_pair, first, last, out: _products(
            weights[0][matrix], begin, end, x, row_of_pair, first, last, out
        )
    if kinds == ["float32"]:
        return lambda weights, matrix, begin, end, x, row_of_pair, first, last, out: _float32_products(
            weights[0][matrix], begin, end, x, row_of_pair, first, last, out
        )
    if kinds == ["uint8", "uint8"]:
        return lambda weights, matrix, begin, end, x, row_of_pair, first, last, out: _mxfp4_products(
            weights[0][matrix], weights[1][matrix], begin, end, x, row_of_pair, first, last, out
        )
    if kinds == ["uint8", "float32"]:
        return lambda weights, matrix, begin, end, x, row_of_pair, first, last, out: _fp8_products(
            weights[0][matrix], weights[1][matrix], begin, end, x, row_of_pair, first, last, out
        )
    raise TypingError(f"no products of weights stored as {kinds}.")


@njit(parallel=True, cache=True)
def fp8_linear_rows(weight, scale, x, out):  # type: ignore[no-untyped-def]
    """out[r] = W x[r]. weight, scale: FP8 as in `products`, of one matrix (M = 1); x: float32 [R, I]; out: float32 [R, O]."""
    outputs, rows = weight.shape[1], x.shape[0]
    identity = _count_up(rows)
    for chunk in prange((outputs + CHUNK - 1) // CHUNK):
        end = min(outputs, chunk * CHUNK + CHUNK)
        products((weight, scale), 0, chunk * CHUNK, end, x, identity, 0, rows, out)
