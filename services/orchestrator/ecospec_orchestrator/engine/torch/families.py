"""How the supported model families differ, as data: their transformers class, configuration keys and names in the files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core import SettingsError


@dataclass(frozen=True)
class Family:
    """One model family.

    model_class: the class in transformers, which names its modules `model.layers.N.mlp.experts` and so on.
    experts_key, expert_width_key: the configuration's names for the number of routed experts and their inner width.
    attention: "grouped" (query heads share key/value heads) or "latent" (DeepSeek's MLA).
    qk_norm: RMS norms of queries and keys, over one head, over all heads, or by the configuration's use_qk_norm.
    biased: linear layers of the attention that have a bias if the configuration's attention_bias says so.
    attention_bias: what that is where the configuration does not say.
    block: the files' name for the module `mlp`; expert_parts: their names for one expert's gate, up and down projections.
    gate: the experts' activation. "gpt_oss" also means: biases, and fused files with gate and up rows interleaved.
    """

    model_class: str
    experts_key: str
    expert_width_key: str = "moe_intermediate_size"
    attention: Literal["grouped", "latent"] = "grouped"
    qk_norm: Literal["none", "head", "all", "optional"] = "none"
    biased: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention_bias: bool = False
    sinks: bool = False
    correction_bias: bool = False
    block: str = "mlp"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    gate: Literal["silu", "gpt_oss"] = "silu"


FAMILIES: dict[str, Family] = {
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "n_routed_experts",
        attention="latent",
        biased=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
        correction_bias=True,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "n_routed_experts",
        qk_norm="optional",
        biased=("q_proj", "k_proj", "v_proj"),
        correction_bias=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "num_local_experts",
        "intermediate_size",
        attention_bias=True,
        sinks=True,
        gate="gpt_oss",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "num_local_experts",
        "intermediate_size",
        biased=(),
        block="block_sparse_moe",
        expert_parts=("w1", "w3", "w2"),
    ),
    "olmoe": Family("OlmoeForCausalLM", "num_experts", "intermediate_size", qk_norm="all"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "num_experts", qk_norm="head"),
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a configuration, or a SettingsError."""
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise SettingsError(
            f"config.json has model_type {model_type!r}; supported mixture-of-experts families are {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def stored_names(family: Family, name: str) -> tuple[str, ...]:
    """What the files may call a tensor of the model, most usual first."""
    original = re.sub(r"^(model\.layers\.\d+\.)mlp\.", rf"\g<1>{family.block}.", name)
    return (original,) if original == name else (original, name)


def is_draft_tensor(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor belongs to a draft-only layer: multi-token prediction modules are stored behind the target's layers.

    The target neither loads nor counts them; an MTP drafter does.
    """
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and int(match[1]) >= config["num_hidden_layers"]


def is_derived_tensor(name: str) -> bool:
    """Whether a tensor follows from the configuration: older files store the rotary frequencies."""
    return name.endswith("rotary_emb.inv_freq")
