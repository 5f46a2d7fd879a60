"""CPU kernels of everything between two launches of the routed experts: norms, projections, rotary positions, attention, router
and shared expert. One launch does what a dozen framework calls do; between them, the cores would wait for the interpreter.

As in kernels.py, no bit of a row's result depends on the rows that share the step.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from .attention_kernels import attend, write_row
from .kernels import CHUNK, _count_up, dot, exp, silu_gate
from .quantised_kernels import products

# How a router turns logits into weights: softmax over all experts, over the chosen ones, or sigmoid with a correction of the choice.
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID = 0, 1, 2


@njit
def _chunks(outputs):  # type: ignore[no-untyped-def]
    return (outputs + CHUNK - 1) // CHUNK


@njit
def _project(weights, chunk, x, identity, out):  # type: ignore[no-untyped-def]
    """One chunk of outputs of all rows. weights: one matrix (M = 1), as in quantised_kernels.products."""
    end = min(out.shape[1], chunk * CHUNK + CHUNK)
    products(weights, 0, chunk * CHUNK, end, x, identity, 0, x.shape[0], out)


@njit
def _add_bias(out, row, bias):  # type: ignore[no-untyped-def]
    for i in range(bias.shape[0]):
        out[row, i] += bias[i]


@njit(error_model="numpy")
def _norm_row(x, row, weight, eps, out):  # type: ignore[no-untyped-def]
    size = x.shape[1]
    scale = np.float32(1) / np.sqrt(dot(x, row, x, row) / np.float32(size) + eps)
    for i in range(size):
        out[row, i] = weight[i] * (x[row, i] * scale)


@njit
def _norm_heads(x, row, weight, eps):  # type: ignore[no-untyped-def]
    """Normalise a row in place, weight.shape[0] elements at a time; not at all where the weight has none."""
    size = weight.shape[0]
    if size:
        parts = x[row].reshape(-1, size)
        for part in range(parts.shape[0]):
            _norm_row(parts, part, weight, eps, parts)


@njit
def _rotate(heads, cos, sin):  # type: ignore[no-untyped-def]
    """Turn the pairs (i, i + half) of every head. heads: float32 [heads, size]; cos, sin: float32 [half]."""
    half = cos.shape[0]
    for head in range(heads.shape[0]):
        for i in range(half):
            first, second = heads[head, i], heads[head, i + half]
            heads[head, i] = first * cos[i] - second * sin[i]
            heads[head, i + half] = second * cos[i] + first * sin[i]


@njit(parallel=True, cache=True)
def linear(weights, bias, x, out):  # type: ignore[no-untyped-def]
    """out[r] = W x[r] + bias. weights: one matrix (M = 1) as in quantised_kernels.products; bias: float32 [O] or [0];
    x: float32 [R, I]; out: float32 [R, O]."""
    identity = _count_up(x.shape[0])
    for chunk in prange(_chunks(out.shape[1])):
        _project(weights, chunk, x, identity, out)
    if bias.shape[0]:
        for row in prange(x.shape[0]):
            _add_bias(out, row, bias)


@njit(parallel=True, cache=True)
def norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    """Root-mean-square norm of every row. x, out: float32 [R, H]; weight: float32 [H]."""
    for row in prange(x.shape[0]):
        _norm_row(x, row, weight, eps, out)


@njit
def _place_row(row, q, k, v, biases, norms, eps, half, rotary, position, plan, keys, values):  # type: ignore[no-untyped-def]
    """Biases, norms and rotary position of a row's query, key and value; the last two go into the cache."""
    kv_heads, key_size, value_size = keys.shape[1], keys.shape[3], values.shape[3]
    _add_bias(q, row, biases[0])
    _add_bias(k, row, biases[1])
    _add_bias(v, row, biases[2])
    _norm_heads(q, row, norms[1], eps[1])
    _norm_heads(k, row, norms[2], eps[2])
    key = k[row].reshape(kv_heads, key_size)
    cos, sin = rotary[0][position, :half], rotary[1][position, :half]
    _rotate(q[row].reshape(-1, key_size), cos, sin)
    _rotate(key, cos, sin)
    write_row(row, key, v[row].reshape(kv_heads, value_size), plan, keys, values)


@njit
def _end_row(row, x, after, bias, weight, eps, normed):  # type: ignore[no-untyped-def]
    """after += bias + x, normed = norm(after)."""
    _add_bias(after, row, bias)
    for i in range(x.shape[1]):
        after[row, i] += x[row, i]
    _norm_row(after, row, weight, eps, normed)


