"""Which tensors of a checkpoint fill which module of the model, found and checked in the headers before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from ...core import SettingsError
from ..base import StepBytes
from .checkpoint import Checkpoint, TensorInfo
from .families import Family, family_of, is_derived_tensor, is_draft_tensor, stored_names
from .geometry import FP8_BLOCK, step_bytes_of

FLOATS = ("BF16", "F16", "F32")
MXFP4_BLOCK = 32  # inputs that share a scale, two of them a byte


@dataclass(frozen=True)
class Slot:
    """A place in the model and what fills it.

    kind "linear": weight, with bias and weight_scale_inv where there are; "embedding": weight; "vector": weight, a parameter or
    buffer of its own, kept as float32; "experts": one layer's routed experts, either stacked (gate_up_proj and down_proj, or
    these with _blocks and _scales, and gate_up_proj_bias and down_proj_bias where there are) or one by one ("3.gate_proj",
    "3.gate_proj_scale_inv" and so on, in order).
    """

    path: str
    kind: Literal["linear", "embedding", "vector", "experts"]
    tensors: dict[str, TensorInfo]

    @property
    def kept_bytes(self) -> int:
        return sum(self._kept_bytes(role, info) for role, info in self.tensors.items())

    def _kept_bytes(self, role: str, info: TensorInfo) -> int:
        widened = info.dtype == "F16" or self.kind == "vector" or self.kind == "linear" and role == "bias"
        return prod(info.shape) * 4 if widened else info.bytes


@dataclass(frozen=True)
class FilledModel:
    """model: transformers' own, without memory, and what is to fill it. tied: the head is the embedding table."""

    model: Any
    slots: list[Slot]
    tied: bool

    @property
    def weight_bytes(self) -> int:
        """Bytes of memory that the weights take."""
        return sum(slot.kept_bytes for slot in self.slots)

    @property
    def file_bytes(self) -> int:
        return sum(info.bytes for slot in self.slots for info in slot.tensors.values())

    def step_bytes(self, config: dict[str, Any]) -> StepBytes:
        """As geometry.step_bytes_of, but counted over the tensors as they are."""
        attention = shared = head = per_expert = 0
        for slot in self.slots:
            if slot.kind == "experts":
                per_expert = slot.kept_bytes // self.model.get_submodule(slot.path).num_experts
            elif ".self_attn." in slot.path:
                attention += slot.kept_bytes
            elif slot.path == "lm_head" or self.tied and slot.kind == "embedding":
                head += slot.kept_bytes
            elif slot.kind != "embedding":
                shared += slot.kept_bytes
        return StepBytes(per_expert, attention, shared, head, step_bytes_of(config).kv_per_token)


def filled_model_of(checkpoint: Checkpoint) -> FilledModel:
    """Raises SettingsError naming file and tensor where one is missing, left over or of another dtype or shape."""
    family, config = family_of(checkpoint.config), checkpoint.config
    model = _empty_model(family, config)
    tied = bool(config.get("tie_word_embeddings"))
    files = _Files(checkpoint, family)
    slots = [slot for path, module in model.named_modules() for slot in _slots(path, module, family, files, tied)]
    files.refuse_left_over({"lm_head.weight"} if tied else set())
    return FilledModel(model, slots, tied)


def _empty_model(family: Family, config: dict[str, Any]) -> Any:
    if config.get("hidden_act", "silu") != "silu":
        raise SettingsError(f"config.json has hidden_act {config['hidden_act']!r}; only 'silu' is supported.")
    values = {k: v for k, v in config.items() if k not in ("quantization_config", "dtype", "torch_dtype")}
    try:
        built = CONFIG_MAPPING[config["model_type"]].from_dict(values)
        with torch.device("meta"):
            return getattr(transformers, family.model_class)(built)
    except Exception as error:  # whatever transformers' validation raises
        raise SettingsError(
            f"config.json is not a valid configuration of {config['model_type']}: {error}; download it again."
        ) from error


