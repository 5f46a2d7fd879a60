"""What verify steps did, from the executor's process to the orchestrator's: a ring of rows in a file that both map.

One writer, one reader, no locks: the writer counts rows after it has written them, and the reader drops what may have been overwritten
while it read. Little-endian: a header (magic, version, MoE layers, draft levels, slots, rows ever written), then int32 rows [slots,
3 + draft levels + 1 + MoE layers]: requests, rows, tokens emitted, requests by accepted drafts, distinct experts by layer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HEADER = struct.Struct("<4sHHHxxIQ")
_MAGIC, _VERSION = b"EsSt", 1
_COUNT_AT = _HEADER.size - 8
MAX_SLOTS, MAX_LEVELS = 1 << 16, 256
FIXED = 3  # columns before the histogram


class StepFileError(ValueError):
    """A file that is none of ours, or of another layout; one sentence."""


@dataclass(frozen=True)
class StepShape:
    moe_layers: int
    levels: int  # most drafts that can be accepted in a step
    slots: int = 4096

    @property
    def width(self) -> int:
        return FIXED + self.levels + 1 + self.moe_layers

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + 4 * self.slots * self.width


@dataclass(frozen=True)
class StepCounts:
    """One verify step, rows that pad its batch left out. rows: roots and draft nodes; emitted: tokens; accepted: int32
    [levels + 1], requests by accepted drafts; distinct_experts: int32 [moe_layers]."""

    requests: int
    rows: int
    emitted: int
    accepted: np.ndarray
    distinct_experts: np.ndarray

    @staticmethod
    def of(row: np.ndarray, shape: StepShape) -> StepCounts:
        requests, rows, emitted = row[:FIXED].tolist()
        cut = FIXED + shape.levels + 1
        return StepCounts(requests, rows, emitted, row[FIXED:cut].copy(), row[cut:].copy())


class StepWriter:
    def __init__(self, path: Path, shape: StepShape) -> None:
        """Makes the file, readable by this user only. Raises OSError."""
        self._shape = shape
        temporary = path.with_name(path.name + ".tmp")
        temporary.touch(mode=0o600)
        with temporary.open("r+b") as file:
            file.truncate(shape.file_bytes)
            file.write(_HEADER.pack(_MAGIC, _VERSION, shape.moe_layers, shape.levels, shape.slots, 0))
        temporary.replace(path)
        self._count = np.memmap(path, "<u8", "r+", _COUNT_AT, (1,))
        self._rows = np.memmap(path, "<i4", "r+", _HEADER.size, (shape.slots, shape.width))

    def append(self, row: np.ndarray) -> None:
        """row: int32 [shape.width]."""
        written = int(self._count[0])
        self._rows[written % self._shape.slots] = row
        self._count[0] = written + 1


class StepReader:
    def __init__(self, path: Path) -> None:
        """Raises StepFileError."""
        try:
            with path.open("rb") as file:
                head = file.read(_HEADER.size)
            size = path.stat().st_size
        except OSError as error:
            raise StepFileError(f"{path} cannot be read: {error}.") from None
        if len(head) < _HEADER.size:
            raise StepFileError(f"{path} has {len(head)} bytes; a header of {_HEADER.size} is needed.")
        magic, version, layers, levels, slots, _ = _HEADER.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION) or not 1 <= slots <= MAX_SLOTS or levels > MAX_LEVELS:
            raise StepFileError(
                f"{path} begins with {magic!r}, version {version}, {slots} slots, {levels} levels; {_MAGIC!r}, {_VERSION}, at "
                f"most {MAX_SLOTS} and {MAX_LEVELS} are needed."
            )
        self.shape = StepShape(layers, levels, slots)
        if size != self.shape.file_bytes:
            raise StepFileError(f"{path} has {size} bytes; its header needs {self.shape.file_bytes}.")
        self._count = np.memmap(path, "<u8", "r", _COUNT_AT, (1,))
        self._rows = np.memmap(path, "<i4", "r", _HEADER.size, (slots, self.shape.width))
        self._next = int(self._count[0])
        self.missed = 0  # rows that were overwritten before they were read

    def poll(self) -> Iterator[StepCounts]:
        """The steps since the last poll, or since the reader was made, oldest first."""
        written, slots = int(self._count[0]), self.shape.slots
        first = max(self._next, written - slots)
        rows = np.array(self._rows[np.arange(first, written) % slots])
        # Of the rows counted by now, the oldest may be under the writer's hand, and older ones are gone.
        kept = min(written, max(first, int(self._count[0]) - slots + 1))
        self.missed += kept - self._next
        self._next = written
        for row in rows[kept - first :]:
            yield StepCounts.of(row, self.shape)
