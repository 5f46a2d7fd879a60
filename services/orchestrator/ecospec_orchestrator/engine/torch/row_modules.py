"""CPU stand-ins for a family's own small modules, by structure and not by name: norm, router, rotary table, linear layer.

Each takes its place only after it gave the same result as the original on random rows. They save time, and no bit of a row's
result depends on the rows that share the step, which the framework's matrix products do not promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from . import layer_kernels
from .modules import NONE, KernelLinear

PROBE_ROWS = 3
TOLERANCE = 1e-4  # of a result's largest value
ROTARY_BLOCK = 1024  # positions that a rotary table grows by
STATIC_ROTARY = ("default", "linear", "yarn", "llama3")  # angles depend on the position alone


class KernelNorm(nn.Module):
    """Root-mean-square norm over the last dimension, times a weight."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(original.weight.detach().float(), requires_grad=False)
        self.eps = float(getattr(original, "variance_epsilon", None) or original.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        out = np.empty_like(rows)
        layer_kernels.norm(rows, self.weight.numpy(), np.float32(self.eps), out)
        return torch.from_numpy(out).view(x.shape)


class KernelRouter(nn.Module):
    """Linear layer and choice of a transformers router: what the chosen experts' weights are made from follows from the original's
    attributes. forward: [..., H] -> (logits float32 [R, E], weights float32 [R, k], experts int64 [R, k])."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(original.weight.detach().float().contiguous(), requires_grad=False)
        correction, bias = getattr(original, "e_score_correction_bias", None), getattr(original, "bias", None)
        self.register_buffer("e_score_correction_bias", correction)
        self.top_k = int(original.top_k)
        kind, groups, kept, scale = layer_kernels.SOFTMAX, 1, 1, 1.0
        normalise = bool(getattr(original, "norm_topk_prob", True))
        if correction is not None:
            kind, groups, kept = layer_kernels.SIGMOID, int(original.num_group), int(original.topk_group)
            scale = float(original.routed_scaling_factor)
        elif bias is not None:
            kind, normalise = layer_kernels.CHOSEN_SOFTMAX, False
        self.arguments = (
            (self.weight.numpy()[None],),
            *(NONE if t is None else t.detach().float().numpy() for t in (bias, correction)),
            (kind, groups, kept, normalise, np.float32(scale)),
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous().numpy()
        logits, index, weight = self.empty(len(rows))
        layer_kernels.route_and_share(rows, self.arguments, nothing_shared(rows.shape[1]), logits, index, weight, rows)
        return torch.from_numpy(logits), torch.from_numpy(weight), torch.from_numpy(index)

    def empty(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Room for logits, indices and weights of so many rows."""
        return (
            np.empty((rows, len(self.weight)), np.float32),
            np.empty((rows, self.top_k), np.int64),
            np.empty((rows, self.top_k), np.float32),
        )


def nothing_shared(hidden_size: int) -> tuple[tuple[np.ndarray], ...]:
    """A shared expert of inner width 0, for layer_kernels.route_and_share."""
    narrow = np.empty((1, 0, hidden_size), np.float32)
    return (narrow,), (narrow,), (np.empty((1, hidden_size, 0), np.float32),)


class RowByRow(nn.Module):
    """A router that we do not know: its own code, one row at a time."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = hidden.reshape(-1, hidden.shape[-1]).split(1)
        return tuple(torch.cat(parts) for parts in zip(*(self.original(row) for row in rows), strict=True))


class EachRow(nn.Module):
    """An activation, one row at a time: the framework's vector code rounds the last few elements of a tensor differently."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.original(row) for row in x.reshape(-1, x.shape[-1]).split(1)]).view(x.shape)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once. forward as the original's: (x, positions [1, T]) -> both [1, T, .]."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self._tables: tuple[np.ndarray, ...] = ()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = position_ids[0].numpy()
        return tuple(torch.from_numpy(table[positions])[None] for table in self.tables(int(positions.max()) + 1))

    def tables(self, positions: int) -> tuple[np.ndarray, ...]:
        """Cosines and sines of at least so many positions from 0 on, float32 [P, .] each."""
        while not self._tables or positions > len(self._tables[0]):
            start = len(self._tables[0]) if self._tables else 0
            ids = torch.arange(start, start + ROTARY_BLOCK)[None]
            found = [t[0].numpy() for t in self.original(torch.empty(1, 1, 1), ids)]
            old = self._tables or tuple(t[:0] for t in found)
            self._tables = tuple(np.concatenate(pair) for pair in zip(old, found, strict=True))
        return self._tables


def replace_small_modules(model: nn.Module) -> None:
    """Put stand-ins for linear layers, norms, routers and rotary positions into a transformers model, where they prove equal."""
    for parent, name, module in list(_children(model)):
        kind = type(module).__name__
        if type(module) is nn.Linear and module.weight.dtype in (torch.float32, torch.bfloat16):
            setattr(parent, name, KernelLinear(module.weight, module.bias))
        elif kind.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            x = _random(PROBE_ROWS, len(module.weight))
            stand_in = _proven(module, KernelNorm, x)
            setattr(parent, name, stand_in or module)
        elif kind.endswith("Router"):
            x = _random(PROBE_ROWS, module.weight.shape[1])
            setattr(parent, name, _proven(module, KernelRouter, x) or RowByRow(module))
        elif name == "act_fn" and hasattr(parent, "gate_proj"):
            setattr(parent, name, EachRow(module))
        elif kind.endswith("RotaryEmbedding") and getattr(module, "rope_type", None) in STATIC_ROTARY:
            setattr(parent, name, RotaryTable(module))


def equal(found: Any, expected: Any) -> bool:
    """Both tensors, or tuples of them: of one shape, and the same but for rounding. The order of chosen experts is free."""
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found.sort(-1).values, expected.sort(-1).values)
    if found.ndim == 2:
        found, expected = found.sort(-1).values, expected.sort(-1).values
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@torch.inference_mode()
def _proven(original: nn.Module, stand_in: Callable[[Any], nn.Module], x: torch.Tensor) -> nn.Module | None:
    try:
        made = stand_in(original)
    except (AttributeError, TypeError):  # another structure than the one that we know
        return None
    return made if equal(made(x), original(x)) else None


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child
