"""A whole step of a mixture in one call: between layers nothing waits for the interpreter, whose own code and data the weights
streaming by have pushed out of the caches (1 to 2 ms of a step on two cores)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.core.errors import TypingError
from numba.typed import List
from torch import nn

from .cache import KvPool
from .expert_kernels import experts_rows
from .fused_layer import FusedLayer
from .kernels import widen_row
from .layer_kernels import attention_block, linear, norm, route_and_share
from .modules import Bfloat16Embedding, bits
from .row_modules import PROBE_ROWS, KernelNorm, RotaryTable, equal
from .step_plan import Segment, StepPlan


@njit(cache=True)
def _run(layers, ends, tokens, positions, rotary, cache, plan, featured, routed, features, hidden, logits):  # type: ignore[no-untyped-def]
    """layers: as FusedLayer.arguments; ends: embedding table, weight and epsilon of the last norm, output weights; tokens,
    positions: int64 [R]; rotary, cache, plan: as in layer_kernels.attention_block; featured: int64, the layers whose output goes
    to features. features: float32 [R, n H]; routed: int64 [R, layers, k], hidden: float32 [R, H] and logits: float32 [R, V] are
    written, the last only if it has a column."""
    table, norm_weight, eps, head = ends
    rows, size, top_k = tokens.shape[0], hidden.shape[1], routed.shape[2]
    x, after, normed = np.empty_like(hidden), np.empty_like(hidden), np.empty_like(hidden)
    for row in range(rows):
        widen_row(table[tokens[row]], x[row])
    for number in range(len(layers)):
        attention, router, shared, experts = layers[number]
        projections, biases, norms, epsilons, half, scaling, window, sinks = attention
        attention_block(
            x, projections, biases, norms, epsilons, half, scaling, window, sinks, rotary, positions, cache, number, plan,
            after, normed,
        )  # fmt: skip
        scores = np.empty((rows, router[0][0].shape[1]), np.float32)
        index, weight = np.empty((rows, top_k), np.int64), np.empty((rows, top_k), np.float32)
        route_and_share(normed, router, shared, scores, index, weight, after)
        gate_up, down, gate_up_bias, down_bias, gate = experts
        experts_rows(gate_up, down, gate_up_bias, down_bias, gate, normed, index, weight, x)
        for row in range(rows):
            for i in range(size):
                x[row, i] += after[row, i]
            for slot in range(top_k):
                routed[row, number, slot] = index[row, slot]
            for place in range(featured.shape[0]):
                if featured[place] == number:
                    widen_row(x[row], features[row, place * size : (place + 1) * size])
    norm(x, norm_weight, eps, hidden)
    if logits.shape[1]:
        linear(head, np.empty(0, np.float32), hidden, logits)


class LayerStack:
    """All layers of a model and what is before and behind them. Raises AttributeError or TypeError where its structure is
    another, or its layers do not keep their weights in one way."""

    def __init__(self, model: Any, feature_layers: tuple[int, ...]) -> None:
        layers, embedding, last = list(model.model.layers), model.model.embed_tokens, model.model.norm
        known = [isinstance(layer, FusedLayer) for layer in layers]
        known += [isinstance(model.model.rotary_emb, RotaryTable), isinstance(last, KernelNorm)]
        if not all(known) or type(embedding) not in (nn.Embedding, Bfloat16Embedding) or model.lm_head.bias is not None:
            raise TypeError("a model of another structure")
        table = embedding.weight.detach()
        self._layers = List()
        for layer in layers:
            self._layers.append(layer.arguments)
        self._ends = (
            bits(table) if table.dtype == torch.bfloat16 else table.numpy(),
            last.weight.numpy(),
            np.float32(last.eps),
            model.lm_head.stored,
        )
        self._rotary = model.model.rotary_emb
        self._featured = np.array(feature_layers, np.int64)
        self._vocabulary, self._hidden = len(model.lm_head.weight), len(last.weight)
        self._top_k = layers[0].top_k

    def run(
        self, tokens: np.ndarray, positions: np.ndarray, plan: StepPlan, head: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """tokens, positions: int64 [R] -> (last hidden states float32 [R, H], logits [R, V] or [R, 0] without head, features
        [R, n H], experts int64 [R, layers, k])."""
        rows = len(tokens)
        hidden, logits, features = (
            np.empty((rows, columns), np.float32)
            for columns in (self._hidden, self._vocabulary * head, len(self._featured) * self._hidden)
        )
        routed = np.empty((rows, len(self._layers), self._top_k), np.int64)
        _run(
            self._layers,
            self._ends,
            tokens,
            positions,
            self._rotary.tables(int(positions.max()) + 1),
            plan.cache_arrays,
            plan.arrays,
            self._featured,
            routed,
            features,
            hidden,
            logits,
        )
        return hidden, logits, features, routed


@torch.inference_mode()
def proven_stack(model: Any, feature_layers: tuple[int, ...], pool: KvPool) -> LayerStack | None:
    """A stack that gave the same logits as the family's own forward pass over a few tokens, or None."""
    try:
        stack = LayerStack(model, feature_layers)
    except (AttributeError, TypeError, TypingError):
        return None
    sequence = pool.new_sequence()
    sequence.reserve(PROBE_ROWS)
    plan, places = StepPlan([Segment(sequence, 0, PROBE_ROWS, None)]), np.arange(PROBE_ROWS)
    ids, positions = (torch.from_numpy(places)[None] for _ in range(2))
    expected = model(input_ids=ids, position_ids=positions, use_cache=False, step_plan=plan).logits[0]
    _, found, _, _ = stack.run(places, places, plan, head=True)
    sequence.release()
    return stack if equal(torch.from_numpy(found)[None], expected[None]) else None
