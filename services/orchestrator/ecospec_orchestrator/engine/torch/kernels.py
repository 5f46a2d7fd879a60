"""CPU kernels that read bfloat16 weights once and compute in float32.

Decoding reads far more weight bytes than it computes on, so weights stay bfloat16 in memory and are widened in registers, once
for several rows. The order in which a dot product is summed is written out below, as vector code: a compiler that vectorises a
plain loop may choose another order for another number of rows. So a row's result does not depend, in any bit, on the rows
that share the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

CHUNK = 32  # output elements per parallel task
LANES = 16  # partial sums of a dot product
# Dot products summed side by side, outputs x rows: as many as the vector registers hold.
OUTPUTS = ROWS = 4 if binding.get_host_cpu_features().get("avx512f") else 2
AHEAD = 8192  # bytes: how far in front of its use a weight is asked for from memory
LINE = 64  # bytes of a cache line

INDEX, WORD, FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
HALVES, WORDS, FLOATS = (ir.VectorType(t, LANES) for t in (ir.IntType(16), WORD, FLOAT))


def _loop(builder, start, stop, step, sums, body):  # type: ignore[no-untyped-def]
    """Emit `for i in range(start, stop, step): sums = body(i, sums)`; returns the last sums."""
    before, head = builder.block, builder.append_basic_block("head")
    inside, after = builder.append_basic_block("inside"), builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    carried = [builder.phi(value.type) for value in (start, *sums)]
    builder.cbranch(builder.icmp_signed("<", carried[0], stop), inside, after)
    builder.position_at_end(inside)
    following = [builder.add(carried[0], INDEX(step)), *body(carried[0], carried[1:])]
    builder.branch(head)
    for phi, first, later in zip(carried, (start, *sums), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, inside)
    builder.position_at_end(after)
    return carried[1:]


def _multiply_add(builder, weights, xs, vector):  # type: ignore[no-untyped-def]
    """Loop body of a tile: sums[k, r] += weights[k][i] * xs[r][i], of LANES elements (vector) or of one."""
    bits, words, floats = (HALVES, WORDS, FLOATS) if vector else (ir.IntType(16), WORD, FLOAT)
    shift = words([16] * LANES) if vector else words(16)
    fma_name = f"llvm.fma.v{LANES}f32" if vector else "llvm.fma.f32"
    fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(floats, [floats] * 3), fma_name)

    def load(address, i, kind, alignment):  # type: ignore[no-untyped-def]
        return builder.load(builder.bitcast(builder.gep(address, [i]), kind.as_pointer()), align=alignment)

    def body(i, sums):  # type: ignore[no-untyped-def]
        if vector:
            _prefetch(builder, weights, i)
        x = [load(address, i, floats, 4) for address in xs]
        following = []
        for k, address in enumerate(weights):
            # A bfloat16's bits are the upper half of the float32.
            wide = builder.shl(builder.zext(load(address, i, bits, 2), words), shift)
            weight = builder.bitcast(wide, floats)
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


def _lanes_sum(builder, vector):  # type: ignore[no-untyped-def]
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
        sums = _loop(builder, INDEX(0), whole, LANES, zeros, _multiply_add(builder, weights, xs, True))
        sums = [_lanes_sum(builder, value) for value in sums]
        sums = _loop(builder, whole, size, 1, sums, _multiply_add(builder, weights, xs, False))
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


_full_tile, _single = _tile(OUTPUTS, ROWS), _tile(1, 1)
_one_row, _two_rows, _three_rows = (_tile(OUTPUTS, rows) for rows in (1, 2, 3))


@njit
def _products(weight, begin, end, x, row_of_pair, first, last, out):  # type: ignore[no-untyped-def]
    """out[p, o] = weight[o] . x[row_of_pair[p]] for p in [first, last), o in [begin, end).

    All rows pass while a few weight rows are in the first-level cache: they come from memory once.
    """
    o = begin
    while o + OUTPUTS <= end:
        p = first
        while p + ROWS <= last:
            _full_tile(weight, o, x, row_of_pair, p, out)
            p += ROWS
        if last - p == 1:
            _one_row(weight, o, x, row_of_pair, p, out)
        elif last - p == 2:
            _two_rows(weight, o, x, row_of_pair, p, out)
        elif last - p == 3:
            _three_rows(weight, o, x, row_of_pair, p, out)
        o += OUTPUTS
    while o < end:
        for p in range(first, last):
            _single(weight, o, x, row_of_pair, p, out)
        o += 1


@njit
def _count_up(size):  # type: ignore[no-untyped-def]
    """0, 1, ... as int64; a function of its own, or numba would start its threads for it."""
    return np.arange(size)


@njit(parallel=True, cache=True)
def linear_rows(weight, x, out):  # type: ignore[no-untyped-def]
    """out[r] = weight @ x[r]. weight: uint16 (bfloat16 bits) [O, I]; x: float32 [R, I]; out: float32 [R, O]."""
    outputs, rows = weight.shape[0], x.shape[0]
    identity = _count_up(rows)
    for chunk in prange((outputs + CHUNK - 1) // CHUNK):
        end = min(outputs, chunk * CHUNK + CHUNK)
        _products(weight, chunk * CHUNK, end, x, identity, 0, rows, out)


@njit
def _group(index, experts):  # type: ignore[no-untyped-def]
    """The (row, slot) pairs of index, int64 [R, k], ordered by expert: the distinct experts [D], where each one's pairs start
    [D + 1], the row of each pair [R k], and the place in this order of every row's slots [R, k]."""
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
    row_of_pair, place = np.empty(rows * top_k, np.int64), np.empty((rows, top_k), np.int64)
    for row in range(rows):
        for slot in range(top_k):
            pair = end[index[row, slot]]
            end[index[row, slot]] += 1
            row_of_pair[pair], place[row, slot] = row, pair
    return hit[:distinct], starts[: distinct + 1], row_of_pair, place


