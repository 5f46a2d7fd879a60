"""Tiny random EAGLE-3 heads, saved as the public projects save theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ecospec_orchestrator.drafting.eagle3_head import Eagle3Head
from ecospec_orchestrator.engine.torch.modules import KernelLinear

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, DRAFT_VOCABULARY = 24, 40, 4, 2, 8, 50, 30
TARGET_LAYERS = 12
LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "model_type": "llama",
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def tensors(
    layer: str, hidden: int = HIDDEN, features: int = 3, target_hidden: int = HIDDEN, seed: int = 3
) -> dict[str, torch.Tensor]:
    """layer: "midlayer." or "layers.0."; weights as bfloat16, as they are published."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5 * 2).bfloat16()

    def norm(size: int) -> torch.Tensor:
        return (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    ids = torch.randperm(VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[ids] = True
    return {
        "fc.weight": matrix(hidden, features * target_hidden),
        f"{layer}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.up_proj.weight": matrix(INNER, hidden),
        f"{layer}mlp.down_proj.weight": matrix(hidden, INNER),
        f"{layer}input_layernorm.weight": norm(hidden),
        f"{layer}hidden_norm.weight": norm(hidden),
        f"{layer}post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(DRAFT_VOCABULARY, hidden),
        "d2t": ids - torch.arange(DRAFT_VOCABULARY),
        "t2d": t2d,
    }


def save(directory: Path, config: dict[str, Any], stored: dict[str, torch.Tensor], pickled: bool = False) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(stored, directory / "pytorch_model.bin")
    else:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def safeailab_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "torch_dtype": "bfloat16",
        **LAYER,
        **changes,
    }


def speculators_config(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": None,
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "someone/tiny-target"}},
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": {**LAYER, **(layer or {})},
        **changes,
    }


def save_safeailab(directory: Path, pickled: bool = False, **changes: Any) -> Path:
    return save(directory, safeailab_config(**changes), tensors("midlayer."), pickled)


def save_speculators(directory: Path, layer: dict[str, Any] | None = None, **changes: Any) -> Path:
    return save(directory, speculators_config(layer, **changes), tensors("layers.0."))


def on_kernels(head: Eagle3Head) -> Eagle3Head:
    """Its linear layers as the drafter runs them, their weights still float32."""
    for name, module in list(head.named_modules()):
        if isinstance(module, nn.Linear):
            head.set_submodule(name, KernelLinear(module.weight))
    return head.requires_grad_(False)
