"""Vector code for dot products with float32, MXFP4 and FP8 weights, which are widened to float32 in registers.

As in kernels.py, the order in which a dot product is summed is written out as vector code and is the same for every number
of rows, so that a row's result does not depend, in any bit, on the rows that share the step.

Both formats widen through float16, whose layout (sign, exponent, fraction) holds theirs as its upper bits: what differs is the
exponent's bias, a power of two that is put into the block's scale. All of it is exact but for the product of an FP8 value and
its scale, which rounds once, as in the reference (quantised.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from .kernels import AHEAD, FLOAT, INDEX, LANES, WORD, lanes_sum, loop

FP8_SHIFT = 8  # float16's exponent bias less that of E4M3; the scales that the kernels are given hold this power of two
MXFP4_SHIFT = 14  # the same for E2M1
MXFP4_BLOCK, FP8_BLOCK = 32, 128  # inputs that share a scale

BYTE, HALF_BITS, HALF = ir.IntType(8), ir.IntType(16), ir.HalfType()

Widen = Callable[[Any, Any, Any, Any, int], Any]


def _load(builder, row, at, kind):  # type: ignore[no-untyped-def]
    """The value of this kind at `at` elements behind a row's first, wherever that lies."""
    return builder.load(builder.bitcast(builder.gep(row, [at]), kind.as_pointer()), align=1)


def _splat(builder, value, count):  # type: ignore[no-untyped-def]
    if count == 1:
        return value
    vector = builder.insert_element(ir.VectorType(value.type, count)(ir.Undefined), value, WORD(0))
    return builder.shuffle_vector(vector, vector, ir.VectorType(WORD, count)([0] * count))


def _of(kind, count):  # type: ignore[no-untyped-def]
    return kind if count == 1 else ir.VectorType(kind, count)


def _constant(kind, value, count):  # type: ignore[no-untyped-def]
    return kind(value) if count == 1 else ir.VectorType(kind, count)([value] * count)


def _widen_float32(builder, weight, scale, i, count):  # type: ignore[no-untyped-def]
    return _load(builder, weight, i, _of(FLOAT, count))


def _widen_fp8(builder, weight, scale, i, count):  # type: ignore[no-untyped-def]
    """E4M3: sign, 4 bits of exponent, 3 of fraction. The sign is extended by one bit, which the mask takes out again."""
    bits = builder.sext(_load(builder, weight, i, _of(BYTE, count)), _of(HALF_BITS, count))
    bits = builder.shl(bits, _constant(HALF_BITS, 7, count))
    bits = builder.and_(bits, _constant(HALF_BITS, 0xBF80, count))
    value = builder.fpext(builder.bitcast(bits, _of(HALF, count)), _of(FLOAT, count))
    shared = builder.load(builder.gep(scale, [builder.lshr(i, INDEX(7))]))
    return builder.fmul(value, _splat(builder, shared, count))


