"""Put the plug-in into the engine that is about to start: its configuration, its registration, and whether it arrived."""

from __future__ import annotations

import importlib
import json
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ecospec_proto.token_table import TableError, TokenTable

from ...core import SettingsError
from ...settings import Settings
from .facts import ModelFacts
from .predictor_link import arguments_of
from .launcher import LaunchPlan

CONFIG, STATUS, STEPS = "plugin.json", "status.json", "steps.bin"


def plugin_values(
    settings: Settings, facts: ModelFacts, plan: LaunchPlan, folder: Path, rendezvous: str
) -> dict[str, Any]:
    """Fields of plugin.config.PluginConfig. Raises SettingsError for a table that is missing or of another target."""
    values: dict[str, Any] = {
        "mode": mode_of(settings, plan),
        "geometry": facts.geometry,
        "nodes": plan.nodes,
        "levels": plan.levels,
        "max_batch_size": settings.max_running,
        "eps": settings.eps,
        "considered": max(64, plan.nodes),
        "rendezvous": rendezvous,
        "steps_file": str(folder / STEPS),
        "status_file": str(folder / STATUS),
    }
    if values["mode"] == "graph":
        table = settings.token_table
        if table is None:
            raise SettingsError(
                "Setting token_table is missing; inside CUDA graphs nodes are chosen by the table of a trained predictor (its "
                "token_table.safetensors). Give it, or set cuda_graphs to false to ask the predictor in every step, which is slow."
            )
        try:
            TokenTable.load(table, facts.geometry)
        except TableError as error:
            raise SettingsError(f"Setting token_table is {table}, which cannot be used: {error}") from None
        values["table"] = str(table.resolve())
    if values["mode"] == "eager":
        values["predictor"] = f"{__package__}.predictor_link:connect"
        values["predictor_arguments"] = arguments_of(settings, asdict(facts.geometry))
        values["deadline_seconds"] = settings.predictor_deadline_ms / 1e3
    return values


def mode_of(settings: Settings, plan: LaunchPlan) -> str:
    """Of the plug-in: where the engine chooses, or no prediction is to be had, it only counts what a step read."""
    if not plan.selects or settings.footprints == "none":
        return "stock"
    return "graph" if settings.cuda_graphs else "eager"


def install(settings: Settings, facts: ModelFacts, plan: LaunchPlan, folder: Path) -> Path:
    """Before the LLM is made; returns the file that steps are written to. Raises SettingsError."""
    config_module = importlib.import_module(f"{__package__}.plugin.config")
    values = plugin_values(settings, facts, plan, folder, f"127.0.0.1:{free_port()}")
    try:
        config_module.PluginConfig(**values).save(folder / CONFIG)
        os.environ[config_module.ENVIRONMENT] = str(folder / CONFIG)
        importlib.import_module(f"{__package__}.registration")
    except ImportError as error:
        raise SettingsError(
            f"Setting engine is 'tensorrt-llm', which cannot be imported ({error}); run inside NVIDIA's TensorRT-LLM image, with "
            "this package installed there."
        ) from None
    except (RuntimeError, ValueError) as error:  # of another version, or a configuration that the plug-in refuses
        raise SettingsError(f"The plug-in for TensorRT-LLM cannot be installed: {error}") from error
    return folder / STEPS


def confirm(folder: Path) -> dict[str, Any]:
    """What rank 0 says once it is installed. Raises SettingsError when it says nothing: the engine would serve without it."""
    try:
        return json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"TensorRT-LLM has started without the plug-in ({error}); see the log of its ranks, or serve with --policy likelihood."
        ) from None


def free_port() -> int:
    """One that rank 0 may take shortly; on the machine itself only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
