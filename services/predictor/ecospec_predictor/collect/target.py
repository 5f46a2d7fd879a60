"""Which model a trace is of."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.hf_config import geometry_from_config, routed_layers

from ..errors import SettingsError

_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Target:
    """routed_layers: indices of the layers with routed experts among all layers, None where nobody told: some engines report
    the dense layers as well."""

    geometry: TargetGeometry
    routed_layers: tuple[int, ...] | None = None


def load_target(path: Path, revision: str | None) -> Target:
    """path: a Hugging Face directory or its config.json, with `revision`; or a JSON file with the fields of a geometry, as
    GET /v1/models of an orchestrator tells it in ecospec.geometry. Raises SettingsError."""
    file = path / "config.json" if path.is_dir() else path
    record = _read(file)
    try:
        if "num_hidden_layers" not in record and "text_config" not in record:
            if revision is not None:
                raise ValueError("it tells its revision itself; leave --revision out.")
            names = {field.name for field in fields(TargetGeometry)}
            if record.keys() != names:
                raise ValueError(
                    f"it has the fields {', '.join(sorted(record))}; {', '.join(sorted(names))} are needed."
                )
            if not (isinstance(record["name"], str) and isinstance(record["revision"], str)):
                raise ValueError("its name and revision must be text.")
            return Target(TargetGeometry(**record))
        config = record.get("text_config", record)
        name = file.resolve().parent.name
        return Target(geometry_from_config(config, name, revision or "unknown"), routed_layers(config))
    except (ValueError, TypeError, AttributeError) as error:
        raise SettingsError(f"Option --target is '{path}', which describes no target: {error}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise SettingsError(f"{file} has more than {_MOST_BYTES} bytes; a configuration is needed.")
        record = json.loads(file.read_bytes())
    except (OSError, RecursionError, ValueError) as error:
        raise SettingsError(f"{file} cannot be read as JSON: {error}.") from None
    if not isinstance(record, dict):
        raise SettingsError(f"{file} holds no JSON object; a configuration is needed.")
    return record
