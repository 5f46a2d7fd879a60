"""Command line: `ecospec-predictor collect | train | eval | export | publish | versions | serve`; each has --help."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .collect import commands as collect_commands
from .errors import PredictorError, SettingsError
from .live import commands as live_commands
from .settings import PREFIX, SECRETS, Settings, load_settings
from .training import commands as training_commands
from .versions import shelves_of

if TYPE_CHECKING:
    from .base import ExpertModel

log = logging.getLogger(__name__)
REPEATABLE = ("model_dir", "embeddings")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ecospec-predictor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    text = "answer over gRPC which experts the tokens of a draft tree will use"
    serve = commands.add_parser("serve", help=text, description=text)
    for name, field in Settings.model_fields.items():
        if name in SECRETS:  # a command line is visible to every user of the machine
            continue
        default = "" if field.is_required() or field.default in (None, ()) else f"default {field.default}; "
        several: dict[str, Any] = {"action": "append"} if name in REPEATABLE else {}
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        serve.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=argparse.SUPPRESS,
            **several,
            **switch,
            help=f"{field.description} ({default}variable {PREFIX}{name.upper()})".replace("%", "%%"),
        )
    serve.add_argument("--address", default=argparse.SUPPRESS, help="host:port, short for --host and --port")
    collect_commands.register(commands)
    training_commands.register(commands)
    live_commands.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a clean stop, 2 for a wrong setting, 1 for any other failure."""
    parsed = _parser().parse_args(arguments)
    options = vars(parsed)
    if options.pop("command") != "serve":
        return _other_command(parsed)
    try:
        settings = load_settings(_split_address(options))
        shelves_of(settings)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    try:
        _require_free(settings)
        from .server import run

        run(settings, lambda directory, embeddings: _load(directory, embeddings, settings))
    except PredictorError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except KeyboardInterrupt:  # before our own signal handling was in place
        pass
    return 0


def _other_command(options: argparse.Namespace) -> int:
    try:
        return training_commands.run_command(options)
    except PredictorError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1


def _load(directory: Path, embeddings: Path | None, settings: Settings) -> ExpertModel:
    from .model import load_model  # heavy: torch; a taken port is told before it is imported

    try:
        return load_model(directory, embeddings, settings.threads, device=settings.device)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:  # what broken files raise
        log.debug("Loading failed.", exc_info=True)
        raise PredictorError(f"The model in {directory} cannot be loaded: {error}") from None


def _split_address(options: dict[str, Any]) -> dict[str, Any]:
    if (value := options.pop("address", None)) is not None:
        host, colon, port = value.rpartition(":")
        if not (colon and host and port.isdecimal() and int(port) < 65536):
            raise SettingsError(
                f"Setting address (--address) is {value!r}; allowed: host:port with a port from 0 to 65535."
            )
        options = {"host": host.strip("[]"), "port": port} | options
    return options


def _require_free(settings: Settings) -> None:
    """Raises PredictorError for a port that is taken, before the model is loaded."""
    from .server import taken

    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError:
            raise taken(settings.host, settings.port) from None


if __name__ == "__main__":
    sys.exit(main())