@njit(parallel=True, cache=True)
def experts_rows(gate_up, down, x, index, shares, out):  # type: ignore[no-untyped-def]
    """SwiGLU of the routed experts only, each read once for all of its rows; a row's experts are summed in its own order.

    gate_up: uint16 (bfloat16 bits) [E, 2 I, H]; down: uint16 [E, H, I]; x: float32 [R, H]; index: int64 [R, k];
    shares: float32 [R, k] routing weights; out: float32 [R, H].
    """
    hidden, width = down.shape[1], down.shape[2]
    hit, starts, row_of_pair, place = _group(index, gate_up.shape[0])
    pairs = row_of_pair.shape[0]
    inner, parts = np.empty((pairs, 2 * width), np.float32), np.empty((pairs, hidden), np.float32)
    chunks = (2 * width + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * chunks):
        d, chunk = task // chunks, task % chunks
        end = min(2 * width, chunk * CHUNK + CHUNK)
        _products(gate_up[hit[d]], chunk * CHUNK, end, x, row_of_pair, starts[d], starts[d + 1], inner)
    for p in prange(pairs):
        for o in range(width):
            gate = inner[p, o]
            inner[p, o] = gate / (np.float32(1) + np.exp(-gate)) * inner[p, width + o]
    identity = _count_up(pairs)
    chunks = (hidden + CHUNK - 1) // CHUNK
    for task in prange(hit.shape[0] * chunks):
        d, chunk = task // chunks, task % chunks
        end = min(hidden, chunk * CHUNK + CHUNK)
        _products(down[hit[d]], chunk * CHUNK, end, inner, identity, starts[d], starts[d + 1], parts)
    for row in prange(index.shape[0]):
        out[row] = 0
        for slot in range(index.shape[1]):
            for o in range(hidden):
                out[row, o] += shares[row, slot] * parts[place[row, slot], o]


def set_threads(count: int) -> None:
    """Threads of these kernels, at most the machine's cores."""
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