@njit(parallel=True, cache=True)
def attention_core(
    inputs,
    x,
    projections,
    biases,
    norms,
    eps,
    half,
    scaling,
    window,
    sinks,
    rotary,
    positions,
    cache,
    layer,
    plan,
    after,
    normed,
):  # type: ignore[no-untyped-def]
    """after = x + attention(inputs), normed = norm(after). inputs: float32 [R, I], normalised already; the rest as in
    attention_block, which see. inputs and normed may be one array."""
    q_weights, k_weights, v_weights, o_weights = projections  # parallel loops take tuples of arrays, but none of tuples
    keys, values = cache[0][layer], cache[1][layer]
    kv_heads, key_size, value_size = keys.shape[1], keys.shape[3], values.shape[3]
    rows, heads = x.shape[0], q_weights[0].shape[1] // key_size
    identity = _count_up(rows)
    q = np.empty((rows, heads * key_size), np.float32)
    k = np.empty((rows, kv_heads * key_size), np.float32)
    v = np.empty((rows, kv_heads * value_size), np.float32)
    attended = np.empty((rows, heads, value_size), np.float32)
    q_chunks, k_chunks = _chunks(q.shape[1]), _chunks(k.shape[1])
    for task in prange(q_chunks + k_chunks + _chunks(v.shape[1])):
        if task < q_chunks:
            _project(q_weights, task, inputs, identity, q)
        elif task < q_chunks + k_chunks:
            _project(k_weights, task - q_chunks, inputs, identity, k)
        else:
            _project(v_weights, task - q_chunks - k_chunks, inputs, identity, v)
    # A single row's small parts take less time than to share them out.
    if rows == 1:
        _place_row(0, q, k, v, biases, norms, eps, half, rotary, positions[0], plan, keys, values)
    else:
        for row in prange(rows):
            _place_row(row, q, k, v, biases, norms, eps, half, rotary, positions[row], plan, keys, values)
    attend(q.reshape(rows, heads, key_size), keys, values, plan, scaling, window, sinks, attended)
    flat = attended.reshape(rows, heads * value_size)
    for chunk in prange(_chunks(x.shape[1])):
        _project(o_weights, chunk, flat, identity, after)
    if rows == 1:
        _end_row(0, x, after, biases[3], norms[3], eps[3], normed)
    else:
        for row in prange(rows):
            _end_row(row, x, after, biases[3], norms[3], eps[3], normed)


@njit(cache=True)
def attention_block(
    x,
    projections,
    biases,
    norms,
    eps,
    half,
    scaling,
    window,
    sinks,
    rotary,
    positions,
    cache,
    layer,
    plan,
    after,
    normed,
):  # type: ignore[no-untyped-def]
    """A decoder layer's first half: after = x + attention(norm(x)), normed = norm(after).

    x, after, normed: float32 [R, H]; projections: query, key, value and output weights (M = 1 each, as in
    quantised_kernels.products); biases: theirs, float32 [O] or [0]; norms: float32 weights of the input norm [H], of query and
    key norms ([0], one head or all heads) and of the norm behind [H]; eps: their epsilons; rotary: cosines and sines of positions int64 [R], float32
    [., >= half], that turn the pairs (i, i + half) of each head; window, sinks, plan: as in attention_kernels.attend; cache: the
    pool's keys and values, of which `layer` counts.
    """
    if x.shape[0] == 1:
        _norm_row(x, 0, norms[0], eps[0], normed)
    else:
        norm(x, norms[0], eps[0], normed)
    attention_core(
        normed, x, projections, biases, norms, eps, half, scaling, window, sinks, rotary, positions, cache, layer, plan, after,
        normed,
    )  # fmt: skip


@njit(parallel=True, cache=True)
def add_swiglu(x, weights, biases, out):  # type: ignore[no-untyped-def]
    """out += down(silu(gate(x)) * up(x)). x, out: float32 [R, H]; weights: gate, up and down (M = 1 each, as in
    quantised_kernels.products); biases: theirs, float32 [O] or [0]."""
    gate_weights, up_weights, down_weights = weights
    rows, width = x.shape[0], gate_weights[0].shape[1]
    identity = _count_up(rows)
    gate, up = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    down, chunks = np.empty_like(out), _chunks(width)
    for task in prange(2 * chunks):
        if task < chunks:
            _project(gate_weights, task, x, identity, gate)
        else:
            _project(up_weights, task - chunks, x, identity, up)
    for row in range(rows):
        _add_bias(gate, row, biases[0])
        _add_bias(up, row, biases[1])
        silu_gate(gate[row], up[row])
    for chunk in prange(_chunks(out.shape[1])):
        _project(down_weights, chunk, gate, identity, down)
    for row in range(rows):
        _add_bias(down, row, biases[2])
        for i in range(out.shape[1]):
            out[row, i] += down[row, i]


