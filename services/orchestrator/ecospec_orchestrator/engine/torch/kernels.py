"""CPU kernels that read bfloat16 weights once and compute in float32.

Decoding reads far more weight bytes than it computes on, so weights stay bfloat16 in memory and are widened in registers, once
for several rows. The order in which a dot product is summed is written out below, as vector code: a compiler that vectorises a
plain loop may choose another order for another number of rows. So a row's result does not depend, in any bit, on the rows
that share the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numba
import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

CHUNK = 32  # output elements per parallel task
LANES = 16  # partial sums of a dot product
# Dot products summed side by side, outputs x rows: as many as the vector registers hold.
OUTPUTS = ROWS = 4 if binding.get_host_cpu_features().get("avx512f") else 2
AHEAD = 8192  # bytes: how far in front of its use a weight is asked for from memory
LINE = 64  # bytes of a cache line

INDEX, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
HALVES, WORDS, FLOATS = (ir.VectorType(t, LANES) for t in (ir.IntType(16), WORD, FLOAT))


def loop(builder, start, stop, step, sums, body):  # type: ignore[no-untyped-def]
    """Emit `for i in range(start, stop, step): sums = body(i, sums)`; returns the last sums."""
    before, head = builder.block, builder.append_basic_block("head")
    inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    carried = [builder.phi(value.type) for value in (start, *sums)]
    builder.cbranch(builder.icmp_signed("<", carried[0], stop), inside, after)
    builder.position_at_end(inside)
    following = [builder.add(carried[0], INDEX(step)), *body(carried[0], carried[1:])]
    last = builder.block  # of the body, which may hold a loop of its own
    builder.branch(head)
    for phi, first, later in zip(carried, (start, *sums), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, last)
    builder.position_at_end(after)
    return carried[1:]


def _multiply_add(builder, weights, xs, vector, wide=False):  # type: ignore[no-untyped-def]
    """Loop body of a tile: sums[k, r] += weights[k][i] * xs[r][i], of LANES elements (vector) or of one. wide: the weights are
    float32 instead of the bits of bfloat16."""
    bits, words, floats = (HALVES, WORDS, FLOATS) if vector else (ir.IntType(16), WORD, FLOAT)
    shift = words([16] * LANES) if vector else words(16)
    fma_name = f"llvm.fma.v{LANES}f32" if vector else "llvm.fma.f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(floats, [floats] * 3), fma_name)

    def load(address, i, kind, alignment):  # type: ignore[no-untyped-def]
        return builder.load(builder.bitcast(builder.gep(address, [i]), kind.as_pointer()), align=alignment)

    def body(i, sums):  # type: ignore[no-untyped-def]
        if vector and not wide:
            _prefetch(builder, weights, i)
        x = [load(address, i, floats, 4) for address in xs]
        following = []
        for k, address in enumerate(weights):
            if wide:
                weight = load(address, i, floats, 4)
            else:  # a bfloat16's bits are the upper half of the float32
                weight = builder.bitcast(builder.shl(builder.zext(load(address, i, bits, 2), words), shift), floats)
            following += [builder.call(fma, [weight, x[r], sums[k * len(xs) + r]]) for r in range(len(xs))]
        return following

    return body


def _prefetch(builder, weights, i):  # type: ignore[no-untyped-def]
    """Ask for the weights AHEAD of the i-th elements of a tile's rows, in the order in which they lie in memory."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    start = builder.bitcast(builder.gep(weights[0], [builder.mul(i, INDEX(len(weights)))]), pointer)
    for offset in range(0, 2 * LANES * len(weights), LINE):
        builder.call(prefetch, [builder.gep(start, [INDEX(AHEAD + offset)]), WORD(0), WORD(3), WORD(1)])


def lanes_sum(builder, vector):  # type: ignore[no-untyped-def]
    """Add the upper half of the lanes to the lower half until one is left."""
    half = LANES // 2
    while half:
        lower, upper = (
            builder.shuffle_vector(vector, vector, ir.VectorType(WORD, half)([*range(first, first + half)]))
            for first in (0, half)
        )
        vector, half = builder.fadd(lower, upper), half // 2
    return builder.extract_element(vector, WORD(0))


