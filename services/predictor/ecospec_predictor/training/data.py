"""Router traces as training windows: the split by document, the cut into windows, and the order of an epoch. Numpy only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.token_table import Traces
from ecospec_proto.traces import TraceDocument

OPEN_ROWS = 64  # rows that still take windows while they are packed


def unit_hash(document_id: str, salt: str = "") -> float:
    """In [0, 1), evenly spread and the same everywhere. An id may begin with a group and a colon: what belongs together,
    such as several answers to one question, then has the same value."""
    group = document_id.partition(":")[0]
    return int.from_bytes(hashlib.sha256(f"{salt}{group}".encode()).digest()[:7], "big") / 2**56


def is_held_out(document_id: str, share: float) -> bool:
    """The split: by document, never by token, so that no text is on both sides."""
    return unit_hash(document_id) < share


@dataclass(frozen=True)
class Part:
    """The documents of traces that `keep` says True for."""

    traces: Traces
    keep: Callable[[str], bool]

    @property
    def geometry(self) -> TargetGeometry:
        return self.traces.geometry

    def __iter__(self) -> Iterator[TraceDocument]:
        return (document for document in self.traces if self.keep(document.document_id))


def split(traces: Traces, held_out: float) -> tuple[Part, Part]:
    """(training documents, held-out documents)."""
    return (
        Part(traces, lambda name: not is_held_out(name, held_out)),
        Part(traces, lambda name: is_held_out(name, held_out)),
    )


@dataclass(frozen=True)
class Window:
    """A piece of one text and the rejected drafts that hang from it.

    tokens   int32 [n]
    parents  int32 [n], a row of the window below its own, -1 for the first row
    routes   int16 [n, moe_layers, top_k], -1 where unknown
    depths   int32 [n], 0 for text, else the distance of a rejected draft row from the text
    scored   bool [n], False for rows that are context only
    domain   of the document
    """

    tokens: np.ndarray
    parents: np.ndarray
    routes: np.ndarray
    depths: np.ndarray
    scored: np.ndarray
    domain: str

    @property
    def known(self) -> np.ndarray:
        """bool [n, moe_layers]: entries that have something to learn from or to compare with."""
        return (self.routes >= 0).any(-1) & self.scored[:, None]

    @property
    def anchors(self) -> np.ndarray:
        """int64 [n]: the row of the text that a row is, or hangs from."""
        anchors = np.arange(len(self.tokens))
        for row in np.flatnonzero(self.depths):
            anchors[row] = anchors[self.parents[row]]
        return anchors

    def ancestors(self) -> np.ndarray:
        """bool [n, n], True where a row may look: at itself and what it follows."""
        size = len(self.tokens)
        if (self.parents == np.arange(size) - 1).all():
            return np.tri(size, dtype=bool)
        mask = np.eye(size, dtype=bool)
        for row in range(1, size):
            mask[row] |= mask[self.parents[row]]
        return mask


def rows_trained(document: TraceDocument, draft_rows: int) -> int:
    """Rows of a document that cut() yields, whatever the offset."""
    anchors, _ = _anchors(document)
    drafts = np.bincount(anchors[~document.accepted]) if not document.accepted.all() else np.zeros(0, np.int64)
    return int(document.accepted.sum() + np.minimum(drafts, draft_rows).sum())


def cut(
    document: TraceDocument, window_tokens: int, draft_rows: int, first: int | None = None, context: int = 0
) -> Iterator[Window]:
    """Windows of at most window_tokens accepted rows and draft_rows rejected ones; each row is scored in one of them.

    first: accepted rows of the first window, so that windows begin elsewhere in every epoch.
    context: accepted rows before a window that it sees too, without scoring them; part of window_tokens.
    A window ends early where its drafts would not fit; of more than draft_rows drafts at one token the first are kept.
    """
    anchors, depths = _anchors(document)
    spine = np.flatnonzero(document.accepted)
    rejected = np.flatnonzero(~document.accepted)
    rejected = rejected[np.argsort(anchors[rejected], kind="stable")]
    starts = np.searchsorted(
        anchors[rejected], np.arange(len(spine) + 1)
    )  # drafts of token i: starts[i] to starts[i + 1]
    kept = np.minimum(np.diff(starts), draft_rows)
    total = np.append(0, np.cumsum(kept))
    begin, limit = 0, first or window_tokens
    while begin < len(spine):
        before = max(0, begin - context)
        limit = min(limit, window_tokens - (begin - before))
        end = int(np.searchsorted(total, total[begin] + draft_rows, "right")) - 1
        end = max(begin + 1, min(begin + limit, end, len(spine)))
        drafts = [rejected[starts[i] : starts[i] + kept[i]] for i in range(begin, end) if kept[i]]
        rows = np.sort(np.concatenate([spine[before:end], *drafts]))
        parents = np.searchsorted(rows, document.parents[rows]).astype(np.int32)
        parents[0] = -1
        yield Window(
            document.tokens[rows],
            parents,
            document.routes[rows],
            depths[rows],
            rows >= spine[begin],
            document.domain,
        )
        begin, limit = end, window_tokens


def _anchors(document: TraceDocument) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T] each: which accepted row (counted among the accepted) a row is or hangs from, and its distance from it."""
    anchors = (np.cumsum(document.accepted) - 1).astype(np.int32)
    depths = np.zeros(len(anchors), np.int32)
    for row in np.flatnonzero(~document.accepted):
        parent = document.parents[row]
        anchors[row], depths[row] = anchors[parent], depths[parent] + 1
    return anchors, depths


