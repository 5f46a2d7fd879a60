"""Router traces on disk: which experts a target really used for each token of a text, rejected draft tokens included.

A trace directory holds `shard-00000.safetensors`, `shard-00001.safetensors`, ... Each has the tensors of many documents
behind one another and a JSON sidecar of the same name, which is written last: a shard without one was never finished.
Nothing read is trusted: every size is checked against the sidecar, the geometry and the file before memory is taken.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from .geometry import TargetGeometry
from .trace_document import DTYPES, TraceDocument, TraceError, check_document, column_shape, document_id, row_bytes

__all__ = ["TraceDocument", "TraceError", "TraceReader", "TraceWriter", "check_document", "document_id"]

SCHEMA_VERSION = 1
MAX_SHARD_BYTES = 1 << 30
MAX_SHARD_DOCUMENTS = 32768
MAX_SIDECAR_BYTES = 16 << 20
MAX_HEADER_BYTES = 1 << 16
_SHARD = re.compile(r"shard-(\d{5})\.(safetensors|json)")


class TraceWriter:
    """Appends documents to a trace directory; a context manager that leaves only finished shards behind.

    geometry: the target that was traced; another one than the directory's is refused.
    source: what made the trace ("ecospec", "vllm", ...), told in every sidecar.
    max_shard_tokens: rows per shard; a longer document has a shard of its own. At most one shard is held in memory.
    Raises TraceError, also when another writer has the directory open.
    """

    def __init__(
        self, directory: str | Path, geometry: TargetGeometry, source: str, max_shard_tokens: int = 65536
    ) -> None:
        if max_shard_tokens < 1:
            raise TraceError(f"max_shard_tokens is {max_shard_tokens}; at least 1 is needed.")
        most = MAX_SHARD_BYTES // row_bytes(geometry)
        self.directory, self.geometry, self.source = Path(directory), geometry, source
        self._most, self._limit = most, min(max_shard_tokens, most)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = (self.directory / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clean()
            shards = TraceReader(self.directory, geometry)._shards if self._files() else []
        except BlockingIOError:
            self._lock.close()
            raise TraceError(f"{self.directory} is being written by another process; choose another one.") from None
        except BaseException:
            self._lock.close()
            raise
        self.document_ids: set[str] = {entry.document_id for shard in shards for entry in shard.entries}
        self._next = len(shards)
        self._pending: list[TraceDocument] = []
        self._rows = 0

    def _files(self) -> list[Path]:
        return [path for path in self.directory.iterdir() if _SHARD.fullmatch(path.name)]

    def _clean(self) -> None:
        """Removes what a writer that was killed left unfinished."""
        for path in self.directory.glob("shard-*.tmp"):
            path.unlink()
        for path in self._files():
            if path.suffix == ".safetensors" and not path.with_suffix(".json").exists():
                path.unlink()

    def add(self, document: TraceDocument) -> bool:
        """Takes a document unless one with its id is there already; True if it was taken. Raises TraceError."""
        if document.document_id in self.document_ids:
            return False
        rows = len(document.tokens)
        if rows > self._most:
            raise TraceError(
                f"document {document.document_id!r:.80} has {rows} rows; at most {self._most} are allowed."
            )
        check_document(document, self.geometry)
        if self._pending and (self._rows + rows > self._limit or len(self._pending) == MAX_SHARD_DOCUMENTS):
            self.flush()
        self._pending.append(document)
        self._rows += rows
        self.document_ids.add(document.document_id)
        return True

    def flush(self) -> None:
        """Writes what was added since the last shard as a shard, however short."""
        if not self._pending:
            return
        if self._next > 99999:
            raise TraceError(f"{self.directory} has 100000 shards; write into another directory.")
        path = self.directory / f"shard-{self._next:05d}.safetensors"
        columns = {name: np.concatenate([getattr(d, name) for d in self._pending]) for name in DTYPES}
        _write(path, save(columns))
        sidecar = {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "fingerprint": self.geometry.fingerprint,
            "geometry": asdict(self.geometry),
            "tokens": self._rows,
            "documents": [[d.document_id, d.domain, len(d.tokens)] for d in self._pending],
        }
        _write(path.with_suffix(".json"), json.dumps(sidecar, ensure_ascii=False).encode())
        self._next, self._pending, self._rows = self._next + 1, [], 0

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()  # after a failure too: what was added is whole
        finally:
            self._lock.close()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@dataclass(frozen=True)
class _Entry:
    document_id: str
    domain: str
    rows: int


@dataclass(frozen=True)
class _Shard:
    path: Path
    geometry: TargetGeometry
    source: str
    tokens: int
    entries: Sequence[_Entry]


class TraceReader:
    """The documents of a trace directory, one shard in memory at a time.

    Opening checks every sidecar and every shard's header; reading checks the contents of each document.
    geometry: the target that the reader needs; None takes whatever the traces are of.
    Raises TraceError for a directory without traces, a broken shard, or traces of another target.
    """

    def __init__(self, directory: str | Path, geometry: TargetGeometry | None = None) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise TraceError(f"{self.directory} is no directory; a trace directory is needed.")
        names = {match[0] for path in self.directory.iterdir() if (match := _SHARD.fullmatch(path.name))}
        if not names:
            raise TraceError(f"{self.directory} has no shard-*.safetensors; a trace directory is needed.")
        self._shards: list[_Shard] = []
        seen: set[str] = set()
        for number in range(1 + max(int(name[6:11]) for name in names)):
            path = self.directory / f"shard-{number:05d}.safetensors"
            for part in (path, path.with_suffix(".json")):
                if part.name not in names:
                    raise TraceError(f"{part} is missing; copy the directory again or go on with its collection.")
            shard = _read_sidecar(path)
            wanted = geometry or (self._shards[0].geometry if self._shards else shard.geometry)
            if shard.geometry != wanted:
                raise TraceError(f"{path} was traced on another target: {_difference(shard.geometry, wanted)}.")
            _check_header(shard)
            for entry in shard.entries:
                if entry.document_id in seen:
                    raise TraceError(f"{path} has document {entry.document_id!r:.80} again; each id may occur once.")
                seen.add(entry.document_id)
            self._shards.append(shard)
        self.geometry = self._shards[0].geometry
        self.sources = tuple(sorted({shard.source for shard in self._shards}))
        self.tokens = sum(shard.tokens for shard in self._shards)

    def __len__(self) -> int:
        return sum(len(shard.entries) for shard in self._shards)

    def __iter__(self) -> Iterator[TraceDocument]:
        return self.documents()

    def documents(self) -> Iterator[TraceDocument]:
        """All documents in the order in which they were written. Their arrays are views of one shard's."""
        for shard in self._shards:
            _check_header(shard)  # again: the file may have changed since
            try:
                columns = load_file(shard.path)
            except (SafetensorError, OSError, ValueError) as error:
                raise TraceError(f"{shard.path} cannot be read: {error}.") from None
            start = 0
            for entry in shard.entries:
                part = {name: columns[name][start : start + entry.rows] for name in DTYPES}
                document = TraceDocument(entry.document_id, entry.domain, **part)
                try:
                    check_document(document, shard.geometry)
                except TraceError as error:
                    raise TraceError(f"{shard.path}: {error}") from None
                yield document
                start += entry.rows


