"""Sizes of a target from its config.json alone: routed geometry, and the bytes that a decode step reads.

The byte accounting reproduces the EcoSpec paper (arXiv 2607.12696, Table 2) from geometry and experts per layer:
Qwen3-235B-A22B as bfloat16 99.0 GB at 23.7 (paper 99.3) and 87.6 at 20.5 (88.1), DeepSeek-V3.1 as stored, FP8 linear layers
and a bfloat16 head, 97.7 GB at 31.4 (97.3). For gpt-oss-120b the routed part is 5.5 GB at 11.6 experts in MXFP4, as in the
paper; its remaining 0.5 GB there cannot be derived: the bfloat16 attention and head alone are 3.1 GB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.hf_config import routed_layers

from ...core import SettingsError
from ..base import StepBytes
from .families import Family, family_of

Quantisation = Literal["none", "mxfp4", "fp8"]
FP8_BLOCK = 128  # rows and columns that share one float32 scale
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True)
class KvLayout:
    """What the cache keeps per token: keys of key_size and values of value_size for each of kv_heads, in every layer, float32.
    Latent attention is kept expanded, per head."""

    layers: int
    kv_heads: int
    key_size: int
    value_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.kv_heads * (self.key_size + self.value_size) * FLOAT32


def geometry_of(config: Mapping[str, Any], name: str | None = None, revision: str = "unknown") -> TargetGeometry:
    """The routed part of the target. revision should name the routers' weights, which a configuration cannot."""
    family = family_of(config)
    return TargetGeometry(
        name or config["model_type"],
        revision,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=_size(config, "hidden_size"),
        moe_layers=len(moe_layers_of(config)),
        experts=_experts(config, family),
        top_k=_size(config, "num_experts_per_tok"),
    )


def moe_layers_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the layers with routed experts; the others are dense."""
    _size(config, "num_hidden_layers")
    return routed_layers(config)


def kv_layout_of(config: Mapping[str, Any]) -> KvLayout:
    layers, heads = _size(config, "num_hidden_layers"), _size(config, "num_attention_heads")
    if family_of(config).attention == "latent":
        key = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
        return KvLayout(layers, heads, key, _size(config, "v_head_dim"))
    size = _head_size(config)
    return KvLayout(layers, _size(config, "num_key_value_heads", heads), size, size)


def quantisation_of(config: Mapping[str, Any]) -> Quantisation:
    """How the files hold the weights. Raises SettingsError for a scheme that the engine cannot read."""
    scheme = config.get("quantization_config")
    if scheme is None:
        return "none"
    method = scheme.get("quant_method")
    if method == "mxfp4" and family_of(config).gate == "gpt_oss":
        return "mxfp4"
    if method == "fp8" and family_of(config).gate == "silu":
        block, format_ = scheme.get("weight_block_size"), scheme.get("fmt", "e4m3")
        if block != [FP8_BLOCK, FP8_BLOCK] or format_ != "e4m3":
            raise SettingsError(
                f"config.json has FP8 weights of format {format_!r} with weight_block_size {block}; "
                f"'e4m3' with [{FP8_BLOCK}, {FP8_BLOCK}] is supported."
            )
        return "fp8"
    raise SettingsError(
        f"config.json has quant_method {method!r}, which is not supported for {config.get('model_type')}; "
        "supported are mxfp4 (gpt_oss), fp8 (the others) and unquantised weights."
    )


def float_bytes_of(config: Mapping[str, Any]) -> int:
    """Bytes of a weight that is not quantised. float16 is kept as float32, which holds it exactly."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise SettingsError(f"config.json has dtype {dtype!r}; bfloat16, float16 and float32 are supported.")
    return BFLOAT16 if dtype == "bfloat16" else FLOAT32


