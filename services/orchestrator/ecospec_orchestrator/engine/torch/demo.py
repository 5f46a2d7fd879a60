"""Build the demo target: a published dense model, sparsely upcycled into the GLM-4-MoE layout when it is loaded.

One half of each FFN's neurons becomes the always-on shared expert, the other half is copied into every routed expert, and
fitted routers (models/demo/routers.safetensors) choose among the copies. The text is the dense model's whatever the
routing, and every distinct expert is a block of memory of its own that really is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from ecospec_proto.geometry import TargetGeometry

from ..base import StepBytes
from .engine import TorchEngine
from .geometry import KvLayout
from .gguf_llama import load_dense_state
from .modules import Bfloat16Embedding, Bfloat16Linear

EXPERTS, TOP_K, LAYERS, HIDDEN, INTERMEDIATE, SHARED, VOCABULARY = 32, 4, 30, 576, 1536, 768, 49152
FEATURE_LAYERS = (2, 15, 28)  # of the demo's own EAGLE-3 head
END_TOKEN = 2
EXPERT_BYTES = 3 * (INTERMEDIATE - SHARED) * HIDDEN * 2
WEIGHT_BYTES = LAYERS * EXPERTS * EXPERT_BYTES + VOCABULARY * HIDDEN * 2 + (200 << 20)  # the rest, roughly
KV_LAYOUT = KvLayout(LAYERS, kv_heads=3, key_size=64, value_size=64)
NAME = "ecospec-demo-smollm2-135m-moe"


def demo_config() -> Glm4MoeConfig:
    return Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
        partial_rotary_factor=1.0,
        moe_intermediate_size=INTERMEDIATE - SHARED,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        n_routed_experts=EXPERTS,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=True,
        use_qk_norm=False,
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=END_TOKEN,
        pad_token_id=END_TOKEN,
    )


def routers_geometry(routers_path: Path) -> TargetGeometry:
    """Geometry of the demo target with these routers; the revision is the routers' digest."""
    revision = hashlib.sha256(routers_path.read_bytes()).hexdigest()[:16]
    return TargetGeometry(NAME, revision, VOCABULARY, HIDDEN, LAYERS, EXPERTS, TOP_K)


def build_demo_engine(
    gguf_path: Path,
    routers_path: Path,
    max_context_tokens: int,
    kv_pages: int,
    threads: int,
    feature_layers: tuple[int, ...],
    prefix_reuse: bool,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    device: torch.device | str = "cpu",
) -> TorchEngine:
    """Expand the dense weights into the mixture on the device, layer by layer. progress(done, of) is called after each layer."""
    dense = {name: weight.to(device) for name, weight in load_dense_state(gguf_path, heads=9, kv_heads=3).items()}
    routers = {name: weight.to(device) for name, weight in load_file(routers_path).items()}
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(demo_config())
    embed = dense["model.embed_tokens.weight"]
    model.model.embed_tokens = Bfloat16Embedding(embed)
    model.lm_head = Bfloat16Linear(embed)
    model.model.norm.weight = nn.Parameter(dense["model.norm.weight"].float(), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    for i, layer in enumerate(model.model.layers):
        weights = {
            k.removeprefix(f"model.layers.{i}."): v for k, v in dense.items() if k.startswith(f"model.layers.{i}.")
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, name).weight = nn.Parameter(weights[f"{name}.weight"].float(), requires_grad=False)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Bfloat16Linear(weights[f"self_attn.{name}.weight"]))
        gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        layer.mlp.shared_experts.gate_proj = Bfloat16Linear(gate[:SHARED].contiguous())
        layer.mlp.shared_experts.up_proj = Bfloat16Linear(up[:SHARED].contiguous())
        layer.mlp.shared_experts.down_proj = Bfloat16Linear(down[:, :SHARED].contiguous())
        layer.mlp.gate.weight = nn.Parameter(routers["weight"][i].float(), requires_grad=False)
        layer.mlp.gate.e_score_correction_bias = routers["e_score_correction_bias"][i].float()
        layer.mlp.experts.gate_up_proj = _copies(torch.cat([gate[SHARED:], up[SHARED:]]))
        layer.mlp.experts.down_proj = _copies(down[:, SHARED:].contiguous())
        progress(i + 1, LAYERS)
    step_bytes = StepBytes(
        per_expert=EXPERT_BYTES,
        attention=LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 192) * 2,
        shared=LAYERS * (3 * SHARED * HIDDEN * 2 + EXPERTS * (HIDDEN + 1) * 4 + 2 * HIDDEN * 4) + HIDDEN * 4,
        head=VOCABULARY * HIDDEN * 2,
        kv_per_token=KV_LAYOUT.bytes_per_token,
    )
    return TorchEngine(
        model,
        routers_geometry(routers_path),
        step_bytes,
        feature_layers,
        max_context_tokens,
        kv_pages,
        threads,
        prefix_reuse,
    )


def _copies(weight: torch.Tensor) -> nn.Parameter:
    """One block of memory per expert: experts must not share what an expert-parallel system would read separately."""
    return nn.Parameter(
        weight.expand(EXPERTS, *weight.shape).clone(memory_format=torch.contiguous_format), requires_grad=False
    )
