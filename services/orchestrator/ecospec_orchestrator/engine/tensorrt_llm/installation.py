"""Put the plug-in into the engine that is about to start: its configuration, its registration, and whether it arrived."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core import SettingsError
from ...settings import Settings
from .artifacts import checked_table
from .facts import ModelFacts
from .launcher import CANNOT_IMPORT, LaunchPlan
from .plugin.config import ENVIRONMENT, Mode, PluginConfig
from .plugin.traces import PIECE_ROWS
from .predictor_link import arguments_of
from .registration import register

LEAST_CONSIDERED = 64  # candidates of one request that selection looks at
LEAST_PAUSE_SECONDS = 1e-3  # between two sampled traces


@dataclass(frozen=True)
class Installation:
    """folder: private to this server; what its ranks and we tell each other."""

    folder: Path
    mode: Mode

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def steps(self) -> Path:
        """What plugin.step_file.StepReader reads; it is there once the engine has started."""
        return self.folder / "steps.bin"

    @property
    def traces(self) -> Path:
        """What plugin.spool.take_records reads, where routes are sampled."""
        return self.folder / "traces"

    def confirm(self) -> None:
        """After the engine has started. Raises SettingsError when it did so without the plug-in, and would serve without it."""
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
            if status["mode"] != self.mode:
                raise ValueError(f"it works in mode {status['mode']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"TensorRT-LLM has started without the plug-in ({error}); see the log of its ranks, or serve with --policy none."
            ) from None

    def close(self) -> None:
        os.environ.pop(ENVIRONMENT, None)
        shutil.rmtree(self.folder, ignore_errors=True)


def install(settings: Settings, facts: ModelFacts, plan: LaunchPlan) -> Installation:
    """Before the LLM is made, for a plan with drafts. Raises SettingsError."""
    installation = Installation(Path(tempfile.mkdtemp(prefix="ecospec-")), mode_of(settings, plan))
    try:
        rendezvous = f"{rendezvous_host(settings)}:{free_port()}"
        os.environ[ENVIRONMENT] = plugin_config(settings, facts, plan, installation, rendezvous).encode()
        register()
    except BaseException as error:
        installation.close()
        if isinstance(error, ImportError):
            raise SettingsError(CANNOT_IMPORT.format(error)) from None
        if isinstance(error, RuntimeError | ValueError):  # another version, or values that the plug-in refuses
            raise SettingsError(f"The plug-in for TensorRT-LLM cannot be installed: {error}") from error
        raise
    return installation


def plugin_config(
    settings: Settings, facts: ModelFacts, plan: LaunchPlan, installation: Installation, rendezvous: str
) -> PluginConfig:
    """Raises SettingsError for a table that is missing or of another target."""
    values: dict[str, Any] = {}
    if installation.mode == "graph":
        values["table"] = str(checked_table(settings, facts))
    if installation.mode == "eager":
        values["predictor"] = f"{arguments_of.__module__}:connect"
        values["predictor_arguments"] = arguments_of(settings, asdict(facts.geometry))
        values["deadline_seconds"] = settings.predictor_deadline_ms / 1e3
    if rate := settings.trace_rate_tokens_per_second:
        values["traces_folder"] = str(installation.traces)
        values["traces_pause_seconds"] = max(PIECE_ROWS / rate, LEAST_PAUSE_SECONDS)
    return PluginConfig(
        mode=installation.mode,
        geometry=facts.geometry,
        nodes=plan.nodes,
        levels=plan.levels,
        max_batch_size=settings.max_running,
        max_tokens=plan.tokens,
        eps=settings.eps,
        considered=max(LEAST_CONSIDERED, plan.nodes),
        rendezvous=rendezvous,
        steps_file=str(installation.steps),
        status_file=str(installation.status),
        **values,
    )


def mode_of(settings: Settings, plan: LaunchPlan) -> Mode:
    """Where the engine chooses, the plug-in only counts what a step read."""
    if not plan.selects:
        return "stock"
    return "graph" if settings.cuda_graphs else "eager"


def rendezvous_host(settings: Settings) -> str:
    """Where the ranks reach rank 0, which runs on this machine: on it only, or from the other nodes by the address that Ray goes by.
    Raises SettingsError."""
    if settings.distributed_executor == "mpi":
        return "127.0.0.1"
    try:
        from ray.util import get_node_ip_address
    except ImportError as error:
        raise SettingsError(
            f"Setting distributed_executor is 'ray', which cannot be imported ({error}); build the image with the build argument RAY, "
            "or use mpi."
        ) from None
    return str(get_node_ip_address())


def free_port() -> int:
    """One that rank 0 may take shortly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
