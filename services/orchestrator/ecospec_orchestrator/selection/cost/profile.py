"""The file that keeps a measured cost, bound to the machine and the models that it was measured on."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from ...core import EcoSpecError
from .model import FitQuality, StepCost

VERSION = 2
AGAIN = "run ecospec-orchestrator profile to measure a new one."


class ProfileError(EcoSpecError):
    """A cost profile that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Binding:
    """What a profile was measured on; costs of another machine or model say nothing. engine: name and version; target:
    fingerprint; drafter: name, depth and top_k; predictor: who was asked, or "none"; device: name of the CPU and threads, or
    of the GPU."""

    engine: str
    target: str
    drafter: str
    predictor: str
    device: str
    dtype: str

    @property
    def digest(self) -> str:
        """12 hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Profile:
    """A measured cost and what it was measured on. quality: on steps that the fit did not see; created: ISO date;
    command: how it was made."""

    cost: StepCost
    quality: FitQuality
    binding: Binding
    created: str
    command: str
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write JSON; a reader sees the old file or the new one, never half. Raises ProfileError."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise ProfileError(
                f"The cost profile cannot be written to {path} ({error.strerror}); choose a file in a folder that can be "
                "written, with --out or ECOSPEC_PROFILE."
            ) from error

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Raises ProfileError: the file is missing, is no JSON, has another version, a wrong field or a wrong value."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProfileError(f"There is no cost profile at {path}; {AGAIN}") from None
        except OSError as error:
            raise ProfileError(f"The cost profile {path} cannot be read ({error.strerror}); {AGAIN}") from error
        except ValueError as error:
            raise ProfileError(f"The cost profile {path} is not valid JSON ({error}); {AGAIN}") from error
        version = raw.get("version") if isinstance(raw, dict) else None
        if type(version) is not int or version != VERSION:
            raise ProfileError(
                f"The cost profile {path} has version {version!r}; this program reads {VERSION}: {AGAIN}"
            )
        try:
            whole = _object(raw, cls, "the profile")
            cost = StepCost(**_numbers(_object(whole["cost"], StepCost, "cost"), "cost", at_least=0.0))
            quality = _numbers(_object(whole["quality"], FitQuality, "quality"), "quality", at_least=-math.inf)
            binding = Binding(**_texts(_object(whole["binding"], Binding, "binding"), "binding."))
            texts = _texts({name: whole[name] for name in ("created", "command")}, "")
            try:
                date.fromisoformat(texts["created"])
            except ValueError:
                raise ValueError(f"created is {texts['created']!r}, but a date like 2026-01-31 is needed") from None
        except ValueError as error:
            raise ProfileError(f"The cost profile {path} cannot be used because {error}; {AGAIN}") from None
        samples = int(quality.pop("samples"))
        return cls(cost, FitQuality(samples, **quality), binding, texts["created"], texts["command"])

    def check(self, binding: Binding) -> None:
        """Raises ProfileError that names the field in which the running system differs from the measured one."""
        for field in fields(Binding):
            measured, here = getattr(self.binding, field.name), getattr(binding, field.name)
            if measured != here:
                raise ProfileError(
                    f"The cost profile was measured with {field.name} {measured!r}, but this system has {here!r}; {AGAIN}"
                )


def _object(raw: Any, kind: type, name: str) -> dict[str, Any]:
    """The JSON object of a dataclass: all of its fields and no others. Raises ValueError."""
    if not isinstance(raw, dict):
        raise ValueError(f"{name} is {raw!r}, but an object is needed")
    known = [field.name for field in fields(kind)]
    for problem, names in (
        ("lacks the field", [n for n in known if n not in raw]),
        ("has the unknown field", [n for n in raw if n not in known]),
    ):
        if names:
            raise ValueError(f"{name} {problem} {names[0]}")
    return raw


def _numbers(raw: dict[str, Any], name: str, at_least: float) -> dict[str, float]:
    for key, value in raw.items():
        if type(value) not in (int, float) or not math.isfinite(value) or value < at_least:
            allowed = "a finite number" + (f" of at least {at_least:g}" if math.isfinite(at_least) else "")
            raise ValueError(f"{name}.{key} is {value!r}, but {allowed} is needed")
    return {key: float(value) for key, value in raw.items()}


def _texts(raw: dict[str, Any], prefix: str) -> dict[str, str]:
    for key, value in raw.items():
        if not isinstance(value, str):
            raise ValueError(f"{prefix}{key} is {value!r}, but a text is needed")
    return raw
