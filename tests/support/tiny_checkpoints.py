"""Tiny random checkpoints of every family, in the family's published form on disk, with the model that they describe."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedModel

VOCABULARY, LAYERS = 97, 3
COMMON = dict(
    vocab_size=VOCABULARY,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# Keys and forms as in the published config.json of each family.
CONFIGS: dict[str, dict] = {
    "deepseek_v3": COMMON
    | dict(
        hidden_size=160,  # more than one FP8 block, and not a whole number of them
        intermediate_size=144,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=136,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=128,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
        max_position_embeddings=163840,
        rope_scaling=dict(
            type="yarn",
            factor=40,
            original_max_position_embeddings=4096,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        quantization_config=dict(
            activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
        ),
    ),
    "glm4_moe": COMMON
    | dict(
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
    ),
    "gpt_oss": COMMON
    | dict(
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        attention_bias=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        swiglu_limit=7.0,
        rope_theta=150000,
        max_position_embeddings=131072,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
        ),
        quantization_config=dict(
            quant_method="mxfp4",
            modules_to_not_convert=[
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        ),
    ),
    "mixtral": COMMON
    | dict(hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "olmoe": COMMON
    | dict(
        hidden_size=32,
        intermediate_size=16,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        clip_qkv=None,
    ),
    "qwen3_moe": COMMON
    | dict(
        hidden_size=32,
        intermediate_size=48,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def save_tiny(family: str, directory: Path, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Write a checkpoint of the family (a key of CONFIGS) and return transformers' own float32 model of the same weights,
    dequantised. qwen3_moe comes in two shards with an index; changes: other configuration values."""
    config = {"model_type": family, **CONFIGS[family], **changes}
    directory.mkdir(parents=True, exist_ok=True)
    model = _random_model(config, seed)
    tensors = {"deepseek_v3": _deepseek, "gpt_oss": _gpt_oss}.get(family, _plain)(model)
    model.model.layers = model.model.layers[: config["num_hidden_layers"]]
    class_name = type(model).__name__
    (directory / "config.json").write_text(json.dumps({"architectures": [class_name], **config}))
    if family == "qwen3_moe":
        _save_sharded(tensors, directory)
    else:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return model


def _random_model(config: dict, seed: int) -> PreTrainedModel:
    """Every weight is one that bfloat16 holds. A multi-token prediction layer comes as one more layer at the end."""
    values = {k: v for k, v in config.items() if k not in ("model_type", "quantization_config")}
    values["num_hidden_layers"] += config.get("num_nextn_predict_layers", 0)
    built = CONFIG_MAPPING[config["model_type"]](**values)
    names = [
        name for name in dir(transformers) if name.lower() == config["model_type"].replace("_", "") + "forcausallm"
    ]
    model = getattr(transformers, names[0])._from_config(built, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            values_ = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
        else:
            scale = 0.1 if tensor.ndim == 1 or name.endswith("_bias") else 1.4 * config["hidden_size"] ** -0.5
            values_ = scale * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(values_.bfloat16())
    model.set_experts_implementation("eager")
    return model


def _named(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Views of the model's own memory under the files' names: one tensor for every projection of every expert."""
    views = {}
    block, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
    if model.config.model_type == "mixtral":
        block, parts = "block_sparse_moe", ("w1", "w3", "w2")
    for name, tensor in model.state_dict().items():
        name = name.replace(".mlp.", f".{block}.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, weight in zip(parts[:2], both.chunk(2), strict=True):
                    views[f"{name.removesuffix('gate_up_proj')}{expert}.{part}.weight"] = weight
        elif name.endswith("experts.down_proj"):
            for expert, weight in enumerate(tensor):
                views[f"{name.removesuffix('down_proj')}{expert}.{parts[2]}.weight"] = weight
        else:
            views[name] = tensor
    return views


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if name.endswith("e_score_correction_bias") else tensor.bfloat16().contiguous()


def _plain(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: _stored(name, view) for name, view in _named(model).items()}


def _deepseek(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """FP8 in blocks of 128 x 128 for every projection of a layer; the model's weights become what that holds."""
    tensors = {}
    for name, view in _named(model).items():
        if ".layers." in name and "_proj" in name:
            tensors[name], scale = _to_fp8(view)
            tensors[name + "_scale_inv"] = scale
            view.copy_(tensors[name].float() * _spread(scale, view))
        else:
            tensors[name] = _stored(name, view)
    draft, size = f"model.layers.{len(model.model.layers) - 1}.", model.config.hidden_size
    tensors |= {f"{draft}{name}.weight": torch.ones(size).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[draft + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[draft + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[draft + "eh_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], 1).bfloat16()
    return tensors


def _gpt_oss(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Random MXFP4 blocks for the experts, which become the model's weights; the rest bfloat16.

    blocks: uint8 [E, O, I / 32, 16], the lower half of a byte first; scales: uint8 [E, O, I / 32], powers of two + 127.
    """
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, view in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and view.ndim == 3:
            experts, inputs, outputs = view.shape  # gpt-oss keeps its experts transposed
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
            values = FP4_VALUES[codes] * torch.exp2(scales.float() - 127)[..., None]
            view.copy_(values.flatten(-2).transpose(1, 2))
            tensors[name + "_blocks"], tensors[name + "_scales"] = blocks, scales
        else:
            tensors[name] = _stored(name, view)
    return tensors


def _save_sharded(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [O, I] -> (float8_e4m3fn [O, I], float32 scales [ceil(O / 128), ceil(I / 128)])."""
    rows, columns = (-(-n // 128) for n in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    scale = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
    return (weight / _spread(scale, weight)).to(torch.float8_e4m3fn), scale


def _spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