class _Files:
    """The checkpoint's tensors, and which of them have found their place."""

    def __init__(self, checkpoint: Checkpoint, family: Family) -> None:
        self._checkpoint, self._family = checkpoint, family
        self._used: set[str] = set()

    def find(self, name: str) -> str | None:
        """The files' name of a tensor of the model."""
        return next((n for n in stored_names(self._family, name) if n in self._checkpoint.tensors), None)

    def take(self, name: str, shape: Sequence[int], dtypes: tuple[str, ...]) -> TensorInfo:
        found = self.find(name)
        if found is None:
            raise SettingsError(
                f"{self._checkpoint.directory} has no tensor {stored_names(self._family, name)[0]}, which a "
                f"{self._checkpoint.config['model_type']} model of this config.json needs; download the model again, all of "
                "its files."
            )
        info = self._checkpoint.tensors[found]
        if info.shape != tuple(shape):
            raise SettingsError(
                f"tensor {found} in {info.file} has shape {list(info.shape)} where config.json asks for {list(shape)}; "
                "download the model again: the two are not of the same model."
            )
        if info.dtype not in dtypes:
            raise SettingsError(
                f"tensor {found} in {info.file} has dtype {info.dtype}; {' or '.join(dtypes)} is supported there."
            )
        self._used.add(found)
        return info

    def refuse_left_over(self, optional: set[str]) -> None:
        config, placed = self._checkpoint.config, self._used | optional
        left = [
            name
            for name in self._checkpoint.tensors
            if name not in placed and not is_draft_tensor(config, name) and not is_derived_tensor(name)
        ]
        if left:
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise SettingsError(
                f"tensor {left[0]} in {self._checkpoint.tensors[left[0]].file}{more} has no place in a "
                f"{config['model_type']} model of this config.json; download the model again: the two are not of the same model."
            )


def _slots(path: str, module: nn.Module, family: Family, files: _Files, tied: bool) -> list[Slot]:
    """Slots of one module, without those of the modules within it."""
    if path.endswith(".mlp.experts"):
        return [Slot(path, "experts", _expert_tensors(path, module, family, files))]
    if isinstance(module, nn.Embedding):
        return [Slot(path, "embedding", {"weight": files.take(f"{path}.weight", module.weight.shape, FLOATS)})]
    if isinstance(module, nn.Linear):
        return [] if tied and path == "lm_head" else [Slot(path, "linear", _linear_tensors(path, module, files))]
    buffers = {n: b for n, b in module.named_buffers(recurse=False) if n not in module._non_persistent_buffers_set}
    return [
        Slot(f"{path}.{name}", "vector", {"weight": files.take(f"{path}.{name}", tensor.shape, FLOATS)})
        for name, tensor in (dict(module.named_parameters(recurse=False)) | buffers).items()
    ]


def _linear_tensors(path: str, module: nn.Linear, files: _Files) -> dict[str, TensorInfo]:
    tensors = _matrix(f"{path}.weight", "weight", module.weight.shape, files)
    if module.bias is not None:
        tensors["bias"] = files.take(f"{path}.bias", module.bias.shape, FLOATS)
    return tensors


def _matrix(name: str, role: str, shape: Sequence[int], files: _Files) -> dict[str, TensorInfo]:
    """A weight, with its scales if it is FP8."""
    tensors = {role: files.take(name, shape, (*FLOATS, "F8_E4M3"))}
    if tensors[role].dtype == "F8_E4M3":
        scales = [-(-n // FP8_BLOCK) for n in shape]
        tensors[f"{role}_scale_inv"] = files.take(f"{name}_scale_inv", scales, ("F32",))
    return tensors


def _expert_tensors(path: str, module: Any, family: Family, files: _Files) -> dict[str, TensorInfo]:
    gpt_oss = family.gate == "gpt_oss"
    stacked = {name: tuple(getattr(module, name).shape) for name in ("gate_up_proj", "down_proj")}
    experts, *matrix = stacked["down_proj"]
    hidden, width = reversed(matrix) if gpt_oss else matrix  # gpt-oss keeps its matrices transposed, except in MXFP4
    tensors: dict[str, TensorInfo] = {}
    if files.find(f"{path}.gate_up_proj_blocks"):
        for name, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            shape = (experts, outputs, inputs // MXFP4_BLOCK)
            blocks = files.take(f"{path}.{name}_blocks", (*shape, MXFP4_BLOCK // 2), ("U8",))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": files.take(f"{path}.{name}_scales", shape, ("U8",))}
    elif gpt_oss or files.find(f"{path}.gate_up_proj"):
        tensors |= {name: files.take(f"{path}.{name}", size, FLOATS) for name, size in stacked.items()}
    else:
        shapes = (width, hidden), (width, hidden), (hidden, width)
        for expert in range(experts):
            for part, size in zip(family.expert_parts, shapes, strict=True):
                tensors |= _matrix(f"{path}.{expert}.{part}.weight", f"{expert}.{part}", size, files)
    kinds = {i.dtype: i for role, i in tensors.items() if not role.endswith(("_scales", "_scale_inv"))}
    if len(kinds) > 1:
        raise SettingsError(
            f"the experts of {path} are {' and '.join(kinds)} in {' and '.join(str(i.file) for i in kinds.values())}; one dtype "
            "for all experts of a layer is supported."
        )
    if gpt_oss:
        for name, outputs in (("gate_up_proj_bias", 2 * width), ("down_proj_bias", hidden)):
            tensors[name] = files.take(f"{path}.{name}", (experts, outputs), FLOATS)
    return tensors
