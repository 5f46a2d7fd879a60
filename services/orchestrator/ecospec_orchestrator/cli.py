"""Command line: `ecospec-orchestrator serve` and `ecospec-orchestrator demo`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import warnings
from collections.abc import Callable, Sequence

from .core import EcoSpecError, SettingsError
from .server import Serving, SystemLike, bind
from .settings import PREFIX, Settings, load_settings

log = logging.getLogger("ecospec_orchestrator")
PREDICTOR_START_SECONDS = 60.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ecospec-orchestrator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "serve completions; the predictor runs elsewhere (see --predictor-address)"),
        ("demo", "start the demo's predictor as a child process and serve the demo model"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        for setting, field in Settings.model_fields.items():
            if setting == "api_keys":  # a command line is visible to every user of the machine
                continue
            command.add_argument(
                f"--{setting.replace('_', '-')}",
                dest=setting,
                default=argparse.SUPPRESS,
                help=f"{field.description} (default {field.default}; variable {PREFIX}{setting.upper()})".replace(
                    "%", "%%"
                ),
            )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a clean stop, 2 for a wrong setting, 1 for any other failure."""
    options = vars(_parser().parse_args(arguments))
    command = options.pop("command")
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
        return _demo(settings) if command == "demo" else _serve(settings)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the server's own signal handling was in place
        return 0
    except EcoSpecError as error:
        print(error, file=sys.stderr)
        return 1


def _serve(settings: Settings, before_ready: Callable[[], None] | None = None) -> int:
    sock = bind(settings.host, settings.port)
    with sock:
        asyncio.run(Serving(settings, sock, _build).run(before_ready))
    return 0


def _build(settings: Settings) -> SystemLike:
    from .system import build_system  # heavy: torch; /health answers while it is imported

    return build_system(settings)


def _demo(settings: Settings) -> int:
    from .predictor_process import PredictorProcess, predictor_command

    bind(settings.host, settings.port).close()
    _require_free(settings.predictor_address)
    from .system import gguf_path  # heavy: torch; a taken port is told before it is imported

    predictor = PredictorProcess(predictor_command(settings, gguf_path(settings)))

    def wait_for_predictor() -> None:
        if not predictor.wait_until_serving(settings.predictor_address, PREDICTOR_START_SECONDS):
            log.warning("The predictor is not there yet; until then drafts are chosen by likelihood.")

    log.info("Starting the expert predictor on %s.", settings.predictor_address)
    predictor.start()
    try:
        return _serve(settings, wait_for_predictor)
    finally:
        log.info("Stopping the expert predictor.")
        predictor.stop()


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
