"""Traces as training windows: nothing leaks, nothing is lost, and a branch sees its own ancestors only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny_traces import GEOMETRY, make_document

from ecospec_predictor.training.data import EpochRows, Window, cut, is_held_out, pack, rows_trained, split, unit_hash
from ecospec_predictor.training.objective import collate, cross_entropy, entries
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceDocument


@dataclass(frozen=True)
class Memory:
    documents: list[TraceDocument]
    geometry: TargetGeometry = GEOMETRY

    def __iter__(self) -> Iterator[TraceDocument]:
        return iter(self.documents)


def test_a_document_is_on_one_side_and_stays_there() -> None:
    documents = Memory([make_document(seed) for seed in range(200)])
    training, held_out = ({d.document_id for d in side} for side in split(documents, 0.2))
    assert not training & held_out and len(training | held_out) == 200
    assert 20 <= len(held_out) <= 60
    assert unit_hash("abc") == 0xBA7816BF8F01CF / 2**56  # SHA-256 of the standard's own example: the same everywhere
    assert len({is_held_out(f"question-7:{answer}", 0.5) for answer in range(20)}) == 1


def path(document: TraceDocument, row: int) -> list[int]:
    tokens = []
    while row >= 0:
        tokens.append(int(document.tokens[row]))
        row = int(document.parents[row])
    return tokens[::-1]


@pytest.mark.parametrize("first", [None, 1, 5])
@pytest.mark.parametrize("draft_rows", [0, 1, 2, 3, 8])
def test_every_row_is_scored_once_along_its_own_branch(first: int | None, draft_rows: int) -> None:
    document = make_document(3, rows=61, drafts=True)
    windows = list(cut(document, 16, draft_rows, first))
    assert sum(int(w.scored.sum()) for w in windows) == rows_trained(document, draft_rows)
    assert all(w.scored.all() for w in windows)
    assert (
        max((w.depths == 0).sum() for w in windows) <= 16 and max((w.depths > 0).sum() for w in windows) <= draft_rows
    )
    accepted = np.concatenate([w.tokens[w.depths == 0] for w in windows])
    assert (accepted == document.tokens[document.accepted]).all()
    whole = Counter("/".join(map(str, path(document, row))) for row in range(len(document.tokens)))
    for window in windows:
        ancestors = window.ancestors()
        for row, mask in enumerate(ancestors):
            seen = "/".join(str(t) for t in window.tokens[mask])
            assert any(text.endswith(seen) for text in whole), (row, seen)
    kept = {2: 1.0, 8: 1.0, 3: 1.0, 1: 0.5, 0: 0.0}[draft_rows] * (~document.accepted).sum()
    assert sum(int((w.depths > 0).sum()) for w in windows) == kept


def test_context_is_seen_and_not_scored() -> None:
    document = make_document(4, rows=50)
    windows = list(cut(document, 16, 0, context=6))
    assert [int(w.scored.sum()) for w in windows] == [16, 10, 10, 10, 4]
    assert all((~w.scored[:6]).all() and w.scored[6:].all() for w in windows[1:])
    assert (np.concatenate([w.tokens[w.scored] for w in windows]) == document.tokens).all()


def test_packing_keeps_every_window_and_the_width() -> None:
    windows = [w for seed in range(20) for w in cut(make_document(seed, drafts=True), 16, 8, first=seed % 16 + 1)]
    rows = list(pack(iter(windows), 24))
    assert sorted(id(w) for row in rows for w in row) == sorted(map(id, windows))
    assert max(sum(len(w.tokens) for w in row) for row in rows) <= 24


def rows_of(seed: int = 0, shuffle: int = 100) -> EpochRows:
    return EpochRows(Memory([make_document(s, drafts=True) for s in range(12)]), 16, 8, shuffle, seed)


def flat(rows: list[list[Window]]) -> list[int]:
    return [int(t) for row in rows for w in row for t in w.tokens]


def test_an_epoch_holds_every_row_once_in_another_order() -> None:
    rows = rows_of()
    epochs: list[list[int]] = [[], []]
    while rows.epoch < 2:
        before = rows.epoch
        taken = flat(rows.take(1))
        if rows.epoch < 2:
            epochs[max(before, rows.epoch)] += taken
    assert len(epochs[0]) == len(epochs[1]) == sum(len(make_document(s, drafts=True).tokens) for s in range(12))
    assert Counter(epochs[0]) == Counter(epochs[1]) and epochs[0] != epochs[1]


def test_a_restored_stream_goes_on_with_the_same_rows() -> None:
    straight, stopped, other = rows_of(), rows_of(), rows_of(seed=1)
    for count in (3, 30, 7):
        stopped.take(count)
        straight.take(count)
        resumed = rows_of()
        resumed.restore(stopped.state())
        assert flat(resumed.take(5)) == flat(rows_at(stopped, 5))
    assert flat(straight.take(20)) == flat(stopped.take(20)) != flat(other.take(20))


def rows_at(rows: EpochRows, count: int) -> list[list[Window]]:
    """The next rows of a copy."""
    copied = rows_of()
    copied.restore(rows.state())
    return copied.take(count)


def test_a_batch_shows_each_row_its_own_window_only_and_no_more_than_its_reach() -> None:
    windows = list(cut(make_document(5, rows=30, drafts=True), 8, 4))[:2]
    batch = collate([windows, windows[:1]], 24, reach=4)
    sizes = [len(w.tokens) for w in windows]
    mask = batch.mask.numpy()
    assert mask.diagonal(axis1=1, axis2=2).all()
    assert not mask[0, : sizes[0], sizes[0] :].any() and not mask[0, sizes[0] :, : sizes[0]].any()
    assert mask.sum(2).max() == 4
    assert batch.positions[0, sizes[0]] == 0 and len(batch.rows) == 2 * sizes[0] + sizes[1]
    assert (batch.tokens.flatten()[batch.rows][: sizes[0]].numpy() == windows[0].tokens).all()


def test_the_loss_is_that_of_the_known_experts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 8)
    routes = torch.stack([torch.randperm(8)[:2] for _ in range(15)]).view(5, 3, 2)
    routes[0, 0, 1], routes[1, 2] = -1, -1  # one expert unknown, a whole entry unknown
    expected = 0.0
    for n in range(5):
        for layer in range(3):
            known = [int(e) for e in routes[n, layer] if e >= 0]
            if known:
                target = torch.zeros(8)
                target[known] = 1 / len(known)
                expected -= float((target * logits[n, layer].log_softmax(0)).sum())
    assert float(cross_entropy(logits, routes)) == pytest.approx(expected, rel=1e-5)


def test_unknown_entries_are_not_counted() -> None:
    (window,) = cut(make_document(6, rows=10), 16, 0)
    window.routes[3] = -1
    window.routes[4, 1] = -1
    window.routes[5, 1, 0] = -1  # the other expert of this entry is known
    assert entries([[window]]) == 10 * 3 - 4
    assert len(collate([[window]], 16, 8).rows) == 9
