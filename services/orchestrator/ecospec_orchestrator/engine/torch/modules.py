"""Our attention and experts functions, registered through transformers' interfaces, and a bfloat16 linear layer.

Nothing of a model family's own code is copied: its classes run unchanged over packed rows of several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from . import kernels

NAME = "ecospec"
MAX_KERNEL_ROWS = (
    512  # a prefill chunk; up to 384 rows the kernels took half the time of widening the weights for a matrix product
)


class SequenceCache:
    """Keys and values of one sequence: float32 [layers, 2, kv_heads, capacity, head_size], grown by doubling."""

    def __init__(self, layers: int, kv_heads: int, head_size: int) -> None:
        self.store = torch.empty(layers, 2, kv_heads, 256, head_size)
        self.length = 0  # committed positions
        self.pending = 0  # uncommitted rows behind them, of the last verify

    def reserve(self, positions: int) -> None:
        capacity = self.store.shape[3]
        if positions > capacity:
            layers, two, heads, _, size = self.store.shape
            grown = torch.empty(layers, two, heads, max(positions, 2 * capacity), size)
            grown[:, :, :, : self.length] = self.store[:, :, :, : self.length]
            self.store = grown

    @torch.inference_mode()  # a store that grew within a forward may be written nowhere else
    def commit(self, rows: np.ndarray) -> None:
        """Keep the given pending rows, ascending, and drop the rest. No key or value is computed again."""
        if len(rows) and (rows[0] < 0 or rows[-1] >= self.pending):
            raise ValueError(f"rows {rows.tolist()} cannot be committed; the last step holds {self.pending} rows.")
        if not np.array_equal(rows, np.arange(len(rows))):
            kept = self.store[:, :, :, torch.from_numpy(rows) + self.length]
            self.store[:, :, :, self.length : self.length + len(rows)] = kept
        self.length += len(rows)
        self.pending = 0


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the packed step belong to `cache`; visible: bool [n, m], True where a row may attend to one of the
    last m >= n rows behind the committed positions (itself and its ancestors; the first m - n rows are pending from earlier
    forwards), None for a plain causal run."""

    cache: SequenceCache
    start: int
    stop: int
    visible: torch.Tensor | None


@dataclass
class StepPlan:
    segments: list[Segment]


def attend_segments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    step_plan: StepPlan,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, T, D]; key, value: [1, kv_heads, T, D] -> [1, T, heads, D]. Tree-masked, per sequence."""
    out = torch.empty(query.shape[2], query.shape[1], query.shape[3])
    for s in step_plan.segments:
        layer = s.cache.store[module.layer_idx]
        pending = 0 if s.visible is None else s.visible.shape[1] - (s.stop - s.start)
        begin = s.cache.length + pending
        end = begin + s.stop - s.start
        layer[0, :, begin:end] = key[0, :, s.start : s.stop]
        layer[1, :, begin:end] = value[0, :, s.start : s.stop]
        out[s.start : s.stop] = _attend(
            query[0, :, s.start : s.stop], layer[0, :, :end], layer[1, :, :end], s.visible, scaling
        )
    return out[None], None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """q: [heads, n, D]; k, v: [kv_heads, C, D]; visible as in Segment -> [n, heads, D]."""
    (heads, n, size), (kv_heads, context, _) = q.shape, k.shape
    score = q.reshape(kv_heads, heads // kv_heads * n, size) @ k.transpose(1, 2) * scaling
    if n > 1 or visible is not None and visible.shape[1] > 1:
        own = torch.ones(n, n).tril().bool() if visible is None else visible
        score.view(heads, n, context)[:, :, context - own.shape[1] :].masked_fill_(~own, float("-inf"))
    return (score.softmax(-1) @ v).view(heads, n, size).transpose(0, 1)


def experts_forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden: float32 [T, H]; index: [T, k]; weight: [T, k] -> [T, H]. Each distinct expert is read once; what was routed is
    left in module.routed (int64 [T, k])."""
    module.routed = index
    rows, top_k = index.shape
    if rows <= MAX_KERNEL_ROWS and module.gate_up_proj.dtype == torch.bfloat16:
        out = torch.empty(hidden.shape)
        weights = bits(module.gate_up_proj), bits(module.down_proj)
        inputs = (t.contiguous().numpy() for t in (hidden, index, weight))
        kernels.experts_rows(*weights, *inputs, out.numpy())
        return out
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    pair_rows, shares = (order // top_k).split(counts.tolist()), weight.reshape(-1)[order].split(counts.tolist())
    by_token = torch.empty(len(flat), hidden.shape[1])
    by_token[order] = torch.cat(
        [
            _one_expert(module, expert, hidden[part_rows], part_share)
            for expert, part_rows, part_share in zip(hit.tolist(), pair_rows, shares, strict=True)
        ]
    )
    # Sum a token's experts in its own order, whatever else the step holds.
    return by_token.view(rows, top_k, -1).sum(1)


def _one_expert(module: Any, expert: int, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, module.gate_up_proj[expert].float()).chunk(2, -1)
    return F.linear(module.act_fn(gate) * up, module.down_proj[expert].float()) * share[:, None]


class Bfloat16Linear(nn.Module):
    """y = x W^T with W stored as bfloat16 [O, I] and everything else float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._bits = bits(weight)  # the same memory

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows) > MAX_KERNEL_ROWS:
            return F.linear(x, self.weight.float())
        out = torch.empty(len(rows), len(self._bits))
        kernels.linear_rows(self._bits, rows.numpy(), out.numpy())
        return out.view(*x.shape[:-1], -1)


class Bfloat16Embedding(nn.Module):
    """Token rows of a bfloat16 table, as float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens].float()


def bits(weight: torch.Tensor) -> np.ndarray:
    """A bfloat16 tensor's storage as a uint16 array, shared."""
    return weight.detach().view(torch.uint16).numpy()


def register() -> None:
    """Make "ecospec" known to transformers as an attention, mask and experts implementation."""
    AttentionInterface.register(NAME, attend_segments)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    ExpertsInterface.register(NAME, experts_forward)
