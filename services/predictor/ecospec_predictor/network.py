"""The expert predictor: a small decoder LM over the target's token embeddings that answers, in one shot, with the router
logits of every MoE layer (paper section 3.1: a small decoder LM, target embeddings projected to its own width).

It is tree-aware: a draft node attends to the context and to its ancestors only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ecospec_proto.geometry import TargetGeometry

FORMAT_VERSION = 1


@dataclass(frozen=True)
class PredictorConfig:
    hidden_size: int
    layers: int
    heads: int
    mlp_size: int
    max_context_tokens: int  # tokens up to and including the root that it looks at
    rope_theta: float = 1e4


class Block(nn.Module):
    def __init__(self, c: PredictorConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.attention_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.out = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.up = nn.Linear(c.hidden_size, c.mlp_size, bias=False)
        self.down = nn.Linear(c.mlp_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        q, k, v = (
            _apply(self.qkv, F.rms_norm(x, (size,), self.attention_norm))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, attn_mask=mask[:, None]
        )
        x = x + _apply(self.out, attended.transpose(1, 2).flatten(2))
        return x + _apply(self.down, F.gelu(_apply(self.up, F.rms_norm(x, (size,), self.mlp_norm))))


def _apply(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The product in the weight's own dtype; the residual stream stays float32."""
    return layer(x.to(layer.weight.dtype))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class ExpertPredictor(nn.Module):
    """Embeddings are the target's own table (bfloat16 [vocabulary, target hidden]); it is not part of the checkpoint."""

    embeddings: torch.Tensor

    def __init__(self, config: PredictorConfig, geometry: TargetGeometry, embeddings: torch.Tensor) -> None:
        super().__init__()
        if tuple(embeddings.shape) != (geometry.vocab_size, geometry.hidden_size):
            raise ValueError(
                f"the embedding table has shape {tuple(embeddings.shape)}, but this predictor was trained for a target with "
                f"shape ({geometry.vocab_size}, {geometry.hidden_size}); give the embeddings of {geometry.name}."
            )
        self.config, self.geometry = config, geometry
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.embedding_norm = nn.Parameter(torch.ones(geometry.hidden_size))
        self.project = nn.Linear(geometry.hidden_size, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.router = nn.Linear(config.hidden_size, geometry.moe_layers * geometry.experts)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """tokens, positions: int64 [B, T]; mask: bool [B, T, T], True where a row may look.

        Returns hidden states [B, T, hidden]; logits() turns rows into router logits.
        """
        x = self.embeddings[tokens].float()
        x = _apply(self.project, F.rms_norm(x, x.shape[-1:], self.embedding_norm)).float()
        half = self.config.hidden_size // self.config.heads // 2
        frequency = self.config.rope_theta ** (-torch.arange(half) / half)
        angle = positions[..., None].float() * frequency
        cos, sin = (torch.cat([a, a], -1)[:, None] for a in (angle.cos(), angle.sin()))
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return F.rms_norm(x, x.shape[-1:], self.norm)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, hidden] -> router logits [n, layers, experts]."""
        return _apply(self.router, rows).unflatten(-1, (self.geometry.moe_layers, self.geometry.experts))

    def save(self, directory: Path, note: dict[str, object]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.bfloat16().contiguous() for k, v in self.state_dict().items()}, directory / "model.safetensors")
        config = {
            "model_type": "ecospec_expert_predictor",
            "format_version": FORMAT_VERSION,
            "predictor": asdict(self.config),
            "target": asdict(self.geometry),
            "training": note,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
