"""The embedded engine: a transformers mixture-of-experts model over packed, tree-masked rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ecospec_proto.geometry import TargetGeometry

from ..base import CacheUse, StepBytes, Verified, VerifyItem
from . import kernels
from .cache import KvPool, SequenceCache
from .experts import store_of
from .fused_layer import fuse_layers
from .geometry import kv_layout_of
from .layer_stack import LayerStack, proven_stack
from .modules import NAME, register
from .row_modules import replace_small_modules
from .step_plan import Segment, StepPlan

if TYPE_CHECKING:
    from .cuda.step import DeviceStep

PREFILL_CHUNK = 512


class TorchEngine:
    """Implements Engine. One thread calls it at a time. feature_layers: residual streams after these layers are handed out
    side by side as EAGLE-3 features. kv_pages: size of the KV cache, in pages of cache.PAGE_TOKENS tokens."""

    def __init__(
        self,
        model: nn.Module,
        geometry: TargetGeometry,
        step_bytes: StepBytes,
        feature_layers: tuple[int, ...],
        max_context_tokens: int,
        kv_pages: int,
        threads: int = 1,
        prefix_reuse: bool = True,
    ) -> None:
        register()
        self.threads = threads
        model.set_attn_implementation(NAME)
        model.set_experts_implementation(NAME)
        self.model = model.eval()
        self.geometry, self.step_bytes, self.max_context_tokens = geometry, step_bytes, max_context_tokens
        self.feature_layers = feature_layers
        self.device = next(model.parameters()).device
        self.kv_pool = KvPool(kv_layout_of(model.config.to_dict()), kv_pages, self.device, prefix_reuse)
        self._features: list[torch.Tensor] = []
        self._experts = [m for m in model.modules() if hasattr(m, "store") or _holds_experts(m)]
        for experts in self._experts:
            if not hasattr(experts, "store"):
                experts.store = store_of(experts)
        self.fused_layers = 0
        self._stack: LayerStack | None = None
        if self.device.type == "cpu":
            replace_small_modules(self.model)
            self.fused_layers = fuse_layers(self.model, self.kv_pool.layout)
            self._stack = proven_stack(self.model, feature_layers, self.kv_pool)
        for layer in feature_layers:
            model.model.layers[layer].register_forward_hook(self._keep_feature)
        self._device_step: DeviceStep | None = None
        if self.device.type == "cuda":
            from .cuda.install import make_device_step  # needs triton

            self._device_step = make_device_step(self.model, self.kv_pool, self._experts, self._take_features)

    def _keep_feature(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        self._features.append(output[0])

    def _take_features(self) -> list[torch.Tensor]:
        kept, self._features = self._features, []
        return kept

    def enter_thread(self) -> None:
        """Both thread pools keep their size per calling thread, and CUDA its device."""
        torch.set_num_threads(self.threads)
        kernels.set_threads(self.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # kernels of Triton are launched on the current one

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the step's CUDA graphs, where it has any. Called in the thread that will run them."""
        if self._device_step is not None:
            self._device_step.warm_up()

    @property
    def computed_by(self) -> str:
        """What runs a step, for a person."""
        if self._device_step is not None:
            return self._device_step.computed_by
        return f"kernels on {self.threads} threads" if self.device.type == "cpu" else "plain torch (triton is missing)"

    def new_sequence(self) -> SequenceCache:
        return self.kv_pool.new_sequence()

    def release(self, sequence: SequenceCache) -> None:
        sequence.release()

    def cache_use(self) -> CacheUse:
        return self.kv_pool.use()

    def check_idle(self) -> str | None:
        return self.kv_pool.check_idle()

    def reuse(self, sequence: SequenceCache, tokens: np.ndarray) -> list[torch.Tensor]:
        return sequence.reuse(tokens)

    @torch.inference_mode()
    def prefill(self, sequence: SequenceCache, tokens: np.ndarray) -> torch.Tensor:
        """tokens: int64 [n]; returns float32 features [n, feature_size]."""
        return torch.cat([features for features, _ in self._chunks(sequence, tokens)])

    @torch.inference_mode()
    def prefill_with_experts(self, sequence: SequenceCache, tokens: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
        """prefill(), and uint8 or uint16 [n, layers, top_k]."""
        parts = list(self._chunks(sequence, tokens, routes=True))
        return torch.cat([features for features, _ in parts]), self._experts_dtype(
            np.concatenate([e for _, e in parts])
        )

    def _chunks(
        self, sequence: SequenceCache, tokens: np.ndarray, routes: bool = False
    ) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Features and, where routes asks for them, experts."""
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            sequence.reserve(sequence.length + len(chunk))
            positions = sequence.length + np.arange(len(chunk))
            segments = [Segment(sequence, 0, len(chunk), None)]
            _, features, experts = self._forward(chunk, positions, segments, head=False, routes=routes)
            sequence.append(chunk, features)
            yield features, experts

    def _experts_dtype(self, routed: np.ndarray) -> np.ndarray:
        return routed.astype(np.uint8 if self.geometry.experts <= 256 else np.uint16)

    @torch.inference_mode()
    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        segments, positions, start = [], [], 0
        for item in items:
            n = len(item.tokens)
            item.sequence.reserve(item.sequence.length + n)
            visible, depth = (None, np.zeros(1, np.int64)) if n == 1 else ancestors(item.parents)
            seen = None if visible is None else torch.from_numpy(visible)
            segments.append(Segment(item.sequence, start, start + n, seen))
            positions.append(item.sequence.length + depth)
            start += n
        logits, features, routed = self._forward(
            np.concatenate([i.tokens for i in items]), np.concatenate(positions), segments, head=True
        )
        experts = self._experts_dtype(routed)
        results = []
        for item, segment in zip(items, segments, strict=True):
            rows = slice(segment.start, segment.stop)
            segment.cache.pend(item.tokens, features[rows])
            results.append(Verified(logits[rows], features[rows], experts[rows]))
        return results

    def commit(self, sequence: SequenceCache, rows: np.ndarray) -> None:
        sequence.commit(rows)

    def _forward(
        self, tokens: np.ndarray, positions: np.ndarray, segments: list[Segment], head: bool, routes: bool = True
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
        """Packed rows -> (logits [rows, vocabulary] if head, features [rows, feature_size], experts int [rows, layers, k], or
        anything if not routes)."""
        plan = StepPlan(segments)
        if self._stack is not None:
            _, logits, found, routed = self._stack.run(tokens, positions, plan, head)
            return logits, torch.from_numpy(found), routed
        if self._device_step is not None:
            on_device = self._device_step(tokens, positions, segments, head)
            if not head:
                routed = self._routed() if routes else np.empty((len(tokens), 0))
                return np.empty((len(tokens), 0)), on_device["features"], routed
            logits, experts = (on_device[name].cpu().numpy() for name in ("logits", "experts"))
            return logits, on_device["features"], experts
        ids, places = (torch.from_numpy(a).to(self.device)[None] for a in (tokens, positions))
        output = self.model.model(input_ids=ids, position_ids=places, use_cache=False, step_plan=plan)
        hidden = output.last_hidden_state[0]
        kept = self._take_features()
        features = torch.cat(kept, -1) if kept else hidden.new_empty(len(tokens), 0)
        return (
            self.model.lm_head(hidden).cpu().numpy() if head else np.empty((len(tokens), 0)),
            features,
            self._routed(),
        )

    def _routed(self) -> np.ndarray:
        return torch.stack([m.routed for m in self._experts], 1).cpu().numpy()


def _holds_experts(module: nn.Module) -> bool:
    return getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3


def ancestors(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """parents: int [n], row 0 the root with parent -1 -> (visible bool [n, n]: itself and its ancestors, depth int64 [n])."""
    n = len(parents)
    visible, depth = np.eye(n, dtype=bool), np.zeros(n, np.int64)
    for row in range(1, n):
        visible[row] |= visible[parents[row]]
        depth[row] = depth[parents[row]] + 1
    return visible, depth