@njit
def _choose(score, chosen):  # type: ignore[no-untyped-def]
    """The indices of the largest scores, the largest first and the lower index where they tie; score is used up."""
    for slot in range(chosen.shape[0]):
        best = 0
        for i in range(1, score.shape[0]):
            if score[i] > score[best]:
                best = i
        chosen[slot] = best
        score[best] = -np.inf


@njit
def _keep_best_groups(score, groups, kept):  # type: ignore[no-untyped-def]
    """Set the scores outside the `kept` best groups to minus infinity. A group is as good as its two best scores together."""
    size = score.shape[0] // groups
    totals, best = np.empty(groups, np.float32), np.empty(kept, np.int64)
    for group in range(groups):
        first = second = np.float32(-np.inf)
        for i in range(group * size, group * size + size):
            if score[i] > first:
                first, second = score[i], first
            elif score[i] > second:
                second = score[i]
        totals[group] = first + second
    _choose(totals, best)
    for group in range(groups):
        if not (best == group).any():
            score[group * size : group * size + size] = -np.inf


@njit(error_model="numpy")
def _softmax(values):  # type: ignore[no-untyped-def]
    highest = values[0]
    for i in range(1, values.shape[0]):
        highest = max(highest, values[i])
    total = np.float32(0)
    for i in range(values.shape[0]):
        values[i] = exp(values[i] - highest)
        total += values[i]
    for i in range(values.shape[0]):
        values[i] /= total


@njit(error_model="numpy")
def _route_row(logits, bias, correction, rule, index, weight):  # type: ignore[no-untyped-def]
    """rule: (kind, groups, groups kept, normalise, scale)."""
    kind, groups, kept, normalise, scale = rule
    for i in range(bias.shape[0]):
        logits[i] += bias[i]
    scores = logits.copy()
    if kind == SOFTMAX:
        _softmax(scores)
    elif kind == SIGMOID:
        for i in range(scores.shape[0]):
            scores[i] = np.float32(1) / (np.float32(1) + exp(-scores[i]))
    ranked = scores.copy()
    if kind == SIGMOID:
        ranked += correction
        if kept < groups:
            _keep_best_groups(ranked, groups, kept)
    _choose(ranked, index)
    total = np.float32(0)
    for slot in range(index.shape[0]):
        weight[slot] = scores[index[slot]]
        total += weight[slot]
    if kind == CHOSEN_SOFTMAX:
        _softmax(weight)
    if kind == SIGMOID:
        total += np.float32(1e-20)
    for slot in range(index.shape[0]):
        if normalise:
            weight[slot] /= total
        weight[slot] *= scale


@njit(parallel=True, cache=True)
def route_and_share(x, router, shared, logits, index, weight, out):  # type: ignore[no-untyped-def]
    """Choose each row's experts, and add the shared expert's result to `out`, as both depend on x alone.

    x: float32 [R, H]; router: (weights (M = 1, as in quantised_kernels.products), bias float32 [E] or [0], correction of the
    choice float32 [E] or [0], rule as in _route_row); shared: gate, up and down weights of a SwiGLU, of inner width 0 where there
    is none; logits: float32 [R, E], index: int64 [R, k] and weight: float32 [R, k] are written; out: float32 [R, H].
    """
    router_weights, router_bias, correction, rule = router
    gate_weights, up_weights, down_weights = shared
    rows, width = x.shape[0], gate_weights[0].shape[1]
    identity = _count_up(rows)
    gate, up = np.empty((rows, width), np.float32), np.empty((rows, width), np.float32)
    router_chunks, chunks = _chunks(logits.shape[1]), _chunks(width)
    for task in prange(2 * chunks + router_chunks):
        if task < chunks:
            _project(gate_weights, task, x, identity, gate)
        elif task < 2 * chunks:
            _project(up_weights, task - chunks, x, identity, up)
        else:
            _project(router_weights, task - 2 * chunks, x, identity, logits)
    if rows == 1:
        _route_row(logits[0], router_bias, correction, rule, index[0], weight[0])
        silu_gate(gate[0], up[0])
    else:
        for row in prange(rows):
            _route_row(logits[row], router_bias, correction, rule, index[row], weight[row])
            silu_gate(gate[row], up[row])
    if width:
        down = np.empty_like(out)
        for chunk in prange(_chunks(x.shape[1])):
            _project(down_weights, chunk, gate, identity, down)
            end = min(out.shape[1], chunk * CHUNK + CHUNK)
            for row in range(rows):
                for i in range(chunk * CHUNK, end):
                    out[row, i] += down[row, i]
