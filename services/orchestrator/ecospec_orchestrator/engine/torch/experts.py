"""Routed experts of one layer: how their weights are kept in memory, and the forward pass over those that a step hits."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F

from ...core import SettingsError
from .expert_kernels import GPT_OSS, SILU, experts_rows
from .quantised import check_fp8, check_mxfp4, dequantise_fp8, dequantise_mxfp4, kernel_scales_fp8

Gate = Literal["silu", "gpt_oss"]
_GATE_KINDS = {"silu": SILU, "gpt_oss": GPT_OSS}


class ExpertStore(Protocol):
    """The routed experts of one layer."""

    experts: int
    bytes_per_expert: int  # as stored, biases and scales included

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """float32 [T, H], int64 [T, k] and float32 [T, k] -> float32 [T, H]: each row's experts, weighted and summed. Each
        distinct expert is read once; a row's result does not depend on the other rows."""

    def dequantised(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights that `forward` computes with: float32 gate_up [2 I, H], gate rows first, and down [H, I]."""


class Options(TypedDict, total=False):
    """What all stores take.

    gate: "silu" is silu(gate) * up, the default; "gpt_oss" is (up + 1) * gate * sigmoid(alpha * gate), with gate at most
    `limit` and up within +-limit. gate_up_bias [E, 2 I] and down_bias [E, H]: both or none. interleaved: rows of gate_up and
    of its bias alternate between gate and up, as gpt-oss stores them; the store puts the gate's first.
    """

    gate: Gate
    alpha: float
    limit: float
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    interleaved: bool


class _Experts:
    """What the stores share. Weights: tensors of one precision and layout, expert by row: gate_up [E, 2 I, ...] and
    down [E, H, ...]; a subclass says what they mean, and how the kernels see them where that differs."""

    def __init__(
        self,
        gate_up: tuple[torch.Tensor, ...],
        down: tuple[torch.Tensor, ...],
        *,
        gate: Gate = "silu",
        alpha: float = 1.702,
        limit: float = 7.0,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        if (gate_up_bias is None) != (down_bias is None):
            raise SettingsError("routed experts have only one of the biases gate_up and down; they need both or none.")
        self.experts = len(down[0])
        stored = (*gate_up, *down, *(b for b in (gate_up_bias, down_bias) if b is not None))
        self.bytes_per_expert = sum(t[0].numel() * t.element_size() for t in stored)
        if interleaved:
            gate_up = tuple(map(_gate_first, gate_up))
            gate_up_bias = None if gate_up_bias is None else _gate_first(gate_up_bias)
        self.gate, self.alpha, self.limit = gate, alpha, limit
        self.gate_up, self.down = (
            tuple(t.detach().contiguous() for t in gate_up),
            tuple(t.detach().contiguous() for t in down),
        )
        self.gate_up_bias = None if gate_up_bias is None else gate_up_bias.detach().float().contiguous()
        self.down_bias = None if down_bias is None else down_bias.detach().float().contiguous()
        if down[0].device.type == "cpu":
            # An expert's gate and up projections are two matrices to the kernels.
            halves = tuple(t.view(2 * len(t), t.shape[1] // 2, *t.shape[2:]) for t in self.gate_up)
            none = np.zeros((0, 0), np.float32)
            self.kernel_arguments = (
                self._arrays(*halves),
                self._arrays(*self.down),
                none if self.gate_up_bias is None else self.gate_up_bias.numpy(),
                none if self.down_bias is None else self.down_bias.numpy(),
                (_GATE_KINDS[gate], np.float32(alpha), np.float32(limit)),
            )

    @staticmethod
    def _arrays(*weights: torch.Tensor) -> tuple[np.ndarray, ...]:
        """As quantised_kernels.products takes them."""
        return tuple(t.numpy() for t in weights)

    @staticmethod
    def _dequantise(*weights: torch.Tensor) -> torch.Tensor:
        """[..., O, ...] -> float32 [..., O, I]."""
        raise NotImplementedError

    def dequantised(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Each half by itself: block scales do not run on from the gate's rows into those of the up projection.
        halves = (t[expert].unflatten(0, (2, -1)) for t in self.gate_up)
        return self._dequantise(*halves).flatten(0, 1), self._dequantise(*(t[expert] for t in self.down))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if hidden.device.type != "cpu":
            return self._forward_by_expert(hidden, index, weight)
        out = torch.empty(hidden.shape)
        inputs = (t.detach().contiguous().numpy() for t in (hidden, index, weight))
        experts_rows(*self.kernel_arguments, *inputs, out.numpy())
        return out

    def _forward_by_expert(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same in plain torch, for devices that the kernels do not run on."""
        by_slot = hidden.new_empty(*index.shape, hidden.shape[1])
        for expert in index.unique().tolist():
            gate_up, down = self.dequantised(expert)
            row, slot = torch.where(index == expert)
            biases = [None if b is None else b[expert] for b in (self.gate_up_bias, self.down_bias)]
            g, u = F.linear(hidden[row], gate_up, biases[0]).chunk(2, -1)
            by_slot[row, slot] = F.linear(self._gated(g, u), down, biases[1])
        return (by_slot * weight[..., None]).sum(1)

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self.gate == "silu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class _PlainExperts(_Experts):
    dtype: ClassVar[torch.dtype]

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, **options: Unpack[Options]) -> None:
        wrong = [str(t.dtype) for t in (gate_up, down) if t.dtype != self.dtype]
        if wrong:
            raise SettingsError(f"routed experts are {wrong[0]}; {type(self).__name__} keeps {self.dtype}.")
        super().__init__((gate_up,), (down,), **options)

    @staticmethod
    def _dequantise(*weights: torch.Tensor) -> torch.Tensor:
        return weights[0].float()


