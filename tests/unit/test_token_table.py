"""The token table: counts against an oracle, and what a file must not do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_traces import GEOMETRY, make_document

from ecospec_proto import token_table as module
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.token_table import TableError, TokenTable
from ecospec_proto.traces import TraceDocument


@dataclass(frozen=True)
class Memory:
    documents: list[TraceDocument]
    geometry: TargetGeometry = GEOMETRY

    def __iter__(self) -> Iterator[TraceDocument]:
        return iter(self.documents)


def with_gaps(document: TraceDocument, seed: int) -> TraceDocument:
    """A fifth of the ids unknown, and other experts now and then, so that counts differ."""
    random = np.random.default_rng(seed)
    routes = document.routes.copy()
    swap = random.random(routes.shape[:2]) < 0.3
    routes[swap] = np.stack([random.permutation(8)[:2] for _ in range(int(swap.sum()))])
    routes[random.random(routes.shape) < 0.2] = -1
    return replace(document, routes=routes)


@pytest.mark.parametrize("budget", [1, 256 << 20])
def test_each_token_gets_its_most_frequent_experts(monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """budget 1 counts one layer per pass."""
    monkeypatch.setattr(module, "COUNT_BYTES", budget)
    documents = [with_gaps(make_document(seed, drafts=True), seed) for seed in range(8)]
    counts: dict[tuple[int, int], Counter[int]] = {}
    for document in documents:
        for token, row in zip(document.tokens, document.routes, strict=True):
            for layer, ids in enumerate(row):
                counts.setdefault((int(token), layer), Counter()).update(int(e) for e in ids if e >= 0)
    answer = TokenTable.build(Memory(documents)).lookup(np.arange(16))
    assert answer.shape == (16, 3, 2) and answer.dtype == np.uint8
    for (token, layer), counter in counts.items():
        chosen = [int(e) for e in answer[token, layer]]
        assert len(set(chosen)) == 2
        least = min(counter[e] for e in chosen)
        assert all(counter[e] <= least for e in range(8) if e not in chosen), (token, layer)


def test_a_token_never_seen_gets_the_popular_experts() -> None:
    geometry = replace(GEOMETRY, vocab_size=99)
    documents = [make_document(seed) for seed in range(4)]
    table = TokenTable.build(Memory(documents, geometry))
    assert (table.lookup(np.array([98, 16])) == table.popular).all()
    rare = TokenTable.build(Memory(documents, geometry), max_tokens=3)
    assert len(rare.token_ids) == 3 and (rare.popular == table.popular).all()


def test_a_saved_table_is_the_same_again(tmp_path: Path) -> None:
    table = TokenTable.build(Memory([make_document(1)]))
    table.save(tmp_path / "t.safetensors")
    loaded = TokenTable.load(tmp_path / "t.safetensors", GEOMETRY)
    assert (loaded.lookup(np.arange(16)) == table.lookup(np.arange(16))).all() and loaded.geometry == GEOMETRY


def test_another_target_is_refused(tmp_path: Path) -> None:
    TokenTable.build(Memory([make_document(1)])).save(tmp_path / "t.safetensors")
    with pytest.raises(TableError, match="tiny, revision r1, but tiny, revision r2"):
        TokenTable.load(tmp_path / "t.safetensors", replace(GEOMETRY, revision="r2"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": np.array([3, 2], np.int32)}, "do not ascend"),
        ({"token_ids": np.array([3, 99], np.int32)}, "0 to 15"),
        ({"experts": np.full((2, 3, 2), 8, np.uint8)}, "names expert 8"),
        ({"popular": np.zeros((3, 1), np.uint8)}, "its geometry needs"),
        ({"experts": np.zeros((9, 3, 2), np.uint8)}, "its geometry needs"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, change: dict[str, np.ndarray], words: str) -> None:
    arrays = {
        "token_ids": np.array([2, 3], np.int32),
        "experts": np.zeros((2, 3, 2), np.uint8),
        "popular": np.zeros((3, 2), np.uint8),
    }
    metadata = {"format_version": "1", "geometry": json.dumps(asdict(GEOMETRY))}
    save_file(arrays, tmp_path / "t.safetensors", metadata)
    TokenTable.load(tmp_path / "t.safetensors")
    save_file(arrays | change, tmp_path / "t.safetensors", metadata)
    with pytest.raises(TableError, match=words):
        TokenTable.load(tmp_path / "t.safetensors")


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(TableError, match="cannot be read"):
        TokenTable.load(path)
    save_file({"a": np.zeros(1)}, path)
    with pytest.raises(TableError, match="format_version None"):
        TokenTable.load(path)
    save_file({"a": np.zeros(1)}, path, {"format_version": "1", "geometry": "{}"})
    with pytest.raises(TableError, match="no usable geometry"):
        TokenTable.load(path)
