"""Command line: `ecospec-orchestrator serve`, `demo`, `profile`, `doctor`, `chat` and `key`."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from ecospec_proto.telemetry import TelemetryError, traces

from . import chat_command, keys_command
from .core import EcoSpecError, SettingsError
from .server import Serving, SystemLike, bind
from .settings import PREFIX, SECRETS, Settings, load_settings

log = logging.getLogger("ecospec_orchestrator")
PREDICTOR_START_SECONDS = 60.0
QUICK_STOP_SECONDS = 1.0  # for the predictor, which has not been asked anything yet


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ecospec-orchestrator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "serve completions; the predictor runs elsewhere (see --predictor-address)"),
        ("demo", "start the demo's predictor as a child process and serve the demo model"),
        ("profile", "measure what a step costs on this machine with this model and keep it for the goodput policy"),
        ("doctor", "check what engine tensorrt-llm needs: its version and signatures, GPUs, memory, files, predictor"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        for setting, field in Settings.model_fields.items():
            if setting in SECRETS:  # a command line is visible to every user of the machine
                continue
            command.add_argument(
                f"--{setting.replace('_', '-')}",
                dest=setting,
                default=argparse.SUPPRESS,
                help=f"{field.description} (default {field.default}; variable {PREFIX}{setting.upper()})".replace(
                    "%", "%%"
                ),
            )
        if name == "profile":
            command.add_argument(
                "--out", type=Path, help="the file to write (default: --profile, else one in ~/.cache)"
            )
            command.add_argument("--quick", action="store_true", help="measure for 20 s instead of 60 s, less exactly")
    chat_command.add_parser(commands)
    keys_command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a clean stop, 2 for a wrong setting, 1 for any other failure."""
    options = vars(_parser().parse_args(arguments))
    if options["command"] in ("chat", "key"):
        return _without_settings(options)
    command, out, quick = options.pop("command"), options.pop("out", None), options.pop("quick", False)
    try:
        settings = load_settings(options)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    for chatty in ("httpx", "uvicorn.error", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    try:
        if command in ("demo", "profile") and settings.engine != "torch":
            raise SettingsError(
                f"Setting engine is '{settings.engine}', but the command {command} is for engine torch only."
            )
        if command == "doctor":
            return _doctor(settings)
        if command == "profile":
            return _profile(settings, out, quick)
        return _demo(settings) if command == "demo" else _serve(settings, _preparing(settings))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the server's own signal handling was in place
        return 0
    except EcoSpecError as error:
        print(error, file=sys.stderr)
        return 1


def _without_settings(options: dict[str, Any]) -> int:
    try:
        return chat_command.run(options) if options["command"] == "chat" else keys_command.run(options)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2


def _serve(
    settings: Settings, before_ready: Callable[[Any], None] | None, before_exit: Callable[[], None] = lambda: None
) -> int:
    """before_ready, before_exit: see Serving."""
    sock = bind(settings.host, settings.port)
    try:
        with sock, traces("ecospec-orchestrator"):
            uvloop.run(Serving(settings, sock, _build, before_exit).run(before_ready))
    except TelemetryError as error:
        raise SettingsError(str(error)) from error
    return 0


def _preparing(settings: Settings) -> Callable[[Any], None] | None:
    """What `serve` does before it is ready: measure what a step costs where that is not known."""
    if settings.engine != "torch":
        return None
    return lambda system: system.profile_if_missing(settings.profile_seconds)


def _build(settings: Settings) -> SystemLike:
    if settings.engine == "tensorrt-llm":
        from .engine.tensorrt_llm.system import build_system as build_tensorrt_llm

        return build_tensorrt_llm(settings)
    from .system import build_system  # heavy: torch; /health answers while it is imported

    return build_system(settings)


def _demo(settings: Settings) -> int:
    from .predictor_process import PredictorProcess, predictor_command

    bind(settings.host, settings.port).close()
    _require_free(settings.predictor_address)
    from .loading import DEMO, gguf_path
    from .system import System  # heavy: torch; a taken port is told before it is imported

    if settings.model != DEMO:
        raise SettingsError(
            f"Setting model is {settings.model!r}, but the command demo serves '{DEMO}' with its own predictor; use "
            "ecospec-orchestrator serve for other models."
        )
    predictor = PredictorProcess(predictor_command(settings, gguf_path(settings)))

    def prepare(system: System) -> None:
        if predictor.wait_until_serving(settings.predictor_address, PREDICTOR_START_SECONDS):
            system.profile_if_missing(settings.profile_seconds)
        else:
            log.warning("The predictor is not there yet; until then drafts are chosen without it.")

    # Until the server handles it: the default would leave the child alone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log.info("Starting the expert predictor on %s.", settings.predictor_address)
    predictor.start()
    try:
        return _serve(settings, prepare, lambda: predictor.stop(QUICK_STOP_SECONDS))
    finally:
        log.info("Stopping the expert predictor.")
        predictor.stop()


def _profile(settings: Settings, out: Path | None, quick: bool) -> int:
    from .profiling import QUICK_SECONDS, SECONDS, run  # heavy: torch

    return run(settings, out, QUICK_SECONDS if quick else SECONDS)


def _doctor(settings: Settings) -> int:
    if settings.engine != "tensorrt-llm":
        raise SettingsError("Setting engine is 'torch', which needs no doctor; give --engine tensorrt-llm.")
    from .engine.tensorrt_llm.doctor import run

    return run(settings)


def _require_free(address: str) -> None:
    """Raises SettingsError when something listens on host:port already."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            pass
    except OSError:
        return
    raise SettingsError(
        f"Setting predictor_address is {address}, where something listens already; stop it or choose another address."
    )


if __name__ == "__main__":
    sys.exit(main())
