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
from ecospec_proto.trace_record import MAX_EXPERTS, TraceRecord, encode_record

from ..core import SettingsError
from ..engine.base import Verified, VerifyItem
from ..running import Running
from ..verification.accept import Acceptance

CONTEXT_TOKENS = (
    1024  # before a piece, at most: a predictor that sees less than it was trained with looks worse than it is
)
PIECE_ROWS = 128  # with routes, after which a piece ends


@dataclass
class TokenBucket:
    """Up to `capacity` tokens, which come back at per_second. now: seconds of any clock that never goes back."""

    per_second: float
    capacity: float
    filled: float
    at: float

    def take(self, tokens: float, now: float) -> bool:
        """Whether there were as many; then they are gone."""
        self.filled = min(self.capacity, self.filled + self.per_second * max(0.0, now - self.at))
        self.at = max(self.at, now)
        if self.filled < tokens:
            return False
        self.filled -= tokens
        return True

    def settle(self, tokens: float) -> None:
        """Give back what was taken and not used; below 0: more was used."""
        self.filled += tokens


@dataclass(frozen=True)
class _Step:
    """tokens, parents int64 [1 + n] as verified; experts [1 + n, layers, top_k]; accepted: rows of the accepted path."""

    tokens: np.ndarray
    parents: np.ndarray
    experts: np.ndarray
    accepted: np.ndarray


@dataclass
class Piece:
    """Consecutive steps of one request. context: the tokens before the first root; start: position of the first of them."""

    context: list[int]
    start: int
    steps: list[_Step] = field(default_factory=list)
    rows: int = 0

    def add(self, item: VerifyItem, experts: np.ndarray, accepted: np.ndarray) -> None:
        # A copy, because a view would keep the whole step's arrays alive.
        self.steps.append(_Step(item.tokens, item.parents, experts.copy(), accepted))
        self.rows += len(item.tokens)

    def record(self) -> TraceRecord:
        """The context without routes, then each step's rows in the order of its verification."""
        before = len(self.context)
        tokens = np.concatenate([self.context, *(s.tokens for s in self.steps)]).astype(np.int32)
        parents, accepted = np.arange(-1, len(tokens) - 1, dtype=np.int32), np.ones(len(tokens), bool)
        at, above = before, before - 1
        for step in self.steps:
            rows = slice(at, at + len(step.tokens))
            parents[rows] = np.where(step.parents < 0, above, step.parents + at)
            accepted[rows] = False
            accepted[at + step.accepted] = True
            above, at = at + int(step.accepted[-1]), rows.stop
        positions = np.full(len(tokens), self.start, np.int32)
        for row in range(1, len(tokens)):
            positions[row] = positions[parents[row]] + 1
        experts = np.concatenate([s.experts for s in self.steps])
        routes = np.concatenate([np.full((before, *experts.shape[1:]), -1), experts]).astype(np.int16)
        return TraceRecord(secrets.token_hex(16), "live", tokens, positions, parents, routes, accepted)


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
        if geometry.experts > MAX_EXPERTS:
            raise SettingsError(
                f"Setting trace_rate_tokens_per_second is {tokens_per_second:g}, but routes of the target's {geometry.experts} "
                f"experts cannot be recorded, {MAX_EXPERTS} at most; set it to 0."
            )
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
            piece.add(item, v.experts, a.rows)
            ends = len(a.tokens) >= r.remaining or not r.request.stop_token_ids.isdisjoint(a.tokens.tolist())
            if ends or piece.rows >= PIECE_ROWS:
                self._finish(request_id)

    def close(self) -> None:
        """Hand over what is unfinished. The step thread must have ended."""
        for request_id in list(self._open):
            self._finish(request_id)

    def _begin(self, running: Running) -> Piece | None:
        request_id = running.request.request_id
        if request_id in self._done or not self._bucket.take(PIECE_ROWS, self._clock()):
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
        self._append(lambda: encode_record(piece.record(), geometry))