class Float32Experts(_PlainExperts):
    """gate_up: float32 [E, 2 I, H]; down: float32 [E, H, I]."""

    dtype = torch.float32


class Bfloat16Experts(_PlainExperts):
    """gate_up: bfloat16 [E, 2 I, H]; down: bfloat16 [E, H, I]."""

    dtype = torch.bfloat16

    @staticmethod
    def _arrays(*weights: torch.Tensor) -> tuple[np.ndarray, ...]:
        return tuple(t.view(torch.uint16).numpy() for t in weights)


class Mxfp4Experts(_Experts):
    """gate_up_blocks: uint8 [E, 2 I, H/32, 16], gate_up_scales: uint8 [E, 2 I, H/32]; down_blocks: uint8 [E, H, I/32, 16],
    down_scales: uint8 [E, H, I/32]. A SettingsError refuses scales that are no numbers."""

    def __init__(
        self,
        gate_up_blocks: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down_blocks: torch.Tensor,
        down_scales: torch.Tensor,
        **options: Unpack[Options],
    ) -> None:
        check_mxfp4(gate_up_blocks, gate_up_scales)
        check_mxfp4(down_blocks, down_scales)
        super().__init__((gate_up_blocks, gate_up_scales), (down_blocks, down_scales), **options)

    @staticmethod
    def _arrays(*weights: torch.Tensor) -> tuple[np.ndarray, ...]:
        blocks, scales = weights
        return blocks.flatten(-2).numpy(), scales.numpy()

    @staticmethod
    def _dequantise(*weights: torch.Tensor) -> torch.Tensor:
        return dequantise_mxfp4(*weights)


class Fp8Experts(_Experts):
    """gate_up: uint8 or float8_e4m3fn [E, 2 I, H], gate_up_scales: [E, 2 ceil(I/128), ceil(H/128)], the gate's and behind them
    the up projection's, as each was quantised by itself; down: [E, H, I], down_scales: [E, ceil(H/128), ceil(I/128)].
    A SettingsError refuses weights and scales that are no numbers."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
        **options: Unpack[Options],
    ) -> None:
        if options.get("interleaved"):
            raise SettingsError("FP8 experts cannot have interleaved gate and up rows: these would share scales.")
        if gate_up.shape[1] % 2 or gate_up_scales.shape[1] % 2:
            raise SettingsError(
                f"FP8 gate_up has {gate_up.shape[1]} rows and {gate_up_scales.shape[1]} rows of scales; both must be even: "
                "the gate's and as many of the up projection."
            )
        check_fp8(*(t.unflatten(1, (2, -1)) for t in (gate_up, gate_up_scales)))
        check_fp8(down, down_scales)
        super().__init__((gate_up.view(torch.uint8), gate_up_scales), (down.view(torch.uint8), down_scales), **options)

    @staticmethod
    def _arrays(*weights: torch.Tensor) -> tuple[np.ndarray, ...]:
        weight, scales = weights
        return weight.numpy(), kernel_scales_fp8(scales).numpy()

    @staticmethod
    def _dequantise(*weights: torch.Tensor) -> torch.Tensor:
        return dequantise_fp8(*weights)


def store_of(module: Any) -> ExpertStore:
    """The store of a transformers experts module's own weights, bfloat16 or float32, whose memory it shares where the layout
    allows. A SettingsError refuses other precisions and activations."""
    transposed = getattr(module, "is_transposed", False)
    gate_up, down = (t.detach().mT if transposed else t.detach() for t in (module.gate_up_proj, module.down_proj))
    options: Options = {"interleaved": not getattr(module, "is_concatenated", True)}
    if getattr(module, "has_bias", False):
        options |= {"gate_up_bias": module.gate_up_proj_bias, "down_bias": module.down_proj_bias}
    if hasattr(module, "alpha"):
        options |= {"gate": "gpt_oss", "alpha": module.alpha, "limit": module.limit}
    elif "silu" not in type(module.act_fn).__name__.lower():
        raise SettingsError(
            f"routed experts are activated by {module.act_fn}; only SiLU and gpt-oss's gate are supported."
        )
    for kind in (Bfloat16Experts, Float32Experts):
        if gate_up.dtype == kind.dtype:
            return kind(gate_up, down, **options)
    raise SettingsError(f"routed experts are {gate_up.dtype}; torch.bfloat16 and torch.float32 are supported.")


def experts_forward(module: Any, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface over `module.store`: hidden float32 [T, H]; index int64 [T, k]; weight float32 [T, k], as
    the router scaled it -> float32 [T, H]. What was routed is left in module.routed."""
    module.routed = index
    store: ExpertStore = module.store
    return store.forward(hidden, index, weight)


def _gate_first(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2 I, ...], gate and up alternating -> the gate's rows, then the up projection's."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