def _widen_mxfp4(builder, weight, scale, i, count):  # type: ignore[no-untyped-def]
    """E2M1: sign, 2 bits of exponent, 1 of fraction; two values a byte, the lower half first; one E8M0 scale for the 32."""
    packed = builder.zext(
        _load(builder, weight, builder.lshr(i, INDEX(1)), _of(BYTE, count // 2)), _of(WORD, count // 2)
    )
    # The lower half goes to the top of a word's lower 16 bits, the upper half to the top of the upper 16.
    pair = builder.or_(
        builder.shl(packed, _constant(WORD, 12, count // 2)), builder.shl(packed, _constant(WORD, 24, count // 2))
    )
    bits = builder.ashr(builder.bitcast(pair, _of(HALF_BITS, count)), _constant(HALF_BITS, 3, count))
    bits = builder.and_(bits, _constant(HALF_BITS, 0x8E00, count))
    value = builder.fpext(builder.bitcast(bits, _of(HALF, count)), _of(FLOAT, count))
    exponent = builder.zext(builder.load(builder.gep(scale, [builder.lshr(i, INDEX(5))])), WORD)
    # The stored byte is a float32's exponent already.
    shared = builder.bitcast(builder.shl(builder.add(exponent, WORD(MXFP4_SHIFT)), WORD(23)), FLOAT)
    return builder.fmul(value, _splat(builder, shared, count))


def _row(builder, matrix, number):  # type: ignore[no-untyped-def]
    """The address of a C-ordered matrix's row."""
    return builder.gep(matrix.data, [builder.mul(number, builder.extract_value(matrix.shape, 1))])


def _weight_rows(builder, weight, scale, o, outputs, scaled_outputs):  # type: ignore[no-untyped-def]
    """[(address of the weights, address of the scales)] of `outputs` rows from o, of which scaled_outputs share a row of scales."""
    numbers = [builder.add(o, INDEX(k)) for k in range(outputs)]
    return [
        (_row(builder, weight, number), _row(builder, scale, builder.sdiv(number, INDEX(scaled_outputs))))
        for number in numbers
    ]


def _prefetch(builder, rows, elements, distance):  # type: ignore[no-untyped-def]
    """Ask for the bytes `distance` in front of those that `elements` stored elements of each row take, in memory order."""
    pointer = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(builder.gep(rows[0][0], [builder.mul(elements, INDEX(len(rows)))]), pointer)
    builder.call(prefetch, [builder.gep(start, [INDEX(distance)]), WORD(0), WORD(3), WORD(1)])


class Format:
    """How the code of a tile differs between formats: how one vector of `step` weights is widened, how many weights an element
    of the weight array holds, and how many outputs share a row of scales."""

    def __init__(self, widen: Widen, step: int, packed: int, scaled_outputs: int) -> None:
        self.widen, self.step, self.packed, self.scaled_outputs = widen, step, packed, scaled_outputs


FLOAT32 = Format(_widen_float32, LANES, 1, 1)
MXFP4 = Format(_widen_mxfp4, MXFP4_BLOCK, 2, 1)
FP8 = Format(_widen_fp8, LANES, 1, FP8_BLOCK)


def _arrays(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
    return [
        context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def _refuse_strided(*kinds: Any) -> None:
    strided = [kind for kind in kinds if kind.layout != "C"]
    if strided:
        raise TypingError(f"{strided[0]} is not C-ordered in memory; give a contiguous array.")


def tile_of(format: Format, outputs: int, rows: int) -> Callable[..., None]:
    """A function for compiled code that computes outputs x rows dot products.

    Of each, partial sum k runs over the elements k, k + LANES, k + 2 LANES...; the partial sums are added by halves; the
    elements that do not fill the lanes follow one by one.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weight, scale, o, x, row_of_pair, p, out, column = _arrays(context, builder, signature, arguments)
        weights = _weight_rows(builder, weight, scale, o, outputs, format.scaled_outputs)
        pairs = [builder.add(p, INDEX(r)) for r in range(rows)]
        xs = [_row(builder, x, builder.load(builder.gep(row_of_pair.data, [pair]))) for pair in pairs]
        results = [_row(builder, out, pair) for pair in pairs]

        def multiply_add(count):  # type: ignore[no-untyped-def]
            lanes = min(count, LANES)
            name = f"llvm.fma.v{lanes}f32" if lanes > 1 else "llvm.fma.f32"
            kind = ir.FunctionType(_of(FLOAT, lanes), [_of(FLOAT, lanes)] * 3)
            fma = cgutils.get_or_insert_function(builder.module, kind, name)

            def body(i, sums):  # type: ignore[no-untyped-def]
                if count > 1 and format is not FLOAT32:
                    _prefetch(builder, weights, builder.lshr(i, INDEX(format.packed - 1)), AHEAD)
                pieces = range(0, count, lanes)
                vectors = [
                    [_load(builder, row, builder.add(i, INDEX(first)), _of(FLOAT, lanes)) for row in xs]
                    for first in pieces
                ]
                following = []
                for k, (values, scales) in enumerate(weights):
                    wide = format.widen(builder, values, scales, i, count)
                    totals = sums[k * rows : (k + 1) * rows]
                    for first, of_rows in zip(pieces, vectors, strict=True):
                        mask = ir.VectorType(WORD, lanes)([*range(first, first + lanes)]) if count > lanes else None
                        part = builder.shuffle_vector(wide, wide, mask) if mask else wide
                        totals = [builder.call(fma, [part, v, t]) for v, t in zip(of_rows, totals, strict=True)]
                    following += totals
                return following

            return body

        size = builder.extract_value(x.shape, 1)
        whole = builder.and_(size, INDEX(-format.step))
        zeros = [_constant(FLOAT, 0.0, LANES)] * (outputs * rows)
        sums = loop(builder, INDEX(0), whole, format.step, zeros, multiply_add(format.step))
        sums = [lanes_sum(builder, value) for value in sums]
        if format.step == LANES:  # MXFP4 rows are whole blocks
            sums = loop(builder, whole, size, 1, sums, multiply_add(1))
        for n, total in enumerate(sums):
            builder.store(total, builder.gep(results[n % rows], [builder.add(column, INDEX(n // rows))]))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[misc]
    def tile(_typing, weight, scale, o, x, row_of_pair, p, out, column):  # type: ignore[no-untyped-def]
        """out[p + r, column + k] = weight[o + k] . x[row_of_pair[p + r]] for every k < outputs, r < rows."""
        _refuse_strided(weight, scale, x, row_of_pair, out)
        return types.void(weight, scale, o, x, row_of_pair, p, out, column), generate

    return tile  # type: ignore[no-any-return]


def decoder_of(format: Format, outputs: int) -> Callable[..., None]:
    """A function for compiled code that widens `outputs` rows."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weight, scale, o, out = _arrays(context, builder, signature, arguments)
        weights = _weight_rows(builder, weight, scale, o, outputs, format.scaled_outputs)
        results = [_row(builder, out, INDEX(k)) for k in range(outputs)]

        def store(count):  # type: ignore[no-untyped-def]
            def body(i, _sums):  # type: ignore[no-untyped-def]
                if count > 1:
                    _prefetch(builder, weights, builder.lshr(i, INDEX(format.packed - 1)), AHEAD)
                for (values, scales), result in zip(weights, results, strict=True):
                    wide = format.widen(builder, values, scales, i, count)
                    builder.store(wide, builder.bitcast(builder.gep(result, [i]), wide.type.as_pointer()), align=4)
                return []

            return body

        size = builder.extract_value(out.shape, 1)
        whole = builder.and_(size, INDEX(-format.step))
        loop(builder, INDEX(0), whole, format.step, [], store(format.step))
        if format.step == LANES:
            loop(builder, whole, size, 1, [], store(1))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[misc]
    def decode(_typing, weight, scale, o, out):  # type: ignore[no-untyped-def]
        """out[k] = the weights of row o + k, as float32, for every k < outputs."""
        _refuse_strided(weight, scale, out)
        return types.void(weight, scale, o, out), generate

    return decode  # type: ignore[no-any-return]