def _tile(outputs: int, rows: int) -> Callable[..., None]:
    """A function for compiled code that computes outputs x rows dot products.

    Of each, partial sum k runs over the elements k, k + LANES, k + 2 LANES...; the partial sums are added by halves; the
    elements that do not fill the lanes follow one by one.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weight, o, x, row_of_pair, p, out = (
            context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )

        def address(matrix, row):  # type: ignore[no-untyped-def]
            return builder.gep(matrix.data, [builder.mul(row, builder.extract_value(matrix.shape, 1))])

        output_numbers = [builder.add(o, INDEX(k)) for k in range(outputs)]
        pairs = [builder.add(p, INDEX(r)) for r in range(rows)]
        weights = [address(weight, number) for number in output_numbers]
        xs = [address(x, builder.load(builder.gep(row_of_pair.data, [pair]))) for pair in pairs]
        results = [address(out, pair) for pair in pairs]
        size = builder.extract_value(weight.shape, 1)
        whole = builder.and_(size, INDEX(-LANES))
        zeros = [FLOATS([0.0] * LANES)] * (outputs * rows)
        sums = loop(builder, INDEX(0), whole, LANES, zeros, _multiply_add(builder, weights, xs, True))
        sums = [lanes_sum(builder, value) for value in sums]
        sums = loop(builder, whole, size, 1, sums, _multiply_add(builder, weights, xs, False))
        for n, total in enumerate(sums):
            builder.store(total, builder.gep(results[n % rows], [output_numbers[n // rows]]))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[misc]
    def tile(_typing, weight, o, x, row_of_pair, p, out):  # type: ignore[no-untyped-def]
        """out[p + r, o + k] = weight[o + k] . x[row_of_pair[p + r]] for every k < outputs, r < rows; all arrays C-ordered."""
        strided = [kind for kind in (weight, x, row_of_pair, out) if kind.layout != "C"]
        if strided:
            raise TypingError(f"{strided[0]} is not C-ordered in memory; give a contiguous array.")
        return types.void(weight, o, x, row_of_pair, p, out), generate

    return tile  # type: ignore[no-any-return]


@intrinsic  # type: ignore[misc]
def dot(_typing, a, i, b, j):  # type: ignore[no-untyped-def]
    """a[i] . b[j] for compiled code, summed in the order of a tile. a, b: float32 [., size], C-ordered."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        first, row, second, other = (
            context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        size = builder.extract_value(first.shape, 1)
        left, right = (builder.gep(m.data, [builder.mul(r, size)]) for m, r in ((first, row), (second, other)))
        whole = builder.and_(size, INDEX(-LANES))
        body = _multiply_add(builder, [left], [right], True, wide=True)
        sums = loop(builder, INDEX(0), whole, LANES, [FLOATS([0.0] * LANES)], body)
        sums = [lanes_sum(builder, sums[0])]
        return loop(builder, whole, size, 1, sums, _multiply_add(builder, [left], [right], False, wide=True))[0]

    if any(kind.layout != "C" or kind.dtype != types.float32 for kind in (a, b)):
        raise TypingError(f"dot() takes C-ordered float32 arrays, not {a} and {b}.")
    return types.float32(a, types.int64, b, types.int64), generate


def _vector_at(builder, row, i, size):  # type: ignore[no-untyped-def]
    """A pointer to `size` floats (one for 1) behind the i-th element of a row."""
    kind = FLOAT if size == 1 else ir.VectorType(FLOAT, size)
    return builder.bitcast(builder.gep(row, [i]), kind.as_pointer())


@intrinsic  # type: ignore[misc]
def weighted_sum(_typing, weights, g, rows, count, values, out):  # type: ignore[no-untyped-def]
    """out[g, d] = the sum over i < count, in that order, of weights[g, i] * values[rows[i], d], for compiled code.

    weights: float32 [., >= count]; rows: int64 [count]; values: float32 [., size]; out: float32 [., >= size]; all C-ordered.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        weight, g, row, count, value, result = (
            context.make_array(kind)(context, builder, value=value) if isinstance(kind, types.Array) else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        shares, target = (
            builder.gep(m.data, [builder.mul(g, builder.extract_value(m.shape, 1))]) for m in (weight, result)
        )
        size = builder.extract_value(value.shape, 1)

        def columns(vectors, lanes):  # type: ignore[no-untyped-def]
            """Loop body: the sums of `vectors` times `lanes` columns from column d on, kept in registers over all rows."""
            kind = FLOAT if lanes == 1 else ir.VectorType(FLOAT, lanes)
            name = "llvm.fma.f32" if lanes == 1 else f"llvm.fma.v{lanes}f32"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)

            def body(d, _sums):  # type: ignore[no-untyped-def]
                places = [builder.add(d, INDEX(n * lanes)) for n in range(vectors)]

                def add(i, sums):  # type: ignore[no-untyped-def]
                    share = builder.load(builder.gep(shares, [i]))
                    if lanes > 1:
                        one = builder.insert_element(kind(ir.Undefined), share, WORD(0))
                        share = builder.shuffle_vector(one, one, ir.VectorType(WORD, lanes)([0] * lanes))
                    start = builder.gep(value.data, [builder.mul(builder.load(builder.gep(row.data, [i])), size)])
                    found = [builder.load(_vector_at(builder, start, place, lanes), align=4) for place in places]
                    return [builder.call(fma, [share, f, total]) for f, total in zip(found, sums, strict=True)]

                zero = kind(0.0) if lanes == 1 else kind([0.0] * lanes)
                for place, total in zip(places, loop(builder, INDEX(0), count, 1, [zero] * vectors, add), strict=True):
                    builder.store(total, _vector_at(builder, target, place, lanes), align=4)
                return []

            return body

        start = INDEX(0)
        for vectors, lanes in ((4, LANES), (1, LANES), (1, 1)):
            width = vectors * lanes
            end = builder.sub(size, builder.urem(builder.sub(size, start), INDEX(width)))
            loop(builder, start, end, width, [], columns(vectors, lanes))
            start = end
        return context.get_dummy_value()

    return types.void(weights, types.int64, rows, types.int64, values, out), generate


@intrinsic  # type: ignore[misc]
def _float_of_bits(_typing, bits):  # type: ignore[no-untyped-def]
    """The float32 of an int32's bits."""
    return types.float32(types.int32), lambda _context, builder, _signature, args: builder.bitcast(args[0], FLOAT)


