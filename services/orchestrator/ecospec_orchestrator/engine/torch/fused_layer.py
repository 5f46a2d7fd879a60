"""A decoder layer in three launches: attention and norms, router and shared expert, routed experts.

The family's own layer says what is computed: a fused one takes its place only after both gave the same result on random rows.
What is not recognised runs as the family wrote it.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from . import layer_kernels
from .cache import KvPool
from .experts import experts_forward
from .geometry import KvLayout
from .modules import NONE
from .row_modules import PROBE_ROWS, KernelNorm, KernelRouter, equal, nothing_shared
from .step_plan import Segment, StepPlan

log = logging.getLogger(__name__)


class FusedLayer(nn.Module):
    """A pre-norm layer of grouped-query attention and any feed-forward block. half: the rotary pairs per head.

    Raises AttributeError where a part is missing or of another kind."""

    def __init__(self, original: Any, half: int) -> None:
        super().__init__()
        attention = original.self_attn
        linear = [attention.get_submodule(f"{name}_proj") for name in "qkvo"]
        norms = [
            original.input_layernorm,
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            original.post_attention_layernorm,
        ]
        self.mlp, self.layer_idx = original.mlp, attention.layer_idx
        self.original = (original,)  # in a tuple: not a part of the model any more
        sinks = getattr(attention, "sinks", None)
        self._attention = (
            tuple(layer.stored for layer in linear),
            tuple(NONE if layer.bias is None else layer.bias.numpy() for layer in linear),
            tuple(_norm_weight(norm) for norm in norms),
            tuple(np.float32(0 if norm is None else norm.eps) for norm in norms),
            half,
            np.float32(attention.scaling),
            getattr(attention, "sliding_window", None) or 0,
            NONE if sinks is None else sinks.detach().float().numpy(),
        )
        self._mixture = _mixture(self.mlp)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Everything that the layer's kernels take beside the step's own arrays. Raises TypeError where it is no mixture."""
        if self._mixture is None:
            raise TypeError("the layer has no routed experts")
        router, experts, shared = self._mixture
        return self._attention, router.arguments, shared, experts.store.kernel_arguments

    @property
    def top_k(self) -> int:
        assert self._mixture is not None
        return self._mixture[0].top_k

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        step_plan: StepPlan,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states: float32 [1, R, H] -> the same."""
        x = hidden_states.numpy()[0]
        after, normed = np.empty_like(x), np.empty_like(x)
        layer_kernels.attention_block(
            x,
            *self._attention,
            tuple(t[0].numpy() for t in position_embeddings),
            np.arange(len(x)),
            step_plan.cache_arrays,
            self.layer_idx,
            step_plan.arrays,
            after,
            normed,
        )
        if self._mixture is None:
            out = self.mlp(torch.from_numpy(normed)[None])
            return torch.from_numpy(after) + (out[0] if isinstance(out, tuple) else out)
        router, experts, shared = self._mixture
        logits, index, weight = router.empty(len(x))
        layer_kernels.route_and_share(normed, router.arguments, shared, logits, index, weight, after)
        routed = experts_forward(experts, *map(torch.from_numpy, (normed, index, weight)))
        return routed.add_(torch.from_numpy(after))[None]


def _norm_weight(norm: Any) -> np.ndarray:
    if norm is None:
        return NONE
    if not isinstance(norm, KernelNorm):
        raise AttributeError("a norm of another kind")
    return norm.weight.numpy()


def _mixture(mlp: Any) -> tuple[KernelRouter, nn.Module, tuple[Any, ...]] | None:
    """(router, experts, the shared expert's stored weights), or None where the block is of another kind."""
    parts = dict(mlp.named_children())
    router, experts = parts.pop("gate", None) or parts.pop("router", None), parts.pop("experts", None)
    if not isinstance(router, KernelRouter) or not hasattr(experts, "store"):
        return None
    shared = parts.pop("shared_experts", None)
    if parts:
        return None
    if shared is None:
        return router, experts, nothing_shared(router.weight.shape[1])
    layers = [shared.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")]
    if any(layer.bias is not None for layer in layers):
        return None
    return router, experts, tuple(layer.stored for layer in layers)


def fuse_layers(model: Any, layout: KvLayout) -> int:
    """Put fused layers into a transformers model whose small modules are replaced already; returns how many were proven."""
    layers, pool = model.model.layers, KvPool(layout, 1)
    for number, layer in enumerate(layers):
        fused = _proven_layer(model.model, layer, pool)
        if fused is None:
            log.info("layer %d runs in its family's own code, which is slower", number)
        else:
            layers[number] = fused
    return sum(isinstance(layer, FusedLayer) for layer in layers)


@torch.inference_mode()
def _proven_layer(model: Any, layer: Any, pool: KvPool) -> FusedLayer | None:
    sequence = pool.new_sequence()
    sequence.reserve(PROBE_ROWS)
    plan = StepPlan([Segment(sequence, 0, PROBE_ROWS, None)])
    x = torch.randn(1, PROBE_ROWS, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(PROBE_ROWS)[None]
    try:
        rotary = model.rotary_emb(x, positions)
        call: dict[str, Any] = {"position_embeddings": rotary, "position_ids": positions, "attention_mask": None}
        expected = layer(x, step_plan=plan, **call)
        # Cosines cover all rotary dimensions, each pair's twice, or one half of them.
        width = rotary[0].shape[-1]
        for half in (width // 2, width):
            if 2 * half > pool.layout.key_size:
                continue
            fused = FusedLayer(layer, half)
            if equal(fused(x, step_plan=plan, **call), expected):
                return fused
    except (AttributeError, TypeError):
        pass
    finally:
        sequence.release()
    return None
