"""Read a Llama-architecture GGUF file into Hugging Face tensor names.

Source: the GGUF specification (tensor names `blk.N.*`); llama.cpp stores the rows of the query and key projections
interleaved for its own rotary layout, Hugging Face stores them in two halves, so both are re-ordered here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Re-order rotary rows from interleaved pairs to two halves. weight: [heads * head_size, hidden]."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def load_dense_state(gguf_path: Path, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Dequantise every tensor of the file and round it to bfloat16.

    Returns Hugging Face names -> bfloat16 tensors. The rounded values *are* the demo target's weights: the dense oracle
    and the mixture are both made from them, so they compute the same function.
    """
    import gguf

    state: dict[str, torch.Tensor] = {}
    for tensor in gguf.GGUFReader(str(gguf_path)).tensors:
        name = _hf_name(tensor.name)
        if name is None:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            values = _halves(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _halves(values, kv_heads)
        state[name] = torch.tensor(values, dtype=torch.bfloat16)
    return state


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    parts = gguf_name.split(".")
    if parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    return None
