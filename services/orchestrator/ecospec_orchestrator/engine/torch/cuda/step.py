"""One forward of the model over packed rows on CUDA: replayed from a graph up to 64 rows, launch by launch beyond (prefill)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from ..cache import KvPool
from ..experts import ExpertStore
from ..step_plan import Segment, StepPlan
from .attention_triton import PADDINGS, RowPlan, row_tensors, write_and_attend
from .graph import ROW_COUNTS, CaptureBackend, StepGraphs, Tensors, only_real

NAME = "ecospec_cuda"


class DeviceStep:
    """Runs a transformers model whose experts modules have a store, with a KV pool on the same device.

    features: returns and forgets the residual streams, float32 [rows, hidden] each, that the model's hooks kept in the forward
    just run. backend: records graphs, for which every store must be a TritonExperts; None never does.
    """

    def __init__(
        self,
        model: Any,
        pool: KvPool,
        experts: Sequence[Any],
        features: Callable[[], list[torch.Tensor]],
        backend: CaptureBackend | None,
        row_counts: Sequence[int] = ROW_COUNTS,
    ) -> None:
        register()
        model.set_attn_implementation(NAME)
        self.model, self.pool, self.experts, self.features = model, pool, experts, features
        self.device = pool.keys.device
        paddings = {"tokens": 0, "positions": 0, **PADDINGS}
        self._graphs = None if backend is None else StepGraphs(self._with_logits, paddings, backend, row_counts)

    def __call__(
        self, tokens: np.ndarray, positions: np.ndarray, segments: list[Segment], head: bool
    ) -> dict[str, torch.Tensor]:
        """tokens, positions: int64 [rows] -> on the device: "features" float32 [rows, feature_size]; with head also "logits"
        float32 [rows, vocabulary] and "experts" int64 [rows, MoE layers, top_k]. The caches' pages must be reserved."""
        inputs = self._inputs(tokens, positions, segments)
        if head and self._graphs is not None:
            return self._graphs(inputs)
        inputs["real"] = torch.ones(len(tokens), dtype=torch.bool, device=self.device)
        return self._with_logits(inputs) if head else self._features_of(inputs)[1]

    @property
    def computed_by(self) -> str:
        """What runs a step, for a person."""
        return (
            "CUDA graphs" if self._graphs is not None else "CUDA launches (its experts are not for the Triton kernel)"
        )

    def warm_up(self) -> None:
        """Record the graphs of sequences that have one page: of every row count, and with what Triton compiles for all."""
        if self._graphs is None:
            return
        sequence = self.pool.new_sequence()
        sequence.reserve(1)
        token = np.zeros(1, np.int64)
        self._graphs.warm_up(self._inputs(token, token, [Segment(sequence, 0, 1, None)]))
        sequence.release()

    def _inputs(self, tokens: np.ndarray, positions: np.ndarray, segments: list[Segment]) -> dict[str, torch.Tensor]:
        return {
            "tokens": torch.from_numpy(tokens).to(self.device),
            "positions": torch.from_numpy(positions).to(self.device),
            **row_tensors(StepPlan(segments), self.device),
        }

    def _with_logits(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        hidden, results = self._features_of(inputs)
        experts = torch.stack([module.routed for module in self.experts], 1)
        return {**results, "logits": self.model.lm_head(hidden), "experts": experts}

    def _features_of(self, inputs: Tensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        plan = DevicePlan(self.pool, RowPlan(*(inputs[name] for name in PADDINGS)))
        stores = [module.store for module in self.experts]
        for module, store in zip(self.experts, stores, strict=True):
            module.store = _RealRows(store, inputs["real"])
        try:
            hidden = self.model.model(
                input_ids=inputs["tokens"][None],
                position_ids=inputs["positions"][None],
                use_cache=False,
                step_plan=plan,
            ).last_hidden_state[0]
        finally:
            for module, store in zip(self.experts, stores, strict=True):
                module.store = store
        kept = self.features()
        return hidden, {"features": torch.cat(kept, -1) if kept else hidden.new_empty(len(hidden), 0)}


class DevicePlan:
    """Where attention finds the cache and what each row sees."""

    def __init__(self, pool: KvPool, rows: RowPlan) -> None:
        self.pool, self.rows = pool, rows


class _RealRows:
    """A store for one step, in which padding rows are routed to no expert."""

    def __init__(self, store: ExpertStore, real: torch.Tensor) -> None:
        self.store, self.real = store, real

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.store.forward(hidden, only_real(index, self.real), weight)


def attend_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    step_plan: DevicePlan,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """modules.attend_segments for a DevicePlan: query [1, heads, T, D]; key [1, kv_heads, T, D]; value [1, kv_heads, T, V] ->
    [1, T, heads, V]."""
    layer, pool = module.layer_idx, step_plan.pool
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    rows, cache = step_plan.rows, (pool.keys[layer], pool.values[layer])
    return write_and_attend(q, k, v, *cache, rows, scaling, sliding_window, s_aux)[None], None


def register() -> None:
    """Make NAME known to transformers as an attention implementation. It has no mask function on purpose: transformers then
    builds no mask, and does not look for packed sequences in the positions, for which it would wait for the device."""
    AttentionInterface.register(NAME, attend_rows)
