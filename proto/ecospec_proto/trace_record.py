"""A short piece of a live answer with the experts that its rows really used, as one compact message of the trace stream.

Little-endian: a header (magic, schema version, MoE layers, top_k, rows, leading rows without routes, fingerprint of the
target, random id), then int32 tokens, positions and parents [rows], accepted bits [rows], lowest bit first, and int16 routes
[rows behind the leading ones, moe_layers, top_k]. Nothing that is read is trusted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .geometry import TargetGeometry

SCHEMA_VERSION = 1
MAX_ROWS = 4096
MAX_BYTES = 8 << 20
MAX_EXPERTS = 32768  # int16 routes
_MAGIC = b"EsTr"
_HEADER = struct.Struct("<4sHHHHI16s16s")


class TraceRecordError(ValueError):
    """A record that breaks the format, or belongs to another target; the text is one sentence."""


@dataclass(frozen=True)
class TraceRecord:
    """T rows. Accepted rows are a chain in the order of the text; rejected draft rows hang from earlier rows. The fields are
    those of a router trace's document, so that one becomes the other.

    document_id  32 hexadecimal digits, random, so that it leads back to no request
    tokens       int32 [T], token ids
    positions    int32 [T], position in the text: one more than the parent's
    parents      int32 [T], the row that a row follows, below its own; -1 for the first row only
    routes       int16 [T, moe_layers, top_k], logical expert ids without repeats, -1 where unknown
    accepted     bool [T], False for a draft token that the target rejected
    """

    document_id: str
    domain: str
    tokens: np.ndarray
    positions: np.ndarray
    parents: np.ndarray
    routes: np.ndarray
    accepted: np.ndarray


def encode_record(record: TraceRecord, geometry: TargetGeometry) -> bytes:
    """Raises TraceRecordError for a record that decode_record() would refuse. domain is not part of the message."""
    check_record(record, geometry)
    routed = np.flatnonzero((record.routes >= 0).any((1, 2)))
    unrouted = int(routed[0]) if len(routed) else len(record.tokens)
    header = _HEADER.pack(
        _MAGIC,
        SCHEMA_VERSION,
        geometry.moe_layers,
        geometry.top_k,
        unrouted,
        len(record.tokens),
        bytes.fromhex(geometry.fingerprint),
        bytes.fromhex(record.document_id),
    )
    columns = [np.asarray(c, "<i4").tobytes() for c in (record.tokens, record.positions, record.parents)]
    accepted = np.packbits(record.accepted, bitorder="little").tobytes()
    data = b"".join([header, *columns, accepted, np.asarray(record.routes[unrouted:], "<i2").tobytes()])
    if len(data) > MAX_BYTES:
        raise TraceRecordError(f"the record has {len(data)} bytes; at most {MAX_BYTES} are allowed: make it shorter.")
    return data


def decode_record(data: bytes, geometry: TargetGeometry, domain: str = "live") -> TraceRecord:
    """Inverse of encode_record, checked in full against geometry before memory is taken. Raises TraceRecordError."""
    if not _HEADER.size < len(data) <= MAX_BYTES:
        raise TraceRecordError(
            f"the record has {len(data)} bytes; more than {_HEADER.size} and at most {MAX_BYTES} are allowed."
        )
    magic, schema, layers, top_k, unrouted, rows, fingerprint, document_id = _HEADER.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA_VERSION:
        raise TraceRecordError(
            f"the record begins with {magic!r}, schema {schema}; this release reads {_MAGIC!r}, schema {SCHEMA_VERSION}."
        )
    if fingerprint.hex() != geometry.fingerprint or (layers, top_k) != (geometry.moe_layers, geometry.top_k):
        raise TraceRecordError(
            f"the record is of the target {fingerprint.hex()} with {layers} MoE layers and top_k {top_k}; this one is "
            f"{geometry.fingerprint} ({geometry.name}) with {geometry.moe_layers} and {geometry.top_k}."
        )
    if not 1 <= rows <= MAX_ROWS or unrouted > rows:
        raise TraceRecordError(
            f"the record has {rows} rows, {unrouted} without routes; 1 to {MAX_ROWS} are allowed, and no more without."
        )
    expected = _HEADER.size + 12 * rows + -(-rows // 8) + 2 * (rows - unrouted) * layers * top_k
    if len(data) != expected:
        raise TraceRecordError(f"the record has {len(data)} bytes; its {rows} rows need {expected}.")
    at = _HEADER.size
    tokens, positions, parents = np.frombuffer(data, "<i4", 3 * rows, at).astype(np.int32).reshape(3, rows)
    bits = np.frombuffer(data, np.uint8, -(-rows // 8), at + 12 * rows)
    routes = np.full((rows, layers, top_k), -1, np.int16)
    routes[unrouted:] = np.frombuffer(data, "<i2", offset=at + 12 * rows + len(bits)).reshape(-1, layers, top_k)
    accepted = np.unpackbits(bits, count=rows, bitorder="little").astype(bool)
    record = TraceRecord(document_id.hex(), domain, tokens, positions, parents, routes, accepted)
    check_record(record, geometry)
    return record


def check_record(record: TraceRecord, geometry: TargetGeometry) -> None:
    """Raises TraceRecordError for a record that breaks the format, or that geometry cannot have produced."""
    if geometry.experts > MAX_EXPERTS:
        raise TraceRecordError(f"the target has {geometry.experts} experts; a record holds ids below {MAX_EXPERTS}.")
    rows = len(record.tokens)
    if not 1 <= rows <= MAX_ROWS:
        raise TraceRecordError(f"the record has {rows} rows; 1 to {MAX_ROWS} are allowed.")
    shapes: dict[str, tuple[type[Any], tuple[int, ...]]] = {
        "tokens": (np.int32, (rows,)),
        "positions": (np.int32, (rows,)),
        "parents": (np.int32, (rows,)),
        "routes": (np.int16, (rows, geometry.moe_layers, geometry.top_k)),
        "accepted": (np.bool_, (rows,)),
    }
    for name, (dtype, shape) in shapes.items():
        column = getattr(record, name)
        if column.dtype != dtype or column.shape != shape:
            raise TraceRecordError(
                f"the record has {name} of dtype {column.dtype} and shape {column.shape}; "
                f"{np.dtype(dtype)} and {shape} are needed."
            )
    _check_range("a token id", record.tokens, 0, geometry.vocab_size - 1)
    _check_range("an expert id", record.routes, -1, geometry.experts - 1)
    _check_range("a position", record.positions, 0, 2**31 - 2)
    _check_tree(record.parents, record.positions, record.accepted)
    routed = np.flatnonzero((record.routes >= 0).any((1, 2)))
    ordered = np.sort(record.routes[routed], axis=2)
    repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if repeated.any():
        at, layer, _ = np.argwhere(repeated)[0]
        row = routed[at]
        raise TraceRecordError(f"the record names an expert twice in row {row}, layer {layer}; the ids must differ.")


def _check_range(what: str, values: np.ndarray, low: int, high: int) -> None:
    if int(values.min()) < low or int(values.max()) > high:
        bad = values[(values < low) | (values > high)].flat[0]
        raise TraceRecordError(f"the record has {what} of {bad}; {low} to {high} is allowed.")


def _check_tree(parents: np.ndarray, positions: np.ndarray, accepted: np.ndarray) -> None:
    rows = np.arange(len(parents))
    wrong = (parents < 0) | (parents >= rows)
    wrong[0] = parents[0] != -1
    if wrong.any():
        row = int(wrong.argmax())
        raise TraceRecordError(
            f"the record has parent {parents[row]} in row {row}; -1 in the first row, then an earlier row is allowed."
        )
    wrong[1:] = positions[1:] != positions[parents[1:]] + 1
    if wrong.any():
        row = int(wrong.argmax())
        raise TraceRecordError(
            f"the record has position {positions[row]} in row {row}; one more than its parent's is needed."
        )
    chain = rows[accepted]
    if not accepted[0] or (parents[chain[1:]] != chain[:-1]).any():
        raise TraceRecordError(
            "the record's accepted rows are no chain; the first row must be accepted, and every accepted row must follow the "
            "accepted row before it."
        )
