"""Samples what requests really routed to, on rank 0: short pieces of one text at a time, in the normal form of traces.

A piece is as state.route_sampler makes it: context without routes, then the rows of consecutive verify steps, rejected drafts included.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceError
from ecospec_proto.trace_record import encode_record
from ecospec_proto.trace_rows import TraceRows

from .texts import Batch, Texts

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = 1024  # before a piece, at most
PIECE_ROWS = 128  # with routes, after which a piece ends


class Piece:
    def __init__(self, request_id: int, rows: TraceRows) -> None:
        self.request_id, self.rows, self.routed = request_id, rows, 0


class TraceSampler:
    """put: takes an encoded record. pause_seconds: between a piece and the next."""

    def __init__(
        self,
        geometry: TargetGeometry,
        put: Callable[[bytes], None],
        pause_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._geometry, self._put, self._pause, self._clock = geometry, put, pause_seconds, clock
        self._piece: Piece | None = None
        self._next_at = clock()
        self._trees: dict[int, np.ndarray] = {}  # request -> parents of the tree that its next step verifies
        self._sampled: set[int] = set()  # running requests: no two pieces share a text

    def observe(
        self, batch: Batch, texts: Texts, accepted: np.ndarray, routes: Callable[[int, int], np.ndarray] | None
    ) -> None:
        """One finished step. accepted: int [requests, levels], drafts of each by their place in its tree, -1 where there is none
        (more); routes: (first row, end) -> int16 [rows, moe_layers, top_k], None where the step's are not known."""
        self._sampled &= set(batch.request_ids)
        if self._piece is not None and (routes is None or self._piece.request_id not in batch.request_ids):
            self._finish()
        if self._piece is None and routes is not None and self._clock() >= self._next_at:
            self._begin(batch, texts)
        if self._piece is None or routes is None:
            return
        at = batch.request_ids.index(self._piece.request_id)
        first, end = int(batch.offsets[at]), int(batch.offsets[at + 1])
        parents = self._trees.get(self._piece.request_id)
        if at < batch.contexts or parents is None or len(parents) != end - first - 1:
            self._finish()  # it reads its prompt again, or a tree that is not known was verified
            return
        taken = np.zeros(end - first, np.bool_)
        taken[0] = True
        drafts = accepted[at][accepted[at] >= 0]
        taken[drafts + 1] = True
        above = np.concatenate([[-1], parents + 1])
        self._piece.rows.add_tree(batch.tokens[first:end], above, taken, routes(first, end))
        self._piece.routed += end - first
        if self._piece.routed >= PIECE_ROWS:
            self._finish()

    def chosen(self, batch: Batch, parents: np.ndarray) -> None:
        """The trees that the batch's next step verifies. parents: int64 [requests, g], places in the tree, -1 below the root. A
        request that has just read its prompt has none: the engine builds its first tree a step later."""
        self._trees = dict(zip(batch.request_ids[batch.contexts :], parents[batch.contexts :], strict=True))

    @property
    def wants_routes(self) -> bool:
        """Whether a step's routes would be used now."""
        return self._piece is not None or self._clock() >= self._next_at

    def lost(self) -> None:
        """Steps are missing: what comes next does not continue the piece, nor verify the trees that are known."""
        self._finish()
        self._trees = {}

    def close(self) -> None:
        self._finish()

    def _begin(self, batch: Batch, texts: Texts) -> None:
        for at, request_id in enumerate(batch.request_ids):
            if at < batch.contexts or request_id in self._sampled or request_id not in self._trees:
                continue
            text = texts.text(request_id)
            root = int(batch.positions[batch.offsets[at]]) - text.start
            start = max(0, root - CONTEXT_TOKENS)
            rows = TraceRows(self._geometry.moe_layers, self._geometry.top_k, text.start + start)
            rows.add_chain(np.array(text.tokens[start:root], np.int64))
            self._piece = Piece(request_id, rows)
            self._sampled.add(request_id)
            return

    def _finish(self) -> None:
        piece, self._piece = self._piece, None
        if piece is None or not piece.routed:
            return
        self._next_at = self._clock() + self._pause
        try:
            self._put(encode_record(piece.rows.document(secrets.token_hex(16), "live"), self._geometry))
        except TraceError as error:
            logger.warning("A sampled trace is left out: %s", error)
