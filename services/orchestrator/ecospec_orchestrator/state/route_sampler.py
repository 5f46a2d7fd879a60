"""Samples what requests really routed to, as short pieces of consecutive tokens, at a bounded rate.

It runs in the step thread and only keeps what a step has made anyway; records are put together by whoever sends them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument, TraceError, row_bytes
from ecospec_proto.trace_record import encode_record
from ecospec_proto.trace_rows import TraceRows

from ..core import SettingsError
from ..engine.base import Verified, VerifyItem
from ..quotas import TokenBucket
from ..recording import accepted_rows
from ..running import Running
from ..verification.accept import Acceptance

# Before a piece, at most: a predictor that sees less than it was trained with looks worse than it is.
CONTEXT_TOKENS = 1024
SHORTEST_TOKENS = 8  # that a request may still emit when its piece begins; a readiness probe is none of the traffic
PIECE_ROWS = 128  # with routes, after which a piece ends


@dataclass(frozen=True)
class _Step:
    item: VerifyItem
    experts: np.ndarray
    acceptance: Acceptance


@dataclass
class Piece:
    """Consecutive steps of one request. context: the tokens before the first root; start: position of the first of them."""

    context: list[int]
    start: int
    steps: list[_Step] = field(default_factory=list)
    rows: int = 0

    def add(self, item: VerifyItem, experts: np.ndarray, acceptance: Acceptance) -> None:
        # Neither the sequence nor a view, which would keep the cache's or the whole step's arrays alive.
        self.steps.append(_Step(VerifyItem(None, item.tokens, item.parents), experts.copy(), acceptance))
        self.rows += len(item.tokens)

    def record(self, geometry: TargetGeometry) -> TraceDocument:
        """The context without routes, then each step's rows in the order of its verification."""
        rows = TraceRows(geometry.moe_layers, geometry.top_k, self.start)
        rows.add_chain(np.array(self.context, np.int64))
        for step in self.steps:
            accepted, _ = accepted_rows(step.item, step.acceptance)
            rows.add_tree(step.item.tokens, step.item.parents, accepted, step.experts)
        return rows.document(secrets.token_hex(16), "live")


class RouteSampler:
    """tokens_per_second: rows with routes, rejected drafts included, in the long run. append is given a function that makes the
    message; sampled is told the rows of every piece. A request is sampled once at most, so that no two records share a text.
    Raises SettingsError for a target whose experts a record cannot hold. Not thread-safe."""

    def __init__(
        self,
        geometry: TargetGeometry,
        tokens_per_second: float,
        append: Callable[[Callable[[], bytes]], None],
        sampled: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            row_bytes(geometry)
        except TraceError as error:
            raise SettingsError(
                f"Setting trace_rate_tokens_per_second is {tokens_per_second:g}, but nothing can be sampled: {error} Set it to 0."
            ) from None
        self._geometry, self._append, self._sampled, self._clock = geometry, append, sampled, clock
        capacity = max(PIECE_ROWS, tokens_per_second)
        self._bucket = TokenBucket(tokens_per_second, capacity, capacity, clock())
        self._open: dict[str, Piece] = {}
        self._done: set[str] = set()  # requests of the batch that were sampled

    def observe(
        self,
        batch: Sequence[Running],
        items: Sequence[VerifyItem],
        verified: Sequence[Verified],
        accepted: Sequence[Acceptance],
    ) -> None:
        """One step, after it was decided and before its tokens are added to the requests."""
        there = {r.request.request_id for r in batch}
        for request_id in self._open.keys() - there:  # cancelled
            self._finish(request_id)
        self._done &= there
        for r, item, v, a in zip(batch, items, verified, accepted, strict=True):
            request_id = r.request.request_id
            piece = self._open.get(request_id) or self._begin(r)
            if piece is None:
                continue
            piece.add(item, v.experts, a)
            ends = len(a.tokens) >= r.remaining or not r.request.stop_token_ids.isdisjoint(a.tokens.tolist())
            if ends or piece.rows >= PIECE_ROWS:
                self._finish(request_id)

    def close(self) -> None:
        """Hand over what is unfinished. The step thread must have ended."""
        for request_id in list(self._open):
            self._finish(request_id)

    def _begin(self, running: Running) -> Piece | None:
        request_id = running.request.request_id
        if request_id in self._done or running.remaining < SHORTEST_TOKENS:
            return None
        if not self._bucket.take(PIECE_ROWS, self._clock()):
            return None
        root = len(running.tokens) - 1
        start = max(0, root - CONTEXT_TOKENS)
        piece = self._open[request_id] = Piece(running.tokens[start:root], start)
        self._done.add(request_id)
        return piece

    def _finish(self, request_id: str) -> None:
        piece, geometry = self._open.pop(request_id), self._geometry
        self._bucket.settle(PIECE_ROWS - piece.rows)
        self._sampled(piece.rows)
        self._append(lambda: encode_record(piece.record(geometry), geometry))
