"""The directory of a target that nobody computes: its configuration, its tokenizer and its routers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def save_routers_only(directory: Path, tokenizer: Any, layers: int, experts: int, hidden: int) -> Path:
    """A Qwen3-MoE with 2 experts per token and 8 attention heads; returns the directory."""
    tokenizer.save_pretrained(str(directory))
    config = dict(
        model_type="qwen3_moe",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=2,
        num_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
    )
    (directory / "config.json").write_text(json.dumps(config))
    routers = {f"model.layers.{i}.mlp.gate.weight": np.full((experts, hidden), i, np.float32) for i in range(layers)}
    save_file(routers, directory / "model.safetensors")
    return directory
