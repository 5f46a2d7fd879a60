"""What a drafter has to know about the target that it drafts for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class TargetFacts:
    """name: for messages; layers: decoder layers. embed_tokens: int64 [n] -> float32 [n, hidden_size]. norm and lm_head are the
    target's last norm and its output layer, both float32; only a drafter that shares them needs them (DeepSeek's MTP)."""

    name: str
    hidden_size: int
    vocab_size: int
    layers: int
    embed_tokens: nn.Module
    norm: nn.Module | None = None
    lm_head: nn.Module | None = None
