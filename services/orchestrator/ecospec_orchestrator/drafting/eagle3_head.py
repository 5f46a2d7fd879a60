"""The EAGLE-3 draft head: one decoder layer over fused low, mid and high features of the target.

Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (arXiv 2503.01840).
Tensor names follow the public checkpoints (fc, midlayer.*, norm, lm_head, d2t, t2d). The head at position p takes the
embedding of token p + 1 and the target's features of position p, and predicts token p + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_SCALINGS = ("linear", "llama3", "yarn")  # those whose frequencies do not depend on the length of the text


@dataclass(frozen=True)
class Eagle3Config:
    """hidden_size is the head's own. target_hidden_size: where it differs (None: the same). norm_before_residual: the layer's
    residual stream starts behind hidden_norm instead of before it. norm_before_fc: one RMS norm over all features side by side.
    rope_scaling: as in Hugging Face configurations, None for none. biased: the linear layers that have a bias."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    feature_layers: tuple[int, ...]  # the residual stream after these target layers is fused
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048  # some scalings start from it
    biased: tuple[str, ...] = ()

    @property
    def feature_size(self) -> int:
        return len(self.feature_layers) * (self.target_hidden_size or self.hidden_size)

    def linear(self, name: str, inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=name in self.biased)


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
        prefix = "midlayer.self_attn."
        self.q_proj = c.linear(prefix + "q_proj", 2 * c.hidden_size, self.heads * c.head_dim)
        self.k_proj = c.linear(prefix + "k_proj", 2 * c.hidden_size, self.kv_heads * c.head_dim)
        self.v_proj = c.linear(prefix + "v_proj", 2 * c.hidden_size, self.kv_heads * c.head_dim)
        self.o_proj = c.linear(prefix + "o_proj", self.heads * c.head_dim, c.hidden_size)
        frequency, self.rope_factor = rope(c)
        self.register_buffer("frequency", frequency, persistent=False)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [..., T, 2 * hidden]; positions: int64 [..., T] -> q [..., heads, T, D], k and v [..., kv_heads, T, D]."""
        angle = positions[..., None].float() * self.frequency
        cos, sin = (self.rope_factor * torch.cat([f, f], -1).unsqueeze(-3) for f in (angle.cos(), angle.sin()))
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def rope(c: Eagle3Config) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cosine and sine."""
    if c.rope_scaling is None:
        return 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim), 1.0
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={**c.rope_scaling, "rope_theta": c.rope_theta},
    )
    return ROPE_INIT_FUNCTIONS[c.rope_scaling["rope_type"]](config)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, c: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = c.linear("midlayer.mlp.gate_proj", c.hidden_size, c.intermediate_size)
        self.up_proj = c.linear("midlayer.mlp.up_proj", c.hidden_size, c.intermediate_size)
        self.down_proj = c.linear("midlayer.mlp.down_proj", c.intermediate_size, c.hidden_size)

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
        self.norm_before_residual = c.norm_before_residual

    def inputs(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """attended: [..., T, heads * D], before the output projection."""
        residual = self.hidden_norm(hidden) if self.norm_before_residual else hidden
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """d2t int64 [draft vocabulary]: target id minus draft id; t2d bool [vocabulary]: which target ids can be drafted."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.input_norm = RMSNorm(config.feature_size, config.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        self.fc = config.linear("fc", config.feature_size, config.hidden_size)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = config.linear("lm_head", config.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[..., feature_size] -> [..., hidden]."""
        return self.fc(self.input_norm(features))

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary]: the target's id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
