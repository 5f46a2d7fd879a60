"""Responses out of files, one at a time, with progress."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ecospec_proto.traces import TraceDocument, TraceError

from .importers import IMPORTERS
from .recorder import from_sglang_recorder, load_recording
from .target import Target

MAX_RECORD_BYTES = 256 << 20  # one line of a .jsonl, or a .json file
RECORDER = "sglang-recorder"


def documents_of(
    paths: Sequence[Path], engine: str, target: Target, domain: str, progress: tqdm[Any]
) -> Iterator[TraceDocument | TraceError]:
    """The documents of all files, and an error in place of those of a record that has none, naming file and line. progress
    counts bytes."""
    for path in paths:
        done, size = 0, path.stat().st_size
        for where, read, value in _records(path, engine):
            try:
                if isinstance(value, TraceError):
                    raise value
                found = from_sglang_recorder(value, target, domain) if engine == RECORDER else None
                yield from found if found is not None else IMPORTERS[engine](value, target, domain)
            except TraceError as error:
                yield TraceError(f"{where}: {error}")
            progress.update(read)
            done += read
        progress.update(size - done)


def _records(path: Path, engine: str) -> Iterator[tuple[str, int, Any]]:
    """Where it is, bytes read for it, and the parsed record, or a TraceError in its place."""
    if engine == RECORDER:
        try:
            yield str(path), 0, load_recording(path)
        except TraceError as error:
            yield str(path), 0, error
    elif path.suffix == ".json":
        with path.open("rb") as file:
            data = file.read(MAX_RECORD_BYTES + 1)
        value = _parse(data)
        many = value if isinstance(value, list) else [value]
        for number, record in enumerate(many, start=1):
            yield f"{path}, response {number}" if len(many) > 1 else str(path), len(data) // len(many), record
    else:
        yield from _lines(path)


def _lines(path: Path) -> Iterator[tuple[str, int, Any]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number, read = number + 1, len(line)
            value = _parse(line) if line.strip() else None
            while not line.endswith(b"\n") and (line := file.readline(MAX_RECORD_BYTES)):  # the rest of one too long
                read += len(line)
            if value is not None:
                yield f"{path}, line {number}", read, value


def _parse(data: bytes) -> Any:
    """A TraceError for what cannot be parsed."""
    if len(data) > MAX_RECORD_BYTES:
        return TraceError(f"it has more than {MAX_RECORD_BYTES} bytes; write one response per line.")
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as error:
        return TraceError(f"it is no JSON: {error}.")
