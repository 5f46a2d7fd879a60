"""The embedded engine: a transformers mixture-of-experts model over packed, tree-masked rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ecospec_proto.geometry import TargetGeometry

from ..base import StepBytes, Verified, VerifyItem
from . import kernels
from .modules import NAME, Segment, SequenceCache, StepPlan, register

PREFILL_CHUNK = 512


class TorchEngine:
    """Implements Engine. One thread calls it at a time. feature_layers: residual streams after these layers are handed out
    side by side as EAGLE-3 features."""

    def __init__(
        self,
        model: nn.Module,
        geometry: TargetGeometry,
        step_bytes: StepBytes,
        feature_layers: tuple[int, ...],
        max_context_tokens: int,
        threads: int = 1,
    ) -> None:
        register()
        self.threads = threads
        model.set_attn_implementation(NAME)
        model.set_experts_implementation(NAME)
        self.model = model.eval()
        self.geometry, self.step_bytes, self.max_context_tokens = geometry, step_bytes, max_context_tokens
        self.feature_layers = feature_layers
        self._features: list[torch.Tensor] = []
        self._experts = [m for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]
        for layer in feature_layers:
            model.model.layers[layer].register_forward_hook(self._keep_feature)

    def _keep_feature(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        self._features.append(output[0])

    def enter_thread(self) -> None:
        """Both thread pools keep their size per calling thread."""
        torch.set_num_threads(self.threads)
        kernels.set_threads(self.threads)

    def new_sequence(self) -> SequenceCache:
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return SequenceCache(config.num_hidden_layers, config.num_key_value_heads, size)

    @torch.inference_mode()
    def prefill(self, sequence: SequenceCache, tokens: np.ndarray) -> torch.Tensor:
        """tokens: int64 [n]; returns float32 features [n, feature_size]."""
        parts = []
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            sequence.reserve(sequence.length + len(chunk))
            positions = sequence.length + np.arange(len(chunk))
            _, features = self._forward(chunk, positions, [Segment(sequence, 0, len(chunk), None)], head=False)
            sequence.length += len(chunk)
            parts.append(features)
        return torch.cat(parts)

    @torch.inference_mode()
    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        segments, positions, start = [], [], 0
        for item in items:
            n = len(item.tokens)
            visible, depth = ancestors(item.parents)
            item.sequence.reserve(item.sequence.length + n)
            segments.append(Segment(item.sequence, start, start + n, torch.from_numpy(visible)))
            positions.append(item.sequence.length + depth)
            start += n
        hidden, features = self._forward(
            np.concatenate([i.tokens for i in items]), np.concatenate(positions), segments, head=True
        )
        routed = torch.stack([m.routed for m in self._experts], 1)  # [rows, layers, top_k]
        experts = routed.numpy().astype(np.uint8 if self.geometry.experts <= 256 else np.uint16)
        results = []
        for segment in segments:
            rows = slice(segment.start, segment.stop)
            segment.cache.pending = segment.stop - segment.start
            results.append(Verified(hidden[rows].numpy(), features[rows], experts[rows]))
        return results

    def commit(self, sequence: SequenceCache, rows: np.ndarray) -> None:
        sequence.commit(rows)

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, segments: list[Segment], head: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed rows -> (logits [rows, vocabulary] or last hidden states, features [rows, feature_size])."""
        self._features.clear()
        output = self.model.model(
            input_ids=torch.from_numpy(tokens)[None],
            position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
            step_plan=StepPlan(segments),
        ).last_hidden_state[0]
        features = torch.cat(self._features, -1) if self._features else torch.empty(len(tokens), 0)
        return (self.model.lm_head(output) if head else output), features


def ancestors(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """parents: int [n], row 0 the root with parent -1 -> (visible bool [n, n]: itself and its ancestors, depth int64 [n])."""
    n = len(parents)
    visible, depth = np.eye(n, dtype=bool), np.zeros(n, np.int64)
    for row in range(1, n):
        visible[row] |= visible[parents[row]]
        depth[row] = depth[parents[row]] + 1
    return visible, depth