def step_bytes_of(config: Mapping[str, Any]) -> StepBytes:
    """Bytes that one forward reads, as the engine keeps them: matrices as stored; norms, routers and cache float32.

    kv_per_token is an upper bound where layers have a sliding window: behind it they read nothing.
    """
    family, hidden, width = family_of(config), _size(config, "hidden_size"), float_bytes_of(config)
    layers, moe_layers = _size(config, "num_hidden_layers"), len(moe_layers_of(config))
    fp8 = quantisation_of(config) == "fp8"
    expert_width, experts = _size(config, family.expert_width_key), _experts(config, family)
    mlp = lambda inner: 2 * _linear(inner, hidden, width, fp8) + _linear(hidden, inner, width, fp8)
    shared = (config.get("n_shared_experts") or 0) * expert_width
    router = experts * (hidden + (1 if family.correction_bias or family.gate == "gpt_oss" else 0)) * FLOAT32
    dense = mlp(_size(config, "intermediate_size")) if layers > moe_layers else 0
    kv = kv_layout_of(config)
    return StepBytes(
        per_expert=_expert_bytes(family, hidden, expert_width, width, quantisation_of(config)),
        attention=layers * _attention_bytes(config, family, width, fp8),
        shared=moe_layers * (router + (mlp(shared) if shared else 0))
        + (layers - moe_layers) * dense
        + (2 * layers + 1) * hidden * FLOAT32,
        head=_size(config, "vocab_size") * hidden * width,
        kv_per_token=kv.bytes_per_token,
    )


def step_gigabytes(config: Mapping[str, Any], experts_per_layer: float, context_tokens: int = 0) -> float:
    """GB (1e9 bytes) that a step reads with so many distinct experts in every MoE layer."""
    sizes = step_bytes_of(config)
    routed = experts_per_layer * len(moe_layers_of(config)) * sizes.per_expert
    fixed = sizes.attention + sizes.shared + sizes.head + context_tokens * sizes.kv_per_token
    return (routed + fixed) / 1e9


def _linear(outputs: int, inputs: int, width: int, fp8: bool, bias: bool = False) -> int:
    if not fp8:
        return outputs * (inputs * width + bias * FLOAT32)
    scales = -(-outputs // FP8_BLOCK) * -(-inputs // FP8_BLOCK)
    return outputs * inputs + scales * FLOAT32 + bias * outputs * FLOAT32


def _expert_bytes(family: Family, hidden: int, inner: int, width: int, quantisation: Quantisation) -> int:
    biases = (2 * inner + hidden) * width if family.gate == "gpt_oss" else 0
    if quantisation == "mxfp4":  # two values a byte, and a scale byte for 32 values
        return 3 * hidden * inner * 17 // 32 + biases
    fp8 = quantisation == "fp8"
    return 2 * _linear(inner, hidden, width, fp8) + _linear(hidden, inner, width, fp8) + biases


def _attention_bytes(config: Mapping[str, Any], family: Family, width: int, fp8: bool) -> int:
    """One layer's projections, query and key norms and sinks."""
    hidden, heads, kv = _size(config, "hidden_size"), _size(config, "num_attention_heads"), kv_layout_of(config)
    if family.attention == "latent":
        latent, rotary = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
        query_rank = config.get("q_lora_rank")
        shapes = {
            "kv_a_proj_with_mqa": (latent + rotary, hidden),
            "kv_b_proj": (heads * (kv.key_size - rotary + kv.value_size), latent),
            "o_proj": (hidden, heads * kv.value_size),
        }
        if query_rank is None:
            shapes["q_proj"] = (heads * kv.key_size, hidden)
        else:
            shapes |= {"q_a_proj": (query_rank, hidden), "q_b_proj": (heads * kv.key_size, query_rank)}
        norms = latent + (query_rank or 0)
    else:
        queries, keys = heads * kv.key_size, kv.kv_heads * kv.key_size
        shapes = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }
        per_head = family.qk_norm == "head" or family.qk_norm == "optional" and config.get("use_qk_norm")
        norms = 2 * kv.key_size if per_head else queries + keys if family.qk_norm == "all" else 0
    biased = family.biased if config.get("attention_bias", family.attention_bias) else ()
    linears = sum(_linear(*shape, width, fp8, bias=name in biased) for name, shape in shapes.items())
    return linears + (norms + family.sinks * heads) * FLOAT32


def _head_size(config: Mapping[str, Any]) -> int:
    return _size(config, "head_dim", _size(config, "hidden_size") // _size(config, "num_attention_heads"))


def _experts(config: Mapping[str, Any], family: Family) -> int:
    return _size(config, family.experts_key if family.experts_key in config else "num_local_experts")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise SettingsError(f"config.json has {key} {value!r}; a whole number of at least 1 is needed.")
    return value
