"""Sampled traces on their way out of the executor's process: a folder of small files, one record each.

A file appears whole or not at all; whoever takes it removes it. When nobody takes them, new records are dropped and counted.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument, TraceError
from ecospec_proto.trace_record import MAX_BYTES, decode_record

logger = logging.getLogger(__name__)

MAX_FILES = 256
_SUFFIX = ".record"


class TraceSpool:
    """The writing end. dropped: records that found the folder full, or could not be written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self.dropped = 0

    def put(self, record: bytes) -> None:
        """record: as ecospec_proto.trace_record.encode_record makes it. Never raises for want of room."""
        try:
            if len(list(self._folder.glob("*" + _SUFFIX))) >= MAX_FILES:
                raise OSError(f"{self._folder} holds {MAX_FILES} records that nobody took")
            name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
            temporary = self._folder / (name + ".tmp")
            temporary.touch(mode=0o600)
            temporary.write_bytes(record)
            temporary.replace(self._folder / (name + _SUFFIX))
        except OSError as error:
            if not self.dropped:
                logger.warning("A sampled trace is dropped, and those that follow like it: %s.", error)
            self.dropped += 1


def take_records(folder: Path, geometry: TargetGeometry) -> Iterator[TraceDocument]:
    """The records in the folder, oldest first; each is removed. One that breaks the format is logged and removed."""
    for path in sorted(folder.glob("*" + _SUFFIX)):
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        path.unlink()
        try:
            yield decode_record(data, geometry)
        except TraceError as error:
            logger.warning("A sampled trace is left out: %s", error)
