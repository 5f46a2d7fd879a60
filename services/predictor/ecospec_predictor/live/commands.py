"""The commands publish, versions and collect-stream of `ecospec-predictor`."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.predictor_version import PredictorVersion
from ecospec_proto.shared_state import ALLOWED, StateStoreError, StoreAddress, connect

from ..errors import PredictorError, SettingsError
from ..settings import PREFIX

TIMEOUT_SECONDS = 10.0
URL, PASSWORD = f"{PREFIX}STATE_STORE_URL", f"{PREFIX}STATE_STORE_PASSWORD"


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "make a trained model the current version of its target in the state store"
    publish = commands.add_parser("publish", help=text, description=text)
    publish.add_argument(
        "--model-dir", type=Path, required=True, help="a directory written by the predictor's training"
    )
    publish.add_argument("--location", help="where the predictors find this directory (default: its own absolute path)")
    text = "list what was published, the current version of each target first"
    versions = commands.add_parser("versions", help=text, description=text)
    versions.add_argument("--fingerprint", help="of one target (default: all)")
    text = "add the live routes in the state store to a trace directory, on which `train` can go on"
    collect = commands.add_parser("collect-stream", help=text, description=text)
    collect.add_argument(
        "--model-dir", type=Path, required=True, help="a predictor of the target whose routes are wanted"
    )
    collect.add_argument("--out", type=Path, required=True, help="the trace directory; what is there already stays")
    collect.add_argument("--limit", type=_positive, help="newest records to look at (default: all)")
    runs: list[tuple[argparse.ArgumentParser, Any]] = [
        (publish, run_publish),
        (versions, run_versions),
        (collect, run_collect),
    ]
    for parser, run in runs:
        parser.add_argument(
            "--state-store", help=f"{ALLOWED} (variable {URL}; a password is better given by {PASSWORD})"
        )
        parser.set_defaults(run=run)


def run_publish(options: argparse.Namespace) -> None:
    """Raises PredictorError."""
    from . import registry

    address = _address(options.state_store)
    entry = registry.describe(options.model_dir, options.location)
    _with_store(address, lambda client: registry.publish(client, entry))
    print(f"Version {entry.version} in {entry.location} is now current for the target {entry.fingerprint}.")


def run_versions(options: argparse.Namespace) -> None:
    """Raises PredictorError."""
    from . import registry

    def read(client: Any) -> list[tuple[str, list[PredictorVersion]]]:
        wanted = [options.fingerprint] if options.fingerprint else registry.targets(client)
        return [(fingerprint, registry.versions(client, fingerprint)) for fingerprint in wanted]

    found = _with_store(_address(options.state_store), read)
    if not any(entries for _, entries in found):
        print("Nothing is published.")
    for fingerprint, entries in found:
        for at, entry in enumerate(entries):
            print(line(fingerprint, entry, at == 0))


def run_collect(options: argparse.Namespace) -> None:
    """Raises PredictorError and TraceError."""
    from .registry import geometry_in

    geometry = geometry_in(options.model_dir)
    added = add_live_routes(geometry, options.out, options.state_store, options.limit)
    print(f"{added} new records of {geometry.name} are in {options.out}.")


def add_live_routes(
    geometry: TargetGeometry, traces: Path, state_store: str | None = None, limit: int | None = None
) -> int:
    """Adds the newest records of the state store (None: the one that the environment names) to a trace directory; returns how
    many were new. Raises PredictorError and TraceError."""
    from .stream_source import collect_stream

    _address(state_store)
    try:
        return collect_stream(_url(state_store), geometry, traces, limit, _password())
    except StateStoreError as error:
        raise PredictorError(str(error)) from None


def line(fingerprint: str, entry: PredictorVersion, current: bool) -> str:
    when = datetime.fromtimestamp(entry.published_seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    figures = ", ".join(f"{name} {value:.4g}" for name, value in entry.figures.items() if "accuracy" in name)
    mark = "current" if current else "before "
    return f"{fingerprint}  {mark}  {entry.version}  {when}  {entry.location}  {figures}".rstrip()


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a whole number of at least 1 is")
    return int(text)


def _url(given: str | None) -> str:
    return given if given is not None else os.environ.get(URL, "")


def _password() -> str:
    return os.environ.get(PASSWORD, "")


def _address(given: str | None) -> StoreAddress:
    try:
        return StoreAddress.parse(_url(given), _password())
    except ValueError as error:
        shown = "a secret" if _url(given) else "missing"
        raise SettingsError(f"Setting state_store_url (--state-store, {URL}) is {shown}; {error}.") from None


def _with_store(address: StoreAddress, work: Any) -> Any:
    from redis.exceptions import RedisError

    try:
        with connect(address, TIMEOUT_SECONDS) as client:
            return work(client)
    except (RedisError, OSError) as error:
        raise PredictorError(f"The state store at {address} cannot be used: {error}") from None
