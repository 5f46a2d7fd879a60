"""The contexts that the service keeps between requests: one session per running text of a caller.

The text is extended when a request arrives, whatever becomes of the request: work that is dropped loses no token. What the
model derives from the text (its keys and values) is made when a question is answered, in the worker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

import grpc
import numpy as np

from .base import Session
from .errors import Refused
from .metrics import Metrics

OVERHEAD_BYTES = 1024  # of a session beside its tokens and its state
Key = tuple[Hashable, int]


class Sessions:
    """Bounded by bytes (the least recently used ends first) and by idle time. Use it on the event loop.

    caller: who may use a session, compared by identity or value; one caller never reaches another's session.
    """

    def __init__(
        self,
        max_tokens: int,
        state_bytes: int,
        budget_bytes: int,
        idle_seconds: float,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_tokens, self._idle, self._metrics, self._clock = max_tokens, idle_seconds, metrics, clock
        self.capacity = max(1, budget_bytes // (state_bytes + 8 * max_tokens + OVERHEAD_BYTES))
        self._kept: OrderedDict[Key, tuple[Session, float]] = (
            OrderedDict()
        )  # least recently used first, with its last use
        self._of_caller: dict[Hashable, set[int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def extend(self, caller: Hashable, session_id: int, start: int, tokens: np.ndarray, sent: int) -> Session:
        """Append what was sent to the session, which must hold `start` tokens; 0 starts it anew. Raises Refused.

        tokens: int64, the last ones of the `sent` tokens; those that are left out are beyond any model's reach.
        """
        self._drop_idle()
        key = (caller, session_id)
        entry = self._kept.get(key)
        if start == 0:
            session = Session()
        elif entry is None or entry[0].length != start:
            self._metrics.session_uses.labels("lost").inc()
            held = "is not known" if entry is None else f"holds {entry[0].length} tokens, not {start}"
            raise Refused(
                grpc.StatusCode.NOT_FOUND, f"Session {session_id} {held}; send its context again with context_start 0."
            )
        else:
            session = entry[0]
        self._metrics.session_uses.labels("hit" if start else "started").inc()
        session.tokens = np.concatenate([session.tokens, tokens])[-self._max_tokens :]
        session.length = start + sent
        if entry is None:
            self._metrics.sessions.inc()
            self._of_caller.setdefault(caller, set()).add(session_id)
        self._kept[key] = session, self._clock()
        self._kept.move_to_end(key)
        while len(self._kept) > self.capacity:
            self._drop(next(iter(self._kept)), "evicted")
        return session

    def end(self, caller: Hashable, session_ids: Iterable[int]) -> None:
        for session_id in session_ids:
            if (caller, session_id) in self._kept:
                self._drop((caller, session_id), "ended")

    def end_caller(self, caller: Hashable) -> None:
        """The caller has gone, and with it all of its sessions."""
        for session_id in list(self._of_caller.get(caller, ())):
            self._drop((caller, session_id), "disconnected")

    def close(self) -> None:
        while self._kept:
            self._drop(next(iter(self._kept)), "closed")

    def _drop_idle(self) -> None:
        oldest = self._clock() - self._idle
        while self._kept and next(iter(self._kept.values()))[1] < oldest:
            self._drop(next(iter(self._kept)), "idle")

    def _drop(self, key: Key, cause: str) -> None:
        del self._kept[key]
        caller, session_id = key
        ids = self._of_caller[caller]
        ids.discard(session_id)
        if not ids:
            del self._of_caller[caller]
        self._metrics.sessions_dropped.labels(cause).inc()
        self._metrics.sessions.dec()
