"""Trace directories: round trips, going on where a writer stopped, and every way in which a file can lie."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument, TraceError, TraceReader, TraceWriter, document_id

GEOMETRY = TargetGeometry("tiny", "r1", vocab_size=100, hidden_size=16, moe_layers=3, experts=8, top_k=2)


def make_document(seed: int, rows: int = 7, rejected: int = 2, geometry: TargetGeometry = GEOMETRY) -> TraceDocument:
    """A chain of accepted rows with rejected rows that hang from random rows behind it."""
    rng = np.random.default_rng(seed)
    parents = np.arange(-1, rows - 1).tolist()
    for _ in range(rejected):
        parents.append(int(rng.integers(0, len(parents))))
    positions = [0]
    for parent in parents[1:]:
        positions.append(positions[parent] + 1)
    total = rows + rejected
    shape = (total, geometry.moe_layers)
    routes = np.argsort(rng.random((*shape, geometry.experts)), axis=2)[..., : geometry.top_k].astype(np.int16)
    routes[rng.random(shape) < 0.2] = -1
    routes[rng.random(routes.shape) < 0.1] = -1
    return TraceDocument(
        document_id=f"d{seed}",
        domain="code" if seed % 2 else "",
        tokens=rng.integers(0, geometry.vocab_size, total).astype(np.int32),
        positions=np.array(positions, np.int32),
        parents=np.array(parents, np.int32),
        routes=routes,
        accepted=np.arange(total) < rows,
    )


def same(a: TraceDocument, b: TraceDocument) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)


def write(directory: Path, seeds: range, **options: Any) -> list[TraceDocument]:
    documents = [make_document(seed, rows=1 + seed % 9) for seed in seeds]
    with TraceWriter(directory, GEOMETRY, "test", **options) as writer:
        assert all([writer.add(document) for document in documents])
    return documents


def test_documents_survive_the_disk_in_order_and_shards_stay_small(tmp_path: Path) -> None:
    documents = write(tmp_path, range(40), max_shard_tokens=30)
    reader = TraceReader(tmp_path, GEOMETRY)
    assert all(same(*pair) for pair in zip(reader, documents, strict=True))
    assert len(reader) == 40 and reader.tokens == sum(len(d.tokens) for d in documents)
    assert reader.geometry == GEOMETRY and reader.sources == ("test",)
    sidecars = [json.loads(path.read_text()) for path in tmp_path.glob("shard-*.json")]
    assert len(sidecars) > 5 and all(sidecar["tokens"] <= 30 for sidecar in sidecars)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_text_longer_than_a_shard_has_its_own(tmp_path: Path) -> None:
    long = make_document(5, rows=50)
    with TraceWriter(tmp_path, GEOMETRY, "test", max_shard_tokens=10) as writer:
        writer.add(make_document(1))
        writer.add(long)
        writer.add(make_document(2))
    assert [len(d.tokens) for d in TraceReader(tmp_path)] == [9, 52, 9]


def test_a_second_writer_goes_on_behind_the_first_and_skips_what_is_there(tmp_path: Path) -> None:
    first = write(tmp_path, range(10), max_shard_tokens=30)
    with TraceWriter(tmp_path, GEOMETRY, "other") as writer:
        assert writer.document_ids == {d.document_id for d in first}
        assert not writer.add(first[3])
        assert writer.add(make_document(77)) and not writer.add(make_document(77))
    reader = TraceReader(tmp_path)
    assert [d.document_id for d in reader] == [f"d{n}" for n in range(10)] + ["d77"]
    assert reader.sources == ("other", "test")


def test_what_a_killed_writer_left_is_written_again(tmp_path: Path) -> None:
    write(tmp_path, range(4), max_shard_tokens=10)
    last = max(tmp_path.glob("shard-*.json"))
    last.rename(last.with_name(last.name + ".tmp"))  # killed between the tensors and the sidecar
    with pytest.raises(TraceError, match=f"{last.name} is missing"):
        TraceReader(tmp_path)
    with TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        assert "d3" not in writer.document_ids
        writer.add(make_document(3, rows=4))
    assert [d.document_id for d in TraceReader(tmp_path)] == ["d0", "d1", "d2", "d3"]


def test_a_failure_in_the_middle_keeps_what_was_added(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        writer.add(make_document(1))
        raise KeyboardInterrupt
    assert len(TraceReader(tmp_path)) == 1


def test_two_writers_at_once_and_another_target_are_refused(tmp_path: Path) -> None:
    other = replace(GEOMETRY, revision="r2")
    with TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        writer.add(make_document(1))
        with pytest.raises(TraceError, match="another process"):
            TraceWriter(tmp_path, GEOMETRY, "test")
    for opening in (lambda: TraceReader(tmp_path, other), lambda: TraceWriter(tmp_path, other, "test")):
        with pytest.raises(TraceError, match="revision is 'r1', 'r2' is needed"):
            opening()
    with TraceWriter(tmp_path, GEOMETRY, "test"):  # the refused writer let go of the lock
        pass


def test_the_id_of_a_text_is_stable() -> None:
    assert document_id([1, 2, 3]) == document_id(np.array([1, 2, 3], np.int64)) == "4636993d3e1da4e9d6b8f87b79e8f7c6"
    assert document_id([1, 2, 3]) != document_id([1, 2, 4])


def changed(**columns: Any) -> TraceDocument:
    return replace(make_document(1), **columns)


def with_value(column: str, at: Any, value: Any) -> TraceDocument:
    array = getattr(make_document(1), column).copy()
    array[at] = value
    return changed(**{column: array})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(routes=np.full((9, 3, 2), np.nan, np.float32)), "routes of dtype float32; int16 is needed"),
        (changed(tokens=np.zeros(9, np.int64)), "tokens of dtype int64; int32"),
        (changed(routes=np.zeros((9, 2, 3), np.int16)), r"routes of shape \(9, 2, 3\); \(9, 3, 2\)"),
        (changed(accepted=np.ones(8, bool)), r"accepted of shape \(8,\)"),
        (changed(document_id="../up"), "no usable id"),
        (changed(domain="a\nb"), "domain"),
        (with_value("tokens", 3, 100), "token id 100; 0 to 99"),
        (with_value("tokens", 3, -1), "token id -1"),
        (with_value("routes", (2, 1, 0), 8), "expert id 8; -1 to 7"),
        (with_value("routes", (2, 1, 0), -2), "expert id -2"),
        (with_value("routes", (2, 1), 5), "twice in row 2, layer 1"),
        (with_value("routes", (8, 2), 0), "twice in row 8, layer 2"),
        (with_value("parents", 2, 2), "parent 2 in row 2; 0 to 1"),
        (with_value("parents", 2, -1), "parent -1 in row 2"),
        (with_value("parents", 0, 0), "parent 0 in row 0; -1 is needed"),
        (with_value("positions", 2, 5), "position 5 in row 2"),
        (with_value("accepted", 0, False), "wrong order in row 0"),
        (with_value("accepted", 3, False), "wrong order in row 4"),
        (changed(**{
            name: getattr(make_document(1), name)[:0] for name in ("tokens", "positions", "parents", "routes", "accepted")
        }), "no rows"),
    ],
)  # fmt: skip
def test_a_wrong_document_is_refused_by_name_and_leaves_the_writer_usable(
    tmp_path: Path, document: TraceDocument, message: str
) -> None:
    with TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        with pytest.raises(TraceError, match=message):
            writer.add(document)
        writer.add(make_document(1))
    assert len(TraceReader(tmp_path)) == 1


def edit_sidecar(**changes: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "shard-00000.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def edit_tensors(**changes: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "shard-00000.safetensors"
        columns = load_file(path)
        save_file({name: changes.get(name, lambda c: c)(column) for name, column in columns.items()}, path)

    return damage


def edit_bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def claim_huge_header(directory: Path) -> None:
    """Sizes of a petabyte in header and sidecar, in a file of a few bytes: memory must not follow the claim."""
    rows = 1 << 40
    columns = {"tokens": "I32", "positions": "I32", "parents": "I32", "routes": "I16", "accepted": "BOOL"}
    header = {
        name: {"dtype": kind, "shape": [rows, 3, 2] if name == "routes" else [rows], "data_offsets": [0, rows]}
        for name, kind in columns.items()
    }
    text = json.dumps(header).encode()
    (directory / "shard-00000.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    edit_sidecar(tokens=rows, documents=[["d0", "", rows]])(directory)


def sparse_file(directory: Path) -> None:
    with (directory / "shard-00000.safetensors").open("r+b") as file:
        file.truncate(1 << 40)


def set_value(at: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(column: np.ndarray) -> np.ndarray:
        column = column.copy()
        column[at] = value
        return column

    return change


SHARD, SIDECAR = "shard-00000.safetensors", "shard-00000.json"
HUGE = dict(name="t", revision="r", vocab_size=9, hidden_size=9, moe_layers=10**30, experts=10, top_k=9)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_bytes(SHARD, lambda data: data[:-1]), "safetensors has .* bytes; its header and sidecar need"),
        (edit_bytes(SHARD, lambda data: data + b"\0"), "bytes; its header and sidecar need"),
        (edit_bytes(SHARD, lambda data: data[:50]), "claims a header of"),
        (edit_bytes(SHARD, lambda data: b""), "claims a header of 0 bytes"),
        (edit_bytes(SHARD, lambda data: struct.pack("<Q", 2**63) + data[8:]), "claims a header of 9223372036854775808"),
        (edit_bytes(SHARD, lambda data: data[:8] + b"\xff" + data[9:]), "no readable JSON"),
        (edit_bytes(SIDECAR, lambda data: data[:-9]), "json holds no readable JSON"),
        (edit_bytes(SIDECAR, lambda data: b"[" * 200_000), "json holds no readable JSON"),
        (edit_bytes(SIDECAR, lambda data: b"[]"), "schema_version None; 1 is needed"),
        (edit_bytes(SIDECAR, lambda data: data + b" " * (17 << 20)), "no sidecar is that large"),
        (edit_sidecar(schema_version=2), "schema_version 2; 1 is needed"),
        (edit_sidecar(fingerprint="0" * 32), "fingerprint '0000"),
        (edit_sidecar(geometry=HUGE), "fingerprint"),
        (
            edit_sidecar(geometry=HUGE, fingerprint=TargetGeometry(**HUGE).fingerprint),  # type: ignore[arg-type]
            "moe_layers 10+; a trace holds at most 4096",
        ),
        (edit_sidecar(geometry={"name": "t"}), "no trace sidecar"),
        (edit_sidecar(source=3), "must be text"),
        (edit_sidecar(tokens=8), "claims 8 tokens"),
        (edit_sidecar(tokens=1e300), "claims 1e\\+300 tokens"),
        (edit_sidecar(documents=[]), "lists no, too many or empty documents"),
        (edit_sidecar(documents=[["d0", "", -9]], tokens=-9), "lists no, too many or empty documents"),
        (edit_sidecar(documents=[["d0", ""]]), "no trace sidecar"),
        (edit_sidecar(documents=[["d0", "", 4], ["d0", "", 5]]), "document 'd0' again"),
        (claim_huge_header, "claims 1099511627776 tokens"),
        (sparse_file, "has 1099511627776 bytes"),
        (edit_tensors(routes=lambda c: np.full(c.shape, np.nan, np.float32)), "routes as .*F32"),
        (edit_tensors(routes=lambda c: np.full(c.shape, np.nan, np.float16)), "routes as .*F16"),
        (edit_tensors(tokens=lambda c: c[:-1]), "tokens as"),
        (edit_tensors(tokens=set_value(0, 100)), "safetensors: document 'd0' has token id 100"),
        (edit_tensors(routes=set_value((1, 1, 1), 8)), "safetensors: document 'd0' has expert id 8"),
        (edit_tensors(routes=set_value((1, 1), 3)), "twice in row 1, layer 1"),
        (edit_tensors(parents=set_value(3, 7)), "parent 7 in row 3"),
        (lambda directory: (directory / SHARD).unlink(), "shard-00000.safetensors is missing"),
        (lambda directory: (directory / SIDECAR).rename(directory / "shard-00001.json"), "shard-00000.json is missing"),
        (lambda directory: [path.unlink() for path in directory.glob("shard-*")], "has no shard-"),
    ],
)
def test_a_file_that_lies_is_refused_by_name_in_bounded_memory(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    with TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        writer.add(make_document(0))
    damage(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=message) as caught:
            list(TraceReader(tmp_path, None))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    assert len(str(caught.value)) < 600


def test_a_flag_that_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, GEOMETRY, "test") as writer:
        writer.add(make_document(0))
    columns = load_file(tmp_path / SHARD)
    columns["accepted"].view(np.uint8)[1] = 7
    save_file(columns, tmp_path / SHARD)
    with pytest.raises(TraceError, match="accepted flag 7; 0 to 1"):
        list(TraceReader(tmp_path))


def test_a_shard_for_more_experts_than_int16_holds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="experts 40000; a trace holds at most 32768"):
        TraceWriter(tmp_path, replace(GEOMETRY, experts=40000), "test")


def test_a_document_beyond_a_shard_is_refused(tmp_path: Path) -> None:
    wide = replace(GEOMETRY, moe_layers=4096, experts=2048, top_k=64)  # half a MiB per row
    tokens = np.zeros(3000, np.int32)
    document = changed(tokens=tokens)
    with TraceWriter(tmp_path, wide, "test") as writer, pytest.raises(TraceError, match="3000 rows; at most 2047"):
        writer.add(document)