def _difference(found: TargetGeometry, wanted: TargetGeometry) -> str:
    pairs = [(f.name, getattr(found, f.name), getattr(wanted, f.name)) for f in fields(TargetGeometry)]
    return ", ".join(f"{name} is {have!r:.80}, {need!r:.80} is needed" for name, have, need in pairs if have != need)


def _parse(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as error:  # ValueError also: a number of thousands of digits
        raise TraceError(f"{path} holds no readable JSON where it must: {error}.") from None


def _read_sidecar(path: Path) -> _Shard:
    """path: the shard's tensors. Raises TraceError."""
    sidecar = path.with_suffix(".json")
    try:
        with sidecar.open("rb") as file:
            data = file.read(MAX_SIDECAR_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{sidecar} cannot be read: {error}.") from None
    if len(data) > MAX_SIDECAR_BYTES:
        raise TraceError(f"{sidecar} has more than {MAX_SIDECAR_BYTES} bytes; no sidecar is that large.")
    record = _parse(sidecar, data)
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version") if isinstance(record, dict) else None
        raise TraceError(f"{sidecar} has schema_version {version!r:.80}; {SCHEMA_VERSION} is needed.")
    try:
        geometry = TargetGeometry(**record["geometry"])
        entries = [_Entry(*document) for document in record["documents"]]
        shard = _Shard(path, geometry, record["source"], record["tokens"], entries)
        fingerprint = record["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{sidecar} is no trace sidecar: {error}.") from None
    if not (isinstance(shard.source, str) and isinstance(geometry.name, str) and isinstance(geometry.revision, str)):
        raise TraceError(f"{sidecar} is no trace sidecar: source, name and revision must be text.")
    if fingerprint != geometry.fingerprint:
        raise TraceError(f"{sidecar} has fingerprint {fingerprint!r:.80}; its geometry has {geometry.fingerprint}.")
    counts = [entry.rows for entry in entries]
    if not counts or len(counts) > MAX_SHARD_DOCUMENTS or not all(type(n) is int and n > 0 for n in counts):
        raise TraceError(f"{sidecar} lists no, too many or empty documents; 1 to {MAX_SHARD_DOCUMENTS} are allowed.")
    if any(not isinstance(entry.document_id, str) for entry in entries):
        raise TraceError(f"{sidecar} has a document id that is no text.")
    most = MAX_SHARD_BYTES // row_bytes(geometry)
    if type(shard.tokens) is not int or shard.tokens != sum(counts) or shard.tokens > most:
        raise TraceError(
            f"{sidecar} claims {shard.tokens!r:.80} tokens; the sum of its documents, at most {most}, is needed."
        )
    return shard


def _check_header(shard: _Shard) -> None:
    """Raises TraceError unless the file's header and size are those of the sidecar. Reads the header only."""
    path = shard.path
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise TraceError(
                    f"{path} claims a header of {length} bytes in a file of {size}; at most {MAX_HEADER_BYTES} within "
                    "the file is allowed."
                )
            data = file.read(length)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error}.") from None
    header = _parse(path, data)
    if not isinstance(header, dict) or header.keys() - {"__metadata__"} != DTYPES.keys():
        raise TraceError(f"{path} holds other tensors than {', '.join(DTYPES)}; exactly these are needed.")
    for name, (kind, _) in DTYPES.items():
        entry, shape = header[name], list(column_shape(name, shard.tokens, shard.geometry))
        if not isinstance(entry, dict) or entry.get("dtype") != kind or entry.get("shape") != shape:
            found = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else entry
            raise TraceError(f"{path} has {name} as {found!r:.80}; ({kind!r}, {shape}) is needed.")
    expected = 8 + length + shard.tokens * row_bytes(shard.geometry)
    if size != expected:
        raise TraceError(f"{path} has {size} bytes; its header and sidecar need {expected}.")
