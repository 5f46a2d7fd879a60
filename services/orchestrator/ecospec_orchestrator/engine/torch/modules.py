"""Our attention and experts functions, registered through transformers' interfaces, and our linear layers.

Nothing of a model family's own code is copied: its classes run unchanged over packed rows of several sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from . import attention_kernels, layer_kernels
from .cuda.linear import bfloat16_linear
from .experts import experts_forward
from .step_plan import Segment as Segment
from .step_plan import StepPlan as StepPlan

NAME = "ecospec"
NONE = np.empty(0, np.float32)


def attend_segments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    step_plan: StepPlan,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query: [1, heads, T, D]; key: [1, kv_heads, T, D]; value: [1, kv_heads, T, V] -> [1, T, heads, V]. Tree-masked, per
    sequence. sliding_window: how many positions a row sees at most, itself included; s_aux: attention sinks, one logit per head,
    that take their share of the softmax."""
    pool = step_plan.segments[0].cache.pool
    keys, values = pool.keys[module.layer_idx], pool.values[module.layer_idx]
    if query.device.type != "cpu":
        return _attend_by_segment(module, query, key, value, scaling, step_plan, sliding_window, s_aux), None
    q, k, v = (t[0].transpose(0, 1).contiguous().numpy() for t in (query, key, value))
    out = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    attention_kernels.write_and_attend(
        q, k, v, keys.numpy(), values.numpy(), step_plan.arrays, np.float32(scaling), sliding_window or 0,
        NONE if s_aux is None else s_aux.detach().numpy(), out,
    )  # fmt: skip
    return torch.from_numpy(out)[None], None


def _attend_by_segment(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    step_plan: StepPlan,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """attend_segments in plain torch, for devices that the kernels do not run on."""
    layer = module.layer_idx
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for s in step_plan.segments:
        end = s.begin + s.stop - s.start
        page, offset = s.cache.slots(s.begin, end)
        s.cache.pool.keys[layer][page, :, offset] = key[0, :, s.start : s.stop].transpose(0, 1)
        s.cache.pool.values[layer][page, :, offset] = value[0, :, s.start : s.stop].transpose(0, 1)
        seen = seen_slots(s, window).to(query.device)
        out[s.start : s.stop] = attend_dense(
            query[0, :, s.start : s.stop], *s.cache.gather(layer, end), seen, scaling, sinks
        )
    return out[None]


def seen_slots(s: Segment, window: int | None) -> torch.Tensor:
    """bool [rows, slots up to the segment's last]: what each row of a segment sees."""
    rows = s.stop - s.start
    own = torch.ones(rows, rows).tril().bool() if s.visible is None else s.visible.cpu()
    seen = torch.cat([torch.ones(rows, s.cache.length, dtype=torch.bool), own], 1)
    # Seen slots are a path, so that their positions run on: the last `window` of them are in the window.
    return seen if window is None else seen & (seen.flip(1).cumsum(1).flip(1) <= window)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q: [heads, n, D]; k: [kv_heads, C, D]; v: [kv_heads, C, V]; seen: bool [n, C]; sinks: [heads] -> [n, heads, V]."""
    (heads, n, size), (kv_heads, context, _) = q.shape, k.shape
    score = (q.reshape(kv_heads, heads // kv_heads * n, size) @ k.transpose(1, 2) * scaling).view(heads, n, context)
    score = score.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.view(-1, 1, 1).expand(-1, n, 1)], -1)
    share = score.softmax(-1)[..., :context].reshape(kv_heads, -1, context)
    return (share @ v).view(heads, n, v.shape[2]).transpose(0, 1)


class KernelLinear(nn.Module):
    """y = x W^T + b with W [O, I] in bfloat16 or float32 as it is stored and everything else float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    @property
    def stored(self) -> tuple[np.ndarray]:
        """The weights as quantised_kernels.products takes them: one matrix, in the same memory."""
        return (bits(self.weight)[None],) if self.weight.dtype == torch.bfloat16 else (self.weight.numpy()[None],)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu":
            if self.weight.dtype == torch.bfloat16:
                return bfloat16_linear(x, self.weight, self.bias)
            return F.linear(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = np.empty((len(rows), len(self.weight)), np.float32)
        layer_kernels.linear(self.stored, NONE if self.bias is None else self.bias.numpy(), rows.numpy(), out)
        return torch.from_numpy(out).view(*x.shape[:-1], -1)


class Bfloat16Linear(KernelLinear):
    """KernelLinear of bfloat16 weights."""


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
