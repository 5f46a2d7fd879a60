"""The trace stream's messages: what goes in comes out, and nothing broken comes in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_records import GEOMETRY, random_record

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument, TraceError
from ecospec_proto.trace_record import MAX_BYTES, MAX_ROWS, decode_record, encode_record


def same(a: TraceDocument, b: TraceDocument) -> bool:
    names = ("tokens", "positions", "parents", "routes", "accepted")
    arrays = all(
        getattr(a, n).dtype == getattr(b, n).dtype and np.array_equal(getattr(a, n), getattr(b, n)) for n in names
    )
    return arrays and a.document_id == b.document_id


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 60))
def test_what_goes_in_comes_out(seed: int, rows: int, unrouted: int) -> None:
    record = random_record(np.random.default_rng(seed), rows, min(rows, unrouted))
    data = encode_record(record, GEOMETRY)
    assert same(decode_record(data, GEOMETRY), record)
    assert decode_record(data, GEOMETRY).domain == "live"


def test_the_layout_is_the_documented_one() -> None:
    record = random_record(np.random.default_rng(5), rows=9, unrouted=4)
    data = encode_record(record, GEOMETRY)
    assert data[:4] == b"EsTr" and data[4:6] == b"\x01\x00"
    assert data[16:32].hex() == GEOMETRY.fingerprint and data[32:48].hex() == record.document_id
    assert data[48 : 48 + 36] == record.tokens.astype("<i4").tobytes()
    assert len(data) == 48 + 3 * 4 * 9 + 2 + 2 * 5 * GEOMETRY.moe_layers * GEOMETRY.top_k


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.data())
def test_changed_bytes_are_refused_or_still_a_valid_record(seed: int, data: st.DataObject) -> None:
    record = random_record(np.random.default_rng(seed), rows=12, unrouted=3)
    message = bytearray(encode_record(record, GEOMETRY))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode_record(bytes(message), GEOMETRY)
    except TraceError as error:
        assert "\n" not in str(error)
    else:  # what passes is valid: it can be sent again
        assert same(decode_record(encode_record(got, GEOMETRY), GEOMETRY), got)


@given(st.binary(max_size=200))
def test_any_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(TraceError):
        decode_record(data, GEOMETRY)


@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_a_truncated_or_longer_record_is_refused(seed: int, cut: int) -> None:
    data = encode_record(random_record(np.random.default_rng(seed), rows=10, unrouted=2), GEOMETRY)
    for other in (data[: cut % len(data)], data + b"\x00" * (1 + cut % 7)):
        with pytest.raises(TraceError, match="bytes"):
            decode_record(other, GEOMETRY)


def test_a_header_that_promises_much_takes_no_memory() -> None:
    message = bytearray(encode_record(random_record(np.random.default_rng(1), rows=4, unrouted=0), GEOMETRY))
    for rows, words in ((2**32 - 1, "1 to 4096"), (MAX_ROWS, "need"), (0, "0 rows")):
        message[12:16] = rows.to_bytes(4, "little")
        with pytest.raises(TraceError, match=words):
            decode_record(bytes(message), GEOMETRY)
    with pytest.raises(TraceError, match=str(MAX_BYTES)):
        decode_record(bytes(MAX_BYTES + 1), GEOMETRY)


@pytest.mark.parametrize("change", [{"revision": "other"}, {"moe_layers": 4}, {"experts": 64}, {"name": "other"}])
def test_another_target_is_refused_by_name(change: dict[str, Any]) -> None:
    data = encode_record(random_record(np.random.default_rng(2), rows=6, unrouted=1), GEOMETRY)
    with pytest.raises(TraceError, match=GEOMETRY.fingerprint):
        decode_record(data, TargetGeometry(**{**vars(GEOMETRY), **change}))


def _set(record: TraceDocument, name: str, at: Any, value: int) -> TraceDocument:
    column = getattr(record, name).copy()
    column[at] = value
    return replace(record, **{name: column})


@pytest.mark.parametrize(
    ("name", "at", "value", "words"),
    [
        ("tokens", 2, -1, "token id -1"),
        ("tokens", 2, GEOMETRY.vocab_size, "token id"),
        ("routes", (4, 0, 0), GEOMETRY.experts, "expert id"),
        ("routes", (4, 0, 0), -2, "expert id"),
        ("positions", 0, -3, "position"),
        ("positions", 3, 999, "one more than its parent's"),
        ("parents", 0, 0, "parent 0 in row 0"),
        ("parents", 3, 3, "parent 3 in row 3"),
        ("parents", 3, -1, "parent -1 in row 3"),
        ("accepted", 0, 0, "wrong order in row 0"),
    ],
)
def test_what_the_target_cannot_have_done_is_refused_on_both_sides(name: str, at: Any, value: int, words: str) -> None:
    good = random_record(np.random.default_rng(3), rows=8, unrouted=0)
    bad = _set(good, name, at, value)
    with pytest.raises(TraceError, match=words):
        encode_record(bad, GEOMETRY)
    offset = 48 + {"tokens": 0, "positions": 32, "parents": 64, "accepted": 96, "routes": 97}[name]
    message = bytearray(encode_record(good, GEOMETRY))
    column = getattr(bad, name)
    raw = np.packbits(column, bitorder="little").tobytes() if name == "accepted" else column.tobytes()
    message[offset : offset + len(raw)] = raw
    with pytest.raises(TraceError, match=words):
        decode_record(bytes(message), GEOMETRY)


def test_an_expert_named_twice_is_refused() -> None:
    record = random_record(np.random.default_rng(3), rows=8, unrouted=0)
    with pytest.raises(TraceError, match="twice in row 5, layer 1"):
        encode_record(_set(record, "routes", (5, 1), int(record.routes[5, 1, 0])), GEOMETRY)


def test_a_record_that_would_be_refused_is_not_sent() -> None:
    record = random_record(np.random.default_rng(4), rows=5, unrouted=0)
    with pytest.raises(TraceError, match="routes of dtype int32"):
        encode_record(replace(record, routes=record.routes.astype(np.int32)), GEOMETRY)
    with pytest.raises(TraceError, match="32 hexadecimal digits"):
        encode_record(replace(record, document_id="a-request"), GEOMETRY)
    with pytest.raises(TraceError, match="4097 rows"):
        encode_record(random_record(np.random.default_rng(4), rows=MAX_ROWS + 1, unrouted=MAX_ROWS), GEOMETRY)
    wide = TargetGeometry(**{**vars(GEOMETRY), "moe_layers": 600, "experts": 1000})
    routes = np.tile(np.arange(4, dtype=np.int16), (MAX_ROWS, 600, 1))
    chain = np.arange(MAX_ROWS, dtype=np.int32)
    long = TraceDocument("0" * 32, "", chain * 0, chain, chain - 1, routes, np.ones(MAX_ROWS, bool))
    with pytest.raises(TraceError, match="make it shorter"):
        encode_record(long, wide)
