"""What the launcher tells the plug-in: JSON in a variable that the executor's processes inherit, on whichever machine they run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from ecospec_proto.geometry import TargetGeometry

ENVIRONMENT = "TLLM_ECOSPEC_PLUGIN"  # under MPI variables of this prefix are handed on to all ranks, under Ray all are
Mode = Literal["graph", "eager", "stock"]
_MOST = {
    "nodes": 1024,
    "levels": 256,
    "max_batch_size": 1 << 16,
    "max_tokens": 1 << 20,
    "considered": 1 << 16,
    "table_rows": 1 << 20,
}


class PluginConfigError(ValueError):
    """A text that is no plug-in configuration, or one of another release; one sentence."""


@dataclass(frozen=True)
class PluginConfig:
    """mode: "graph" chooses nodes inside CUDA graphs from a table, "eager" asks the predictor in every step, "stock" leaves the choice
    to the engine. nodes: draft nodes verified per request and step; levels: max_draft_len.

    eps, considered: as in select_graph.Pricing. rendezvous: host:port where rank 0 listens for the others; with several ranks only.
    table: token table (ecospec_proto.token_table) of graph mode, looked at again every table_period_steps steps; table_rows: tokens
    that it may know. predictor: "module:function" of eager mode; called on rank 0 with predictor_arguments it returns
    select_eager.Predict. steps_file: where step_file.StepReader reads; traces_folder: where spool.take_records does, where nodes are
    chosen only. status_file: written by rank 0 once it is installed.
    """

    mode: Mode
    geometry: TargetGeometry
    nodes: int
    levels: int
    max_batch_size: int
    max_tokens: int = 8192
    eps: float = 1.0
    considered: int = 64
    rendezvous: str = ""
    table: str = ""
    table_rows: int = 65536
    table_period_steps: int = 256
    predictor: str = ""
    predictor_arguments: dict[str, Any] = field(default_factory=dict)
    deadline_seconds: float = 0.05
    steps_file: str = ""
    traces_folder: str = ""
    traces_pause_seconds: float = 10.0
    status_file: str = ""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise PluginConfigError(f"mode is {self.mode!r}; one of {', '.join(get_args(Mode))} is needed.")
        for name, most in {**_MOST, "table_period_steps": 1 << 30}.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise PluginConfigError(f"{name} is {value!r}; a whole number from 1 to {most} is needed.")
        for name in ("eps", "deadline_seconds", "traces_pause_seconds"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e6:
                raise PluginConfigError(f"{name} is {number!r}; a number above 0 is needed.")
        if self.mode == "eager" and not self.predictor:
            raise PluginConfigError("predictor is empty; mode eager needs one.")
        if self.mode == "graph" and not self.table:
            raise PluginConfigError("table is empty; mode graph needs a token table.")
        if self.traces_folder and self.mode == "stock":
            raise PluginConfigError(
                f"traces_folder is {self.traces_folder!r} with mode stock; traces need mode graph or eager."
            )

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> PluginConfig:
    """Raises PluginConfigError."""
    try:
        values = json.loads(text)
        values["geometry"] = TargetGeometry(**values["geometry"])
    except (ValueError, TypeError, KeyError) as error:
        raise PluginConfigError(f"{ENVIRONMENT} cannot be read as a plug-in configuration: {error}.") from None
    known = {item.name for item in fields(PluginConfig)}
    if unknown := sorted(values.keys() - known):
        raise PluginConfigError(
            f"{ENVIRONMENT} has the unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}."
        )
    try:
        return PluginConfig(**values)
    except TypeError as error:
        raise PluginConfigError(f"{ENVIRONMENT} is incomplete: {error}.") from None


def from_environment() -> PluginConfig | None:
    """None in a process that was not told to use the plug-in. Raises PluginConfigError."""
    text = os.environ.get(ENVIRONMENT)
    return decode(text) if text else None
