"""The tokens of running requests, as the worker sees them pass: the context that the predictor is asked with and traces begin with.

Host memory, rank 0, eager mode only. Positions are the truth: what a step says about a request's first row cuts off whatever was
kept beyond it, so a token that the engine never decided (after an unfinished part of a prompt) does not stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

FORGET_AFTER_STEPS = 2000  # without a sign of a request: it has ended, or begins anew


@dataclass
class Text:
    """tokens: in order, the first at position start (above 0 where the engine took the beginning from its cache)."""

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    seen: int = 0  # step

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """A step's rows. request_ids: in the order of the rows, requests that read their prompt first; contexts: how many those are;
    offsets: int [requests + 1]; tokens, positions: int64 [rows]."""

    request_ids: tuple[int, ...]
    contexts: int
    offsets: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray

    @staticmethod
    def of(
        request_ids: Sequence[int], contexts: int, lengths: Sequence[int], tokens: np.ndarray, positions: np.ndarray
    ) -> Batch:
        offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
        return Batch(tuple(request_ids), contexts, offsets, tokens, positions)


class Texts:
    def __init__(self) -> None:
        self._texts: dict[int, Text] = {}
        self._batch: Batch | None = None
        self._step = 0

    def begin(self, batch: Batch) -> None:
        """Before the step's tokens are accepted."""
        self._batch = batch
        self._step += 1
        for at, request_id in enumerate(batch.request_ids):
            first, end = int(batch.offsets[at]), int(batch.offsets[at + 1])
            position = int(batch.positions[first])
            text = self._texts.setdefault(request_id, Text(position))
            if not text.start <= position <= text.end:
                text.start, text.tokens = position, []
            del text.tokens[position - text.start :]
            rows = end if at < batch.contexts else first + 1  # of a tree, only the root is decided
            text.tokens.extend(batch.tokens[first:rows].tolist())
            text.seen = self._step
        if self._step % FORGET_AFTER_STEPS == 0:
            alive = self._step - FORGET_AFTER_STEPS
            self._texts = {name: text for name, text in self._texts.items() if text.seen > alive}

    def accepted(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        """tokens: int [requests, at least counts]; counts: int [requests], accepted drafts and the one token more."""
        assert self._batch is not None
        for at, request_id in enumerate(self._batch.request_ids):
            self._texts[request_id].tokens.extend(tokens[at, : int(counts[at])].tolist())

    def context(self, at: int) -> tuple[str, list[int]]:
        """Of the request at this place of the step's batch: its id, and all decided tokens so far."""
        assert self._batch is not None
        request_id = self._batch.request_ids[at]
        return str(request_id), self._texts[request_id].tokens

    def text(self, request_id: int) -> Text:
        return self._texts[request_id]
