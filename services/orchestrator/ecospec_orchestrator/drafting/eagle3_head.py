"""The EAGLE-3 draft head: one decoder layer over fused low, mid and high features of the target.

Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv 2503.01840).
Tensor names follow the public checkpoints (fc, midlayer.*, norm, lm_head, d2t, t2d). The head at position p takes the
embedding of token p + 1 and the target's features of position p, and predicts token p + 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    feature_layers: tuple[int, int, int]  # the residual stream after these target layers is fused


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, self.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, self.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=False)
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        self.register_buffer("frequency", frequency, persistent=False)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [..., T, 2 * hidden]; positions: int64 [..., T] -> q [..., heads, T, D], k and v [..., kv_heads, T, D]."""
        angle = positions[..., None].float() * self.frequency
        cos, sin = (torch.cat([f, f], -1).unsqueeze(-3) for f in (angle.cos(), angle.sin()))
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # on the token embedding
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)  # on the fused or own hidden state
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    def inputs(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """attended: [..., T, heads * D], before the output projection."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """d2t int64 [draft vocabulary]: target id minus draft id; t2d bool [vocabulary]: which target ids can be drafted."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary]: the target's id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t))
