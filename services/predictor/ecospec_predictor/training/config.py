"""The configuration of a training run: a YAML file, dotted overrides on top, checked before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import SettingsError

Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class SmallBackbone(Section):
    """Our own decoder over the target's token embeddings, from scratch."""

    kind: Literal["small"]
    hidden_size: Positive = 320
    layers: Positive = 4
    heads: Positive = 5
    mlp_size: Positive = 1280
    context_tokens: Positive = 24  # tokens up to and including the root that the predictor looks at


class HfBackbone(Section):
    """The decoder of any Hugging Face causal language model with the target's vocabulary, such as Qwen3-0.6B."""

    kind: Literal["hf"]
    path: Path
    train: Literal["whole", "head"] = "whole"
    context_tokens: Positive = 1024


class ExportedBackbone(Section):
    """Go on from a predictor that is already trained."""

    kind: Literal["exported"]
    path: Path


class Data(Section):
    window_tokens: Positive = 32  # accepted tokens of one window of text
    draft_rows: Annotated[int, Field(ge=0)] = 32  # rejected draft rows beside them; 0 leaves them out
    held_out: Share = 0.2  # share of the documents
    held_out_tokens: Positive = 40_000  # of them are scored during training
    shuffle_tokens: Positive = 1_000_000  # are in memory and shuffled at a time


class Optimiser(Section):
    """AdamW; the learning rate rises over warmup_steps and then falls in a straight line to final_share of itself."""

    learning_rate: Rate = 1e-5
    weight_decay: NotNegative = 0.02
    beta1: Share = 0.9
    beta2: Share = 0.98
    warmup_steps: Annotated[int, Field(ge=0)] = 100
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    clip_norm: Rate = 1.0


class Training(Section):
    epochs: Positive = 100
    minutes: Rate | None = None  # ends the run earlier, and the learning rate falls with the time
    batch_windows: Positive = 96  # of each process, at a time
    accumulate: Positive = 1  # batches per step
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | None = None  # CPU threads; all of the machine by default
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluate_every_steps: Positive = 200
    patience: Positive = 10  # evaluations without a better held-out accuracy end the run
    checkpoint_every_steps: Positive = 200
    tensorboard: bool = True


class TrainConfig(Section):
    """What `ecospec-predictor train` is told. Paths are relative to the folder in which the command runs."""

    traces: Path
    out: Path
    embeddings: Path | None = None  # the target's token embeddings: GGUF, safetensors, or a model directory
    backbone: Annotated[SmallBackbone | HfBackbone | ExportedBackbone, Field(discriminator="kind")]
    data: Data = Data()
    optimiser: Optimiser = Optimiser()
    training: Training = Training()
    version: Annotated[str, Field(pattern=r"^[\w.+-]{1,64}$")] = "1"


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """overrides: `a.b=value`, the value read as YAML. Raises SettingsError: one sentence."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The configuration {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"The configuration {path} is no YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise SettingsError(f"The configuration {path} holds no settings; write `name: value` lines.")
    for override in overrides:
        _override(values, override)
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise SettingsError(_sentence(error, path)) from None
    except TypeError:  # a key that is no text
        raise SettingsError(f"The configuration {path} has a setting whose name is no text.") from None


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as YAML that load_config reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _override(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not (equals and name):
        raise SettingsError(f"The override is {override!r}; allowed: NAME=VALUE, for example training.epochs=3.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise SettingsError(f"The override {name} has the value {text!r}, which is no YAML; quote it.") from None
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SettingsError(f"The override {name} names a part of {section}, which is no section.")
    values[last] = value


def _sentence(error: ValidationError, path: Path) -> str:
    problem = error.errors(include_url=False)[0]
    kinds = ("small", "hf", "exported")  # pydantic names the chosen kind in the location; the file does not
    parts = [str(p) for at, p in enumerate(problem["loc"]) if not (at == 1 and p in kinds)]
    name = ".".join(parts)
    if problem["type"] == "extra_forbidden":
        section = _section(parts[:-1], problem["loc"])
        allowed = ", ".join(section.model_fields)
        return f"Setting {name} in {path} is {problem['input']!r}, but no setting has this name; allowed: {allowed}."
    if problem["type"] == "missing":
        return f"Setting {name} is missing; write it into {path} or give --set {name}=VALUE."
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return f"Setting {name}.kind in {path} is {_kind(problem['input'])!r}; allowed: {', '.join(kinds)}."
    text = problem["msg"]
    return f"Setting {name} in {path} is {problem['input']!r}; allowed: {text[0].lower()}{text[1:]}."


def _kind(section: Any) -> Any:
    return section.get("kind") if isinstance(section, dict) else section


def _section(parts: Sequence[str], location: Sequence[int | str]) -> type[Section]:
    if not parts:
        return TrainConfig
    kinds: dict[str, type[Section]] = {"small": SmallBackbone, "hf": HfBackbone, "exported": ExportedBackbone}
    if parts[0] == "backbone":
        return kinds[str(location[1])]
    sections: dict[str, type[Section]] = {"data": Data, "optimiser": Optimiser, "training": Training}
    return sections[parts[0]]
