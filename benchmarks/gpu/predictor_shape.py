"""A network of the size of a 0.6B expert predictor (28 layers, 1024 wide, 16 heads of 128 sharing 8 key/value heads, 3072 inner)
with random weights, for its time only, and a head that answers for every MoE layer and expert of a target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class PredictorShape:
    layers: int = 28
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    inner: int = 3072
    outputs: tuple[int, int] = (94, 128)  # MoE layers and experts of Qwen3-235B-A22B

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        head = self.hidden * self.outputs[0] * self.outputs[1]
        return self.layers * (attention + 3 * self.hidden * self.inner) + head


class Predictor:
    """One forward over the rows of a tree against a context whose keys and values are kept."""

    def __init__(self, shape: PredictorShape, context: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        make = lambda *size: torch.randn(*size, device=device, dtype=dtype) * 0.02
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.layers = [
            {
                "qkv": make(queries + 2 * keys, shape.hidden),
                "out": make(shape.hidden, queries),
                "gate_up": make(2 * shape.inner, shape.hidden),
                "down": make(shape.hidden, shape.inner),
                "keys": make(shape.kv_heads, context, shape.head_size),
                "values": make(shape.kv_heads, context, shape.head_size),
            }
            for _ in range(shape.layers)
        ]
        self.head = make(shape.outputs[0] * shape.outputs[1], shape.hidden)

    def __call__(self, x: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden]; mask: bool [rows, context + rows]; cos, sin: [rows, head_size] -> logits [rows, layers, experts]."""
        c = self.shape
        for w in self.layers:
            parts = F.linear(F.rms_norm(x, (c.hidden,)), w["qkv"]).unflatten(-1, (-1, c.head_size)).transpose(0, 1)
            q, k, v = parts.split([c.heads, c.kv_heads, c.kv_heads])
            q, k = (_rotate(F.rms_norm(t, (c.head_size,)), cos, sin) for t in (q, k))
            k, v = torch.cat([w["keys"], k], 1), torch.cat([w["values"], v], 1)
            attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
            x = x + F.linear(attended.transpose(0, 1).flatten(1), w["out"])
            gate, up = F.linear(F.rms_norm(x, (c.hidden,)), w["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(F.rms_norm(x, (c.hidden,)), self.head).unflatten(-1, c.outputs)


def tree_inputs(
    shape: PredictorShape, parents: torch.Tensor, context: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(x, mask, cos, sin) for a root and its tree; parents: int64 [rows], -1 for the root, which is row 0."""
    rows = len(parents)
    own, depth = torch.eye(rows, dtype=torch.bool), torch.zeros(rows)
    for row in range(1, rows):
        own[row] |= own[parents[row]]
        depth[row] = depth[parents[row]] + 1
    mask = torch.cat([torch.ones(rows, context, dtype=torch.bool), own], 1)
    angle = (context + depth)[:, None] * 1e6 ** (-torch.arange(shape.head_size // 2) / (shape.head_size // 2))
    angle = torch.cat([angle, angle], 1)
    x = torch.randn(rows, shape.hidden)
    return x.to(device, dtype), mask.to(device), angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
