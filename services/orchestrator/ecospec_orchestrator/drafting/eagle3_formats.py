"""Stored EAGLE-3 heads: which format a directory is in, what its config.json means, and its tensors, checked.

| | ours | SafeAILab/EAGLE, SpecForge | vllm-project/speculators |
|---|---|---|---|
| told by | feature_layers | neither of the others | speculators_model_type "eagle3" |
| layer's sizes | top level | top level | transformer_layer_config |
| decoder layer | midlayer.* | midlayer.* | layers.0.* |
| feature layers | feature_layers: output of | eagle_config.eagle_aux_hidden_state_layer_ids: output of | eagle_aux_hidden_state_layer_ids: input of |

All of them: fc, norm, lm_head, d2t (target id minus draft id), t2d, and sometimes embed_tokens. Sources: the public code and
configurations of these projects and their readers in vLLM and SGLang. The counting of feature layers is where they differ:
SafeAILab's target code takes the hidden state *before* layers 2, n // 2 and n - 3 run, which is the output of layers 1,
n // 2 - 1 and n - 4; that is the default of everybody. SpecForge writes such *output* layers into its configurations (1, 46, 90 for
the 94 layers of Qwen3-235B), and SGLang adds one to them; speculators writes what vLLM takes, the *inputs* (2, 47, 91).
A speculators head with output layers in it is a wrong conversion: it runs, as in vLLM, on features one layer too low.
Everybody collects the features in ascending order of layers, whatever the order in the configuration.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from ..core import SettingsError
from ..engine.torch.checkpoint import inspect, read_json
from ..engine.torch.geometry import KvLayout
from .eagle3_head import ROPE_SCALINGS, Eagle3Config, Eagle3Head
from .target import TargetFacts

Format = Literal["ours", "safeailab", "speculators"]
PICKLED = "pytorch_model.bin"
ALLOWED: dict[str, tuple[object, ...]] = {  # what the head's one layer can be; a missing key is fine
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "fc_norm": (None, False),
    "norm_output": (None, False),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1.0),
}


@dataclass(frozen=True)
class StoredHead:
    """tensors: by the names of Eagle3Head; embed_tokens [vocab_size, hidden_size] where the head has a table of its own."""

    config: Eagle3Config
    tensors: Mapping[str, torch.Tensor]
    embed_tokens: torch.Tensor | None


def feature_layers_of(directory: Path, target_layers: int) -> tuple[int, ...]:
    """The target layers whose output the head takes, ascending. Raises SettingsError."""
    return _feature_layers(directory, read_json(directory / "config.json"), target_layers)


def kv_layout_of(directory: Path, target_layers: int) -> KvLayout:
    """What the head's cache keeps. Raises SettingsError."""
    c = _config(directory, read_json(directory / "config.json"), target_layers)
    return KvLayout(1, c.num_key_value_heads, c.head_dim, c.head_dim)


def read_head(directory: Path, target: TargetFacts) -> StoredHead:
    """Read a head and check it against the target and against its own configuration. Raises SettingsError naming what is
    wrong: a size, a tensor and its file."""
    raw = read_json(directory / "config.json")
    config = _config(directory, raw, target.layers)
    for name, found, wanted in (
        ("hidden_size", config.target_hidden_size or config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise SettingsError(
                f"the EAGLE-3 head in {directory}{_trained_for(raw)} has {name} {found}, but the target {target.name} has "
                f"{wanted}; use a head that was trained for this target."
            )
    tensors, files = _read_tensors(directory)
    embed = tensors.pop("embed_tokens.weight", None)
    whole_vocabulary = config.draft_vocab_size == config.vocab_size
    if whole_vocabulary and "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    if "d2t" in tensors and "t2d" not in tensors:
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)  # nothing is read from it
    biased = tuple(sorted(name.removesuffix(".bias") for name in tensors if name.endswith(".bias")))
    config = Eagle3Config(**{**vars(config), "biased": biased})
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in Eagle3Head(config).state_dict().items()}
    _check_tensors(directory, tensors, files, shapes)
    _check_table(directory, embed, files, config)
    ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise SettingsError(
            f"tensor d2t in {files['d2t']} leads to target ids from {ids.min()} to {ids.max()}; the target has ids from 0 to "
            f"{config.vocab_size - 1}: the file is damaged or belongs to another target."
        )
    return StoredHead(config, tensors, embed)


def _format(directory: Path, raw: Mapping[str, Any]) -> Format:
    if "feature_layers" in raw:
        return "ours"
    kind = raw.get("speculators_model_type")
    if kind is None:
        return "safeailab"
    if kind != "eagle3":
        raise SettingsError(f"the drafter in {directory} has speculators_model_type {kind!r}; 'eagle3' is supported.")
    return "speculators"


