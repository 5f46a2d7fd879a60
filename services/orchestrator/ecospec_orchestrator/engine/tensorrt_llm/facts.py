"""What the launcher has to know of a target, from its configuration and the headers of its files: no weight is read but the
routers', and neither torch nor TensorRT-LLM is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.hf_config import geometry_from_config, routed_layers

from ...core import SettingsError
from ..torch.checkpoint import INDEX, SINGLE, TensorInfo, read_header, read_json
from ..torch.families import FAMILIES, stored_names

Attention = Literal["full", "sliding", "latent"]
ROUTER_TENSORS = ("weight", "bias", "e_score_correction_bias")
CONFIGURATION_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
BFLOAT16 = 2  # bytes of a cached key or value


@dataclass(frozen=True)
class ModelFacts:
    """attention: "sliding" where some layers see a window only, "latent" for DeepSeek's MLA. cached_values: keys and values that
    one layer caches per token and key-value head (per token with latent attention, which has no heads in the cache).
    draft_layers: multi-token prediction modules in the checkpoint. quantisation: its own name, "none" for unquantised weights.
    """

    family: str
    geometry: TargetGeometry
    layers: int
    attention: Attention
    heads: int
    kv_heads: int
    cached_values: int
    quantisation: str
    weight_bytes: int
    max_positions: int | None
    draft_layers: int

    def kv_bytes_per_token(self, tensor_parallel_size: int) -> int:
        """What one GPU caches per token, in bfloat16. Heads are split among the GPUs, at least one each; a latent is not."""
        heads = 1 if self.attention == "latent" else -(-self.kv_heads // tensor_parallel_size)
        return self.layers * heads * self.cached_values * BFLOAT16


def facts_of(config: Mapping[str, Any], name: str, weight_bytes: int) -> ModelFacts:
    """From a Hugging Face config.json. The geometry's revision is "unknown" until read_facts() has seen the routers. Raises
    SettingsError."""
    config = config.get("text_config", config)
    try:
        geometry = geometry_from_config(config, name, "unknown")
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError(f"config.json of {name} describes no target: {error}") from None
    heads = _count(config, "num_attention_heads", name)
    latent = config.get("kv_lora_rank")
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    head_size = config.get("head_dim") or geometry.hidden_size // heads
    scheme = config.get("quantization_config") or {}
    return ModelFacts(
        family=str(config.get("model_type", "")),
        geometry=geometry,
        layers=_count(config, "num_hidden_layers", name),
        attention="latent" if latent else "sliding" if sliding else "full",
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        cached_values=latent + _count(config, "qk_rope_head_dim", name) if latent else 2 * head_size,
        quantisation=str(scheme.get("quant_method", "none")),
        weight_bytes=weight_bytes,
        max_positions=config.get("max_position_embeddings"),
        draft_layers=config.get("num_nextn_predict_layers") or 0,
    )


def read_facts(directory: Path, name: str) -> ModelFacts:
    """directory: as local_directory() gives it. Where the weights lie there, the geometry's revision is the digest of the routers
    that the embedded engine computes, too: a predictor made with one serves the other. Raises SettingsError."""
    config = read_json(directory / "config.json")
    weights = _weight_files(directory)
    facts = facts_of(config, name, _weight_bytes(directory, weights))
    if weights and all(file.is_file() for file in weights.values()):
        revision = router_revision(config, weights)
        facts = replace(facts, geometry=replace(facts.geometry, revision=revision or "unknown"))
    return facts


def local_directory(model: str) -> Path:
    """The directory of a model; for the name of one on the Hugging Face Hub, such as Qwen/Qwen3-235B-A22B, that of its
    configuration and tokenizer, which are fetched; TensorRT-LLM fetches the weights itself. Raises SettingsError."""
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=list(CONFIGURATION_FILES)))
    except Exception as error:  # a name that is none, no network, no such model, no access: each has its own exception
        reason = str(error).split("\n")[0]
        raise SettingsError(
            f"Setting model is {model!r}, which is neither a directory nor a model that can be fetched ({reason}); give the "
            "directory of a Hugging Face model, or its name on the Hub."
        ) from None


def router_revision(config: Mapping[str, Any], weights: Mapping[str, Path]) -> str | None:
    """16 hexadecimal digits of the routers as float32, layer by layer; weights: tensor -> file. None for a family whose names in
    the files are not known. Raises SettingsError for files that cannot be read."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return None
    module = "router" if family.gate == "gpt_oss" else "gate"
    headers: dict[Path, dict[str, TensorInfo]] = {}
    digest = hashlib.sha256()
    for layer in routed_layers(config):
        for tensor in ROUTER_TENSORS:
            names = stored_names(family, f"model.layers.{layer}.mlp.{module}.{tensor}")
            found = next((name for name in names if name in weights), None)
            if found is None:
                if tensor == "weight":
                    raise SettingsError(f"layer {layer} has no router {names[0]}; download the model again.")
                continue
            file = weights[found]
            if file not in headers:
                headers[file] = read_header(file)
            if found not in headers[file]:
                raise SettingsError(f"{file} does not hold tensor {found}; download the model again.")
            digest.update(_as_float32(headers[file][found]).tobytes())
    return digest.hexdigest()[:16]


def _as_float32(info: TensorInfo) -> np.ndarray:
    raw = np.fromfile(info.file, np.uint8, info.bytes, offset=info.begin)
    if len(raw) != info.bytes:
        raise SettingsError(f"{info.file} has become shorter since it was checked; download it again.")
    if info.dtype == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if info.dtype not in ("F32", "F16"):
        raise SettingsError(f"a router in {info.file} has dtype {info.dtype}; BF16, F16 and F32 are supported.")
    return raw.view("<f4" if info.dtype == "F32" else "<f2").astype(np.float32)


def _weight_files(directory: Path) -> dict[str, Path]:
    """Tensor -> file; the files need not be there. {} where nothing tells."""
    if (directory / SINGLE).is_file():
        return dict.fromkeys(read_header(directory / SINGLE), directory / SINGLE)
    if not (directory / INDEX).is_file():
        return {}
    names = read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise SettingsError(f"{directory / INDEX} has no weight_map of tensors to files; download it again.")
    return {tensor: directory / file for tensor, file in names.items()}


def _weight_bytes(directory: Path, weights: Mapping[str, Path]) -> int:
    """Of the files that are there, else what the index says of all; 0 where nothing tells."""
    files = set(weights.values())
    if files and all(file.is_file() for file in files):
        return sum(file.stat().st_size for file in files)
    if not (directory / INDEX).is_file():
        return 0
    total = (read_json(directory / INDEX).get("metadata") or {}).get("total_size", 0)
    return int(total) if isinstance(total, (int, float)) and total > 0 else 0


def _count(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise SettingsError(f"config.json of {name} has {key} {value!r}; a whole number of at least 1 is needed.")
    return value
