"""Drafting with an EAGLE-3 head: a dynamic tree of `depth` draft forwards, `top_k` candidates kept per level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..engine.torch.cache import KvPool
from ..engine.torch.geometry import KvLayout
from ..engine.torch.modules import NONE, Bfloat16Embedding, Bfloat16Linear, Segment, StepPlan, attend_segments
from ..engine.torch.row_modules import ROTARY_BLOCK
from . import eagle3_kernels
from .eagle3_formats import StoredHead, read_head
from .eagle3_head import Eagle3Head, RMSNorm, rope
from .target import TargetFacts
from .tree_drafter import TreeDrafter


class Eagle3Drafter(TreeDrafter):
    """embed_tokens: int64 [n] -> float32 [n, hidden], the target's or the head's own."""

    def __init__(self, head: Eagle3Head, embed_tokens: nn.Module, depth: int, top_k: int, kv_pages: int) -> None:
        c = head.config
        layout = KvLayout(1, c.num_key_value_heads, c.head_dim, c.head_dim)
        super().__init__(KvPool(layout, kv_pages, head.d2t.device), depth, top_k)
        self.head, self.embed_tokens = head.eval(), embed_tokens
        self.target_ids = head.target_ids.cpu().numpy()  # int64 [draft vocabulary]
        self._layer_bytes, self._vocabulary_bytes, self._fusion_bytes = (
            sum(p.numel() * p.element_size() for p in module.parameters())
            for module in (head.midlayer, head.lm_head, head.fc)
        )
        self._kernels = _Kernels(head) if self.device.type == "cpu" else None

    def bytes_read(self, levels: int, fed: bool) -> int:
        feeding = self._fusion_bytes + self._layer_bytes if fed else 0
        return feeding + levels * self._vocabulary_bytes + max(0, levels - 1) * self._layer_bytes

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(features)

    def _candidates(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        if self._kernels is not None:
            ids, probabilities = self._kernels.candidates(hidden.numpy(), self.top_k)
            return self.target_ids[ids], probabilities
        probability, draft_ids = self.head.lm_head(self.head.norm(hidden)).softmax(-1).topk(self.top_k)
        return self.target_ids[draft_ids.cpu().numpy()], probability.cpu().numpy()

    def _layer(
        self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray, segments: list[Segment]
    ) -> torch.Tensor:
        plan = StepPlan(segments)
        if self._kernels is not None:
            embedding = self.embed_tokens(torch.from_numpy(tokens)).numpy()
            return torch.from_numpy(self._kernels.forward(embedding, hidden.numpy(), positions, plan))
        layer = self.head.midlayer
        attention = layer.self_attn
        x = layer.inputs(self.embed_tokens(torch.from_numpy(tokens).to(self.device)), hidden)
        q, k, v = attention.qkv(x, torch.from_numpy(positions).to(self.device))
        attended, _ = attend_segments(attention, q[None], k[None], v[None], None, attention.head_dim**-0.5, plan)
        return layer.finish(hidden, attended[0].flatten(1))


class _Kernels:
    """The head's weights as eagle3_kernels takes them; in the same memory, so it lives as long as the head."""

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        norms = (layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm)
        half, scaling = attention.head_dim // 2, np.float32(attention.head_dim**-0.5)
        self._attention = (_stored(projections), _biases(projections), half, scaling)
        self._mlp, self._mlp_biases = _stored(gated), _biases(gated)
        self._norms = tuple(norm.weight.numpy() for norm in norms)
        self._eps = np.float32(head.config.rms_norm_eps)
        self._last = (head.norm.weight.numpy(), self._eps, head.lm_head.stored, _biases((head.lm_head,))[0])
        self._rotary = tuple(np.empty((0, half), np.float32) for _ in range(2))

    def forward(self, embedding: np.ndarray, hidden: np.ndarray, positions: np.ndarray, plan: StepPlan) -> np.ndarray:
        out = np.empty_like(hidden)
        eagle3_kernels.forward(
            embedding, hidden, self._norms, self._eps, self._head.midlayer.norm_before_residual, self._attention,
            self._turns(int(positions.max()) + 1), positions, plan.cache_arrays, plan.arrays, self._mlp, self._mlp_biases, out,
        )  # fmt: skip
        return out

    def candidates(self, hidden: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, probabilities = np.empty((len(hidden), top_k), np.int64), np.empty((len(hidden), top_k), np.float32)
        eagle3_kernels.candidates(hidden, *self._last, ids, probabilities)
        return ids, probabilities

    def _turns(self, positions: int) -> tuple[np.ndarray, ...]:
        """Cosines and sines of at least so many positions."""
        if positions > len(self._rotary[0]):
            attention, count = self._head.midlayer.self_attn, -(-positions // ROTARY_BLOCK) * ROTARY_BLOCK
            angle = torch.arange(count).float()[:, None] * attention.frequency
            self._rotary = tuple((attention.rope_factor * t).numpy() for t in (angle.cos(), angle.sin()))
        return self._rotary


def _stored(layers: Sequence[nn.Module]) -> tuple[Any, ...]:
    return tuple(layer.stored for layer in layers)


def _biases(layers: Sequence[nn.Module]) -> tuple[np.ndarray, ...]:
    return tuple(NONE if layer.bias is None else layer.bias.numpy() for layer in layers)


def eagle3_drafter(
    directory: Path, target: TargetFacts, depth: int, top_k: int, kv_pages: int, device: torch.device | str = "cpu"
) -> Eagle3Drafter:
    """Load a head of any format (eagle3_formats); its products run from bfloat16 weights. Raises SettingsError when it was made
    for another target or is damaged."""
    stored = read_head(directory, target)
    embed = _shared_or_own(stored.embed_tokens, target.embed_tokens)
    return Eagle3Drafter(build_head(stored).to(device), embed.to(device), depth, top_k, kv_pages)


def build_head(stored: StoredHead) -> Eagle3Head:
    """Linear layers with bfloat16 weights, everything else float32."""
    tensors = stored.tensors
    with torch.device("meta"):
        head = Eagle3Head(stored.config)
    for name, module in list(head.named_modules()):
        parent = head.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.Linear):
            weight, bias = tensors[f"{name}.weight"].bfloat16().contiguous(), tensors.get(f"{name}.bias")
            linear = Bfloat16Linear(weight) if bias is None else Bfloat16Linear(weight, bias.float())
            setattr(parent, name.rpartition(".")[2], linear)
        elif isinstance(module, RMSNorm):
            module.weight = nn.Parameter(tensors[f"{name}.weight"].float(), requires_grad=False)
    head.d2t, head.t2d = tensors["d2t"].long(), tensors["t2d"]
    attention = head.midlayer.self_attn
    attention.frequency, attention.rope_factor = rope(stored.config)
    attention.layer_idx = 0  # in the head's own cache
    return head


def _shared_or_own(own: torch.Tensor | None, shared: nn.Module) -> nn.Module:
    """Most heads that carry a token table carry the target's: one copy is enough then."""
    if own is None:
        return shared
    table = getattr(shared, "weight", None)
    if table is not None and table.shape == own.shape and torch.equal(table.to("cpu", own.dtype), own):
        return shared
    return Bfloat16Embedding(own.bfloat16())