def _config(directory: Path, raw: dict[str, Any], target_layers: int) -> Eagle3Config:
    speculators = _format(directory, raw) == "speculators"
    layer = {**raw, **(raw.get("transformer_layer_config") or {})} if speculators else raw
    if layer.get("use_sliding_window") is False:
        layer = {**layer, "sliding_window": None}
    for key, allowed in ALLOWED.items():
        if key in layer and layer[key] not in allowed:
            raise SettingsError(
                f"the EAGLE-3 head in {directory} has {key} {layer[key]!r} in its config.json; {allowed[-1]!r} is supported."
            )
    if speculators and "norm_before_residual" not in raw:
        raise SettingsError(
            f"{directory / 'config.json'} does not say norm_before_residual, on which the head's result depends; add true or "
            "false, as it was trained."
        )

    def size(key: str, default: int | None = None) -> int:
        value = layer.get(key) if layer.get(key) is not None else default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingsError(
                f"{directory / 'config.json'} has {key} {layer.get(key)!r}; an EAGLE-3 head needs a positive number there."
            )
        return value

    hidden, heads, vocabulary = size("hidden_size"), size("num_attention_heads"), size("vocab_size")
    theta, scaling = _rope(directory, layer)
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        draft_vocab_size=size("draft_vocab_size", vocabulary),
        vocab_size=vocabulary,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        feature_layers=_feature_layers(directory, raw, target_layers),
        target_hidden_size=raw.get("target_hidden_size"),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        rope_scaling=scaling,
        max_position_embeddings=size("max_position_embeddings", 2048),
    )


def _rope(directory: Path, layer: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling): transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters."""
    found = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or layer.get("rope_theta") or 10000.0)
    kind = found.pop("rope_type", None) or found.pop("type", None) or "default"
    if kind == "default":
        return theta, None
    if kind not in ROPE_SCALINGS:
        raise SettingsError(
            f"the EAGLE-3 head in {directory} has rope type {kind!r}; supported are default, {', '.join(ROPE_SCALINGS)}."
        )
    return theta, {**found, "rope_type": kind}


def _feature_layers(directory: Path, raw: Mapping[str, Any], target_layers: int) -> tuple[int, ...]:
    form, key, inputs = _format(directory, raw), "eagle_aux_hidden_state_layer_ids", False
    if form == "ours":
        key, named = "feature_layers", raw["feature_layers"]
    elif form == "speculators":
        named, inputs = raw.get(key), True
    else:
        named = (raw.get("eagle_config") or {}).get(key)
    if not named:
        if target_layers < 7:
            raise SettingsError(
                f"the EAGLE-3 head in {directory} names no feature layers, and a target of {target_layers} layers is too small "
                "for the usual three (the inputs of layers 2, n / 2 and n - 3), which need 7; name them in its config.json."
            )
        named, inputs = [2, target_layers // 2, target_layers - 3], True
    first, last = (1, target_layers) if inputs else (0, target_layers - 1)
    if len(set(named)) != len(named) or not all(isinstance(n, int) and first <= n <= last for n in named):
        raise SettingsError(
            f"the EAGLE-3 head in {directory} has {key} {list(named)}; for this target they are different numbers from {first} to "
            f"{last}: use a head that was trained for this target."
        )
    return tuple(sorted(n - inputs for n in named))


def _trained_for(raw: Mapping[str, Any]) -> str:
    name = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    return f", trained for {name}," if name else ""


def _read_tensors(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Path]]:
    """Tensors by the names of Eagle3Head, and the file of each. SafeAILab's own heads are pickles: only tensors are read from
    them, never code."""
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, Path] = {}
    pickled = directory / PICKLED
    if pickled.is_file() and not any(directory.glob("*.safetensors")):
        try:
            loaded = torch.load(pickled, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = str(error).split("\n")[0]
            raise SettingsError(
                f"{pickled} cannot be read as tensors alone ({reason}); download it again or convert it to safetensors."
            ) from None
        if not isinstance(loaded, dict) or not all(isinstance(each, torch.Tensor) for each in loaded.values()):
            raise SettingsError(f"{pickled} is not a state dict of tensors; convert the head to safetensors.")
        tensors, files = loaded, dict.fromkeys(loaded, pickled)
    else:
        for name, info in inspect(directory).tensors.items():
            files[name] = info.file
        for file in sorted(set(files.values())):
            with safe_open(file, framework="pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in stored.keys()}
    return (
        {_own_name(name): tensor for name, tensor in tensors.items()},
        {_own_name(name): file for name, file in files.items()},
    )


def _own_name(name: str) -> str:
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _check_tensors(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    files: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise SettingsError(
                f"tensor {name} is missing from the EAGLE-3 head in {directory}; its files hold {', '.join(sorted(tensors)) or 'nothing'}."
            )
        found = tuple(tensors[name].shape)
        if found != shape:
            raise SettingsError(
                f"tensor {name} in {files[name]} has shape {list(found)}; by config.json and target it has to be {list(shape)}."
            )
        whole = name in ("d2t", "t2d")
        if not whole and tensors[name].dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise SettingsError(
                f"tensor {name} in {files[name]} is {tensors[name].dtype}; float32, float16 and bfloat16 are supported."
            )
    for name in tensors:
        if name not in shapes:
            raise SettingsError(f"tensor {name} in {files[name]} is not part of an EAGLE-3 head that can be run here.")


def _check_table(directory: Path, embed: torch.Tensor | None, files: Mapping[str, Path], config: Eagle3Config) -> None:
    shape = (config.vocab_size, config.hidden_size)
    if embed is None:
        if config.target_hidden_size not in (None, config.hidden_size):
            raise SettingsError(
                f"tensor embed_tokens.weight is missing from the EAGLE-3 head in {directory}; with a hidden_size of "
                f"{config.hidden_size} it cannot use the target's, which is {config.target_hidden_size} wide."
            )
    elif tuple(embed.shape) != shape:
        raise SettingsError(
            f"tensor embed_tokens.weight in {files['embed_tokens.weight']} has shape {list(embed.shape)}; by config.json it has "
            f"to be {list(shape)}."
        )
