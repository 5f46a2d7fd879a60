"""CPU kernels of an EAGLE-3 head: one launch per forward instead of some forty framework calls, which took longer than its weights
take to read."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from ..engine.torch.kernels import _count_up, exp
from ..engine.torch.layer_kernels import _add_bias, _chunks, _norm_row, _project, add_swiglu, attention_core


@njit(cache=True)
def forward(
    embedding, hidden, norms, eps, norm_before_residual, attention, rotary, positions, cache, plan, mlp, mlp_biases, out
):  # type: ignore[no-untyped-def]
    """The decoder layer. embedding, hidden, out: float32 [R, H]; norms: float32 weights of the norms of embedding, hidden state
    and attention's result; attention: projections, biases, rotary pairs per head and scaling, rotary, positions, cache, plan: as in
    layer_kernels.attention_block; mlp, mlp_biases: as in layer_kernels.add_swiglu."""
    rows, size = hidden.shape
    inputs, residual, normed = np.empty((rows, 2 * size), np.float32), hidden.copy(), np.empty_like(hidden)
    for row in range(rows):
        _norm_row(embedding, row, norms[0], eps, inputs[:, :size])
        _norm_row(hidden, row, norms[1], eps, inputs[:, size:])
        if norm_before_residual:
            residual[row] = inputs[row, size:]
    projections, biases, half, scaling = attention
    nothing = np.empty(0, np.float32)
    attention_core(
        inputs, residual, projections, biases, (nothing, nothing, nothing, norms[2]), (eps, eps, eps, eps), half, scaling, 0,
        nothing, rotary, positions, cache, 0, plan, out, normed,
    )  # fmt: skip
    add_swiglu(normed, mlp, mlp_biases, out)


@njit(parallel=True, cache=True, error_model="numpy")
def candidates(hidden, norm, eps, head, bias, tokens, probabilities):  # type: ignore[no-untyped-def]
    """The most probable draft tokens of every row, the most probable first and the lower id where they tie.

    hidden: float32 [R, H]; norm: float32 [H]; head: one matrix (M = 1), as in quantised_kernels.products, and its bias; tokens:
    int64 [R, k] and probabilities: float32 [R, k] are written.
    """
    rows, vocabulary = hidden.shape[0], head[0].shape[1]
    normed, logits = np.empty_like(hidden), np.empty((rows, vocabulary), np.float32)
    identity = _count_up(rows)
    for row in range(rows):
        _norm_row(hidden, row, norm, eps, normed)
    for chunk in prange(_chunks(vocabulary)):
        _project(head, chunk, normed, identity, logits)
    for row in prange(rows):
        _add_bias(logits, row, bias)
        _most_probable(logits[row], tokens[row], probabilities[row])


@njit(error_model="numpy")
def _most_probable(logits, tokens, probabilities):  # type: ignore[no-untyped-def]
    kept = 0
    for token in range(logits.shape[0]):
        value = logits[token]
        if kept < tokens.shape[0] or value > probabilities[kept - 1]:
            kept = min(kept + 1, tokens.shape[0])
            at = kept - 1
            while at > 0 and value > probabilities[at - 1]:
                tokens[at], probabilities[at] = tokens[at - 1], probabilities[at - 1]
                at -= 1
            tokens[at], probabilities[at] = token, value
    highest, total = probabilities[0], np.float32(0)
    for token in range(logits.shape[0]):
        total += exp(logits[token] - highest)
    for at in range(tokens.shape[0]):
        probabilities[at] = exp(probabilities[at] - highest) / total
