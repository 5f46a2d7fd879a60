"""Routed experts on CUDA: SwiGLU over only the experts that the step hits, each read once, bfloat16 or FP8 weights.

No shape and no launch depends on the routing and nothing waits for the device, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch

from ....core import SettingsError
from ..quantised import FP8_BLOCK, dequantise_fp8

FP8_CAPABILITY = (8, 9)  # the first CUDA architecture that converts E4M3
# Tiles: 32 rows of 64 weights, four in flight. Under 64 rows every token count is computed by one instruction (see
# experts_kernels.py); 64 weights are the most that compile for Hopper without spilling registers. Not tuned on a device yet.
BLOCK_ROWS, BLOCK_K, WARPS, STAGES = 32, 64, 4, 4
COMBINE_BLOCK = 512


def has_triton() -> bool:
    return find_spec("triton") is not None


def _kernels() -> ModuleType:
    """Imported on first use: the package must import where triton is not installed."""
    from . import experts_kernels

    return experts_kernels


@dataclass(frozen=True)
class TritonExperts:
    """The routed experts of one layer; an ExpertStore.

    gate_up: bfloat16 or float8_e4m3fn [E, 2 I, H], gate rows first; down: the same type, [E, H, I]. FP8 weights come with
    float32 scales per block of 128 x 128, to multiply with: gate_up_scale [E, 2 ceil(I/128), ceil(H/128)], the gate's and
    behind them the up projection's; down_scale [E, ceil(H/128), ceil(I/128)]. All contiguous and on one device. Raises
    SettingsError otherwise.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_weights(self)

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]

    @property
    def bytes_per_expert(self) -> int:
        tensors = (self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        return sum(t[0].numel() * t.element_size() for t in tensors if t is not None)

    def dequantised(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 (gate_up [2 I, H], down [H, I])."""
        gate_up, down = self.gate_up[expert], self.down[expert]
        if self.gate_up_scale is None or self.down_scale is None:
            return gate_up.float(), down.float()
        halves = gate_up.unflatten(0, (2, -1)), self.gate_up_scale[expert].unflatten(0, (2, -1))
        return dequantise_fp8(*halves).flatten(0, 1), dequantise_fp8(down, self.down_scale[expert])

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """hidden: float32 [T, H]; index: int64 [T, k]; weight: float32 [T, k], the shares -> float32 [T, H].

        A row is padding where its index is -1 (or beyond the experts): it reads no expert and gets zero. Meant for 1 to 64
        rows; with more, an expert hit by over 64 rows is read once per 64.
        """
        kernels = _kernels()
        tokens, top_k = index.shape
        size, width, pairs = hidden.shape[1], self.down.shape[2], tokens * top_k
        out = torch.empty(tokens, size, dtype=torch.float32, device=hidden.device)
        if tokens == 0:
            return out
        hidden, index, weight = hidden.contiguous(), index.contiguous(), weight.contiguous()
        slots = min(self.experts, pairs)
        groups = [
            torch.empty(size, dtype=torch.int32, device=hidden.device)
            for size in (slots, slots, slots, pairs)  # hit experts, starts, counts, pairs
        ]
        inner = torch.empty(pairs, width, dtype=torch.float32, device=hidden.device)
        parts = torch.empty(pairs, size, dtype=torch.float32, device=hidden.device)
        shape = {"HIDDEN": size, "WIDTH": width}
        tile = {
            "QUANTISED": self.gate_up_scale is not None,
            "BLOCK_ROWS": BLOCK_ROWS,
            "BLOCK_K": BLOCK_K,
            "MOST_TOKENS": 16 if tokens <= 16 else 32 if tokens <= 32 else 64,
            "num_warps": WARPS,
            "num_stages": STAGES,
        }
        # Without scales the kernels are given, and never read, any tensor in their place.
        gate_up_scale, down_scale = (weight if t is None else t for t in (self.gate_up_scale, self.down_scale))
        kernels.group_pairs[(slots,)](
            index, *groups, pairs, EXPERTS=self.experts, BINS=_power_above(self.experts), PAIRS=_power_above(pairs - 1)
        )
        kernels.gate_up[(-(-width // BLOCK_ROWS), slots)](
            self.gate_up, gate_up_scale, hidden, inner, *groups, **shape, TOP_K=top_k, **tile
        )
        kernels.down[(-(-size // BLOCK_ROWS), slots)](self.down, down_scale, inner, parts, *groups, **shape, **tile)
        kernels.combine[(tokens, -(-size // COMBINE_BLOCK))](
            parts, index, weight, out, HIDDEN=size, TOP_K=top_k, EXPERTS=self.experts, BLOCK=COMBINE_BLOCK
        )
        return out


def _power_above(number: int) -> int:
    """The smallest power of two above number, at least 16 (a tile is not smaller than that)."""
    return int(max(16, 1 << number.bit_length()))


def _check_weights(experts: TritonExperts) -> None:
    gate_up, down = experts.gate_up, experts.down
    if gate_up.dtype not in (torch.bfloat16, torch.float8_e4m3fn) or down.dtype != gate_up.dtype:
        raise SettingsError(
            f"expert weights are {gate_up.dtype} and {down.dtype}; the CUDA kernel takes torch.bfloat16 or "
            "torch.float8_e4m3fn for both: convert the checkpoint or run it on the CPU."
        )
    count, hidden, width = down.shape
    if tuple(gate_up.shape) != (count, 2 * width, hidden):
        raise SettingsError(
            f"gate_up has shape {tuple(gate_up.shape)}, but down has {tuple(down.shape)}; gate_up must be "
            f"{(count, 2 * width, hidden)}."
        )
    hidden_blocks, width_blocks = -(-hidden // FP8_BLOCK), -(-width // FP8_BLOCK)
    _check_scale("gate_up_scale", experts.gate_up_scale, (count, 2 * width_blocks, hidden_blocks), gate_up.dtype)
    _check_scale("down_scale", experts.down_scale, (count, hidden_blocks, width_blocks), gate_up.dtype)
    tensors = [t for t in (gate_up, down, experts.gate_up_scale, experts.down_scale) if t is not None]
    if any(t.device != gate_up.device or not t.is_contiguous() for t in tensors):
        raise SettingsError("expert weights or scales are strided or on several devices; give contiguous ones on one.")
    if gate_up.is_cuda and gate_up.dtype == torch.float8_e4m3fn:
        capability = torch.cuda.get_device_capability(gate_up.device)
        if capability < FP8_CAPABILITY:
            raise SettingsError(
                f"this GPU has compute capability {capability[0]}.{capability[1]}; FP8 experts need 8.9 (Ada, Hopper) or "
                "newer: use a bfloat16 checkpoint."
            )


def _check_scale(name: str, scale: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        if scale is not None:
            raise SettingsError(f"{name} was given for {dtype} weights; only float8_e4m3fn weights have scales.")
    elif scale is None or scale.dtype != torch.float32 or tuple(scale.shape) != shape:
        found = "missing" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise SettingsError(f"{name} is {found}; float8_e4m3fn weights need torch.float32 {shape}.")
