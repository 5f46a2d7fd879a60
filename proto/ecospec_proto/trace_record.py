"""A short piece of a live answer with the experts that its rows really used, as one compact message of the trace stream.

Little-endian: a header (magic, schema version, MoE layers, top_k, rows, leading rows without routes, fingerprint of the
target, random id), then int32 tokens, positions and parents [rows], accepted bits [rows], lowest bit first, and int16 routes
[rows behind the leading ones, moe_layers, top_k]. Nothing that is read is trusted.
"""

from __future__ import annotations

import re
import struct

import numpy as np

from .geometry import TargetGeometry
from .trace_document import TraceDocument, TraceError, check_document

SCHEMA_VERSION = 1
MAX_ROWS = 4096
MAX_BYTES = 8 << 20
_MAGIC = b"EsTr"
_HEADER = struct.Struct("<4sHHHHI16s16s")
_ID = re.compile(r"[0-9a-f]{32}")


def encode_record(record: TraceDocument, geometry: TargetGeometry) -> bytes:
    """The id must be 32 hexadecimal digits: random ones lead back to no request. domain is not part of the message. Raises
    TraceError for a record that decode_record() would refuse."""
    check_document(record, geometry)
    if not _ID.fullmatch(record.document_id):
        raise TraceError(f"the record has id {record.document_id!r:.80}; 32 hexadecimal digits are needed.")
    if len(record.tokens) > MAX_ROWS:
        raise TraceError(f"the record has {len(record.tokens)} rows; at most {MAX_ROWS} are allowed: make it shorter.")
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
        raise TraceError(f"the record has {len(data)} bytes; at most {MAX_BYTES} are allowed: make it shorter.")
    return data


def decode_record(data: bytes, geometry: TargetGeometry, domain: str = "live") -> TraceDocument:
    """Inverse of encode_record, checked in full against geometry before memory is taken. Raises TraceError."""
    if not _HEADER.size < len(data) <= MAX_BYTES:
        raise TraceError(
            f"the record has {len(data)} bytes; more than {_HEADER.size} and at most {MAX_BYTES} are allowed."
        )
    magic, schema, layers, top_k, unrouted, rows, fingerprint, document_id = _HEADER.unpack_from(data)
    if magic != _MAGIC or schema != SCHEMA_VERSION:
        raise TraceError(
            f"the record begins with {magic!r}, schema {schema}; this release reads {_MAGIC!r}, schema {SCHEMA_VERSION}."
        )
    if fingerprint.hex() != geometry.fingerprint or (layers, top_k) != (geometry.moe_layers, geometry.top_k):
        raise TraceError(
            f"the record is of the target {fingerprint.hex()} with {layers} MoE layers and top_k {top_k}; this one is "
            f"{geometry.fingerprint} ({geometry.name}) with {geometry.moe_layers} and {geometry.top_k}."
        )
    if not 1 <= rows <= MAX_ROWS or unrouted > rows:
        raise TraceError(
            f"the record has {rows} rows, {unrouted} without routes; 1 to {MAX_ROWS} are allowed, and no more without."
        )
    expected = _HEADER.size + 12 * rows + -(-rows // 8) + 2 * (rows - unrouted) * layers * top_k
    if len(data) != expected:
        raise TraceError(f"the record has {len(data)} bytes; its {rows} rows need {expected}.")
    at = _HEADER.size
    tokens, positions, parents = np.frombuffer(data, "<i4", 3 * rows, at).astype(np.int32).reshape(3, rows)
    bits = np.frombuffer(data, np.uint8, -(-rows // 8), at + 12 * rows)
    routes = np.full((rows, layers, top_k), -1, np.int16)
    routes[unrouted:] = np.frombuffer(data, "<i2", offset=at + 12 * rows + len(bits)).reshape(-1, layers, top_k)
    accepted = np.unpackbits(bits, count=rows, bitorder="little").astype(bool)
    record = TraceDocument(document_id.hex(), domain, tokens, positions, parents, routes, accepted)
    check_document(record, geometry)
    return record