def pack(windows: Iterator[Window], width: int) -> Iterator[list[Window]]:
    """Windows, none longer than width, side by side in rows of at most width tokens: the first open row that has room."""
    rows: list[list[Window]] = []
    room: list[int] = []
    for window in windows:
        size = len(window.tokens)
        at = next((i for i, free in enumerate(room) if free >= size), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(width)
        rows[at].append(window)
        room[at] -= size
        if room[at] == 0 or len(rows) > OPEN_ROWS:
            full = at if room[at] == 0 else 0
            yield rows.pop(full)
            room.pop(full)
    yield from rows


class EpochRows:
    """An endless stream of packed rows, epoch after epoch, that a run can take up again where it stopped.

    Everything it yields follows from the traces, the seed, the epoch and how many rows of the epoch were taken.
    """

    def __init__(self, traces: Traces, window_tokens: int, draft_rows: int, shuffle_tokens: int, seed: int) -> None:
        self._traces, self._shuffle, self._seed = traces, shuffle_tokens, seed
        self._window, self._drafts = window_tokens, draft_rows
        self.epoch, self._taken = 0, 0
        self._rows = self._epoch_rows()

    @property
    def width(self) -> int:
        return self._window + self._drafts

    def take(self, count: int) -> list[list[Window]]:
        """The next `count` rows; the traces must not be empty."""
        taken: list[list[Window]] = []
        while len(taken) < count:
            row = next(self._rows, None)
            if row is None:
                self.epoch, self._taken = self.epoch + 1, 0
                self._rows = self._epoch_rows()
            else:
                taken.append(row)
                self._taken += 1
        return taken

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self._taken}

    def restore(self, state: dict[str, int]) -> None:
        self.epoch, self._taken = state["epoch"], state["taken"]
        self._rows = self._epoch_rows()
        for _ in range(self._taken):
            next(self._rows)

    def _epoch_rows(self) -> Iterator[list[Window]]:
        return pack(self._windows(np.random.default_rng([self._seed, self.epoch])), self.width)

    def _windows(self, random: np.random.Generator) -> Iterator[Window]:
        buffer: list[Window] = []
        tokens = 0
        for document in self._traces:
            first = int(random.integers(1, self._window + 1))
            for window in cut(document, self._window, self._drafts, first):
                buffer.append(window)
                tokens += len(window.tokens)
            if tokens >= self._shuffle:
                yield from _shuffled(buffer, random)
                buffer, tokens = [], 0
        yield from _shuffled(buffer, random)


def _shuffled(windows: Sequence[Window], random: np.random.Generator) -> Iterator[Window]:
    return (windows[i] for i in random.permutation(len(windows)))