LOG2_E, LN2_HIGH = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
)  # the latter has few bits, so that n times it is exact
LN2_LOW = np.float32(0.6931471805599453 - 0.693359375)
ROUNDER = np.float32(1.5 * 2**23)  # added and taken away again, it rounds a float32 to a whole number
TAYLOR = tuple(
    np.float32(1 / math.factorial(n)) for n in range(8)
)  # at most ln(2) / 2 from 0: below half a unit in the last place


@njit(inline="always")
def exp(x):  # type: ignore[no-untyped-def]
    """e^x of a float32, as arithmetic that a compiler can do for many elements at once, with the same result for each."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = (x * LOG2_E + ROUNDER) - ROUNDER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    e = TAYLOR[7]
    e = e * r + TAYLOR[6]
    e = e * r + TAYLOR[5]
    e = e * r + TAYLOR[4]
    e = e * r + TAYLOR[3]
    e = e * r + TAYLOR[2]
    e = e * r + TAYLOR[1]
    e = e * r + TAYLOR[0]
    return e * _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


def widen_row(row, out):  # type: ignore[no-untyped-def]
    """For compiled code: out = row, float32 or the bits of bfloat16."""
    raise NotImplementedError("only compiled code can call this.")


@overload(widen_row)
def _widen_row(row, out):  # type: ignore[no-untyped-def]
    if row.dtype == types.float32:

        def widen(row, out):  # type: ignore[no-untyped-def]
            for i in range(row.shape[0]):
                out[i] = row[i]

    else:

        def widen(row, out):  # type: ignore[no-untyped-def]
            for i in range(row.shape[0]):
                out[i] = _float_of_bits(np.int32(np.uint32(row[i]) << np.uint32(16)))

    return widen


@njit(error_model="numpy")
def silu_gate(gate, up):  # type: ignore[no-untyped-def]
    """gate *= sigmoid(gate) * up, float32 [I] each."""
    for i in range(gate.shape[0]):
        g = gate[i]
        gate[i] = g / (np.float32(1) + exp(-g)) * up[i]


_full_tile, _single = _tile(OUTPUTS, ROWS), _tile(1, 1)
# A few rows take fewer outputs at a time: memory delivers one stream faster than several (39 against 33 GB/s per core).
_two_rows, _three_rows = _tile(2, 2), _tile(2, 3)


@njit
def _remaining_rows(weight, o, x, row_of_pair, p, count, out):  # type: ignore[no-untyped-def]
    """OUTPUTS outputs of the count < ROWS rows that are left over."""
    if count == 1:
        for k in range(OUTPUTS):
            _single(weight, o + k, x, row_of_pair, p, out)
    elif count == 2:
        for k in range(0, OUTPUTS, 2):
            _two_rows(weight, o + k, x, row_of_pair, p, out)
    elif count == 3:
        for k in range(0, OUTPUTS, 2):
            _three_rows(weight, o + k, x, row_of_pair, p, out)


@njit
def _products(weight, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
    """out[p, o] = weight[o] . x[row_of_pair[p]] for p in [first, last), o in [begin, end).

    All rows pass while a few weight rows are in the first-level cache, so the weights come from memory once.
    """
    o = begin
    while o + OUTPUTS <= end:
        p = first
        while p + ROWS <= last:
            _full_tile(weight, o, x, row_of_pair, p, out)
            p += ROWS
        _remaining_rows(weight, o, x, row_of_pair, p, last - p, out)
        o += OUTPUTS
    while o < end:
        for p in range(first, last):
            _single(weight, o, x, row_of_pair, p, out)
        o += 1


@njit
def _count_up(size):  # type: ignore[no-untyped-def]
    """0, 1, ... as int64; a function of its own, or numba would start its threads for it."""
    return np.arange(size)


def set_threads(count: int) -> None:
    """Threads of these kernels, at most the machine's cores."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
