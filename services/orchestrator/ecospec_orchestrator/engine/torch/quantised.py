"""Weights in the two quantised formats of public checkpoints, as tensors: what they mean, how they are made, a linear layer.

MXFP4 (OCP Microscaling Formats v1.0; gpt-oss): E2M1 values, two a byte with the lower half first, in blocks of 32 along the
inputs that share an E8M0 scale 2^(byte - 127). Blocks: uint8 [..., O, I/32, 16]; scales: uint8 [..., O, I/32].

FP8 (DeepSeek-V3): E4M3 without infinities, with a float scale for every 128 x 128 weights; the last blocks are cut where a size
is no multiple of 128. Weight: uint8 or float8_e4m3fn [..., O, I]; scales (`weight_scale_inv`, multiplied, whatever the name
says): [..., ceil(O/128), ceil(I/128)].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ...core import SettingsError
from .quantised_kernels import fp8_linear_rows
from .tiles import FP8_BLOCK, FP8_SHIFT, MXFP4_BLOCK, MXFP4_SHIFT

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its lower three bits
FP8_MAX = 448.0
E8M0_BIAS, E8M0_NAN = 127, 0xFF
E8M0_MAX = 0xFE - MXFP4_SHIFT  # the kernels' largest: scales from 2^114 up leave no room for the shift of the exponent


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks uint8 [..., G, 16] and scales uint8 [..., G] -> float32 [..., 32 G], exactly."""
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=blocks.device)
    halves = torch.stack([blocks & 0xF, blocks >> 4], -1).flatten(-2).int()
    return (values[halves] * _power_of_two(scales)[..., None]).flatten(-2)


def quantise_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [..., 32 G] -> (blocks, scales): the block's largest magnitude decides the scale, values round to the nearest."""
    grouped = weight.float().unflatten(-1, (-1, MXFP4_BLOCK))
    exponent = torch.frexp(grouped.abs().amax(-1)).exponent.int() - 1 - 2  # 2: the exponent of E2M1's largest value
    scales = (exponent + E8M0_BIAS).clamp(0, E8M0_MAX).to(torch.uint8)
    magnitude = (grouped.abs() / _power_of_two(scales)[..., None]).contiguous()
    magnitudes = torch.tensor(MAGNITUDES, device=weight.device)
    code = torch.bucketize(magnitude, (magnitudes[1:] + magnitudes[:-1]) / 2).to(torch.uint8)
    code |= torch.signbit(grouped).to(torch.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4, scales


def check_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuse, with a SettingsError, arrays that do not belong together or hold scales that are no numbers."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, MXFP4_BLOCK // 2):
        raise SettingsError(
            f"MXFP4 blocks are {_described(blocks)} and scales {_described(scales)}; they must be uint8 [..., G, 16] and "
            "uint8 [..., G]."
        )
    largest = int(scales.max())
    if largest == E8M0_NAN:
        raise SettingsError("an MXFP4 scale is 0xFF, which means not a number; the checkpoint is damaged.")
    if largest > E8M0_MAX:
        raise SettingsError(
            f"an MXFP4 scale is 2^{largest - E8M0_BIAS}; at most 2^{E8M0_MAX - E8M0_BIAS} is supported."
        )


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weight [..., O, I] and scales [..., ceil(O/128), ceil(I/128)] -> float32 [..., O, I], each product rounded once."""
    outputs, inputs = weight.shape[-2:]
    by_row = scale.float().repeat_interleave(FP8_BLOCK, -2)[..., :outputs, :]
    return weight.view(torch.float8_e4m3fn).float() * by_row.repeat_interleave(FP8_BLOCK, -1)[..., :inputs]


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float [..., O, I] -> (float8_e4m3fn [..., O, I], float32 scales [..., ceil(O/128), ceil(I/128)]): each block's largest
    magnitude becomes the format's largest."""
    outputs, inputs = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -inputs % FP8_BLOCK, 0, -outputs % FP8_BLOCK))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))  # [..., O/128, 128, I/128, 128]
    largest = blocks.abs().amax((-1, -3))
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    scaled = (blocks / scale[..., :, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    values = scaled.flatten(-4, -3).flatten(-2)[..., :outputs, :inputs]
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def check_fp8(weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Refuse, with a SettingsError, arrays that do not belong together or hold what is no number."""
    shape = (*weight.shape[:-2], *(-(-size // FP8_BLOCK) for size in weight.shape[-2:]))
    if weight.dtype not in (torch.uint8, torch.float8_e4m3fn) or tuple(scale.shape) != shape:
        raise SettingsError(
            f"FP8 weights are {_described(weight)} and scales {_described(scale)}; they must be float8_e4m3fn [..., O, I] and "
            f"[..., ceil(O/{FP8_BLOCK}), ceil(I/{FP8_BLOCK})]."
        )
    if not bool((scale.abs() < 2.0 ** (127 - FP8_SHIFT)).all()):
        raise SettingsError(
            f"an FP8 scale is not a number or not below 2^{127 - FP8_SHIFT}; the checkpoint is damaged."
        )
    for matrix in weight.view(torch.uint8).flatten(0, -3) if weight.ndim > 2 else [weight.view(torch.uint8)]:
        if bool(((matrix & 0x7F) == 0x7F).any()):
            raise SettingsError("an FP8 weight is 0x7F or 0xFF, which means not a number; the checkpoint is damaged.")


def kernel_scales_fp8(scale: torch.Tensor) -> torch.Tensor:
    """The scales as the CPU kernels want them."""
    return scale.float() * 2.0**FP8_SHIFT


class Fp8Linear(nn.Module):
    """y = x W^T + b with W kept as FP8 [O, I] with block scales, everything else float32."""

    def __init__(self, weight: torch.Tensor, weight_scale_inv: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        check_fp8(weight, weight_scale_inv)
        self.weight = nn.Parameter(weight.view(torch.uint8).contiguous(), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(weight_scale_inv.float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        self.register_buffer("_kernel_scales", kernel_scales_fp8(weight_scale_inv), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: float32 [..., I] -> float32 [..., O]."""
        if x.device.type != "cpu":
            return F.linear(x, dequantise_fp8(self.weight, self.weight_scale_inv), self.bias)
        rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty(len(rows), len(self.weight))
        weights = self.weight.numpy()[None], self._kernel_scales.numpy()[None]
        fp8_linear_rows(*weights, rows.numpy(), out.numpy())
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def _power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 -> float32, by its bits: the byte is float32's exponent, but for 2^-127, which is subnormal."""
    bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)
    return torch.where(scales == E8M0_NAN, torch.nan, bits.int().view(torch.float32))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
