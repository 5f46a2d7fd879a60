"""A bfloat16 matrix times float32 rows on CUDA, without widening the matrix in memory."""

from __future__ import annotations

import torch


def bfloat16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [..., I] and bfloat16 [O, I] on CUDA -> float32 [..., O], summed in float32.

    Rows are taken as two bfloat16 parts (16 bits of mantissa) that share one pass over the weights; widening these first, as
    F.linear needs it, moves five times their bytes.
    """
    rows = x.reshape(-1, x.shape[-1])
    high = rows.bfloat16()
    parts = torch.cat([high, (rows - high).bfloat16()])
    sums = torch.mm(parts, weight.t(), out_dtype=torch.float32)
    out = sums[: len(rows)] + sums[len(rows) :]
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], -1)
