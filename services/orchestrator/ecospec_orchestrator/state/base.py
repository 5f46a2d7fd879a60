"""The seam to what replicas share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ecospec_proto.predictor_version import PredictorVersion


class StateStore(Protocol):
    """Holds what concerns one target. Losing it costs samples and news, never an answer."""

    def append_trace(self, encode: Callable[[], bytes]) -> None:
        """Hand over one trace record; returns at once, in any thread. encode makes the message later, in another thread perhaps.
        When too many wait, the oldest is dropped and counted."""
        ...

    def read_traces(self, limit: int) -> list[bytes]:
        """The newest messages at most, oldest first. Raises StateStoreError."""
        ...

    def published_version(self) -> PredictorVersion | None:
        """The predictor that was published last for this target, as far as known; returns at once."""
        ...

    def close(self) -> None:
        """Send what waits, for a moment, and end. Safe to call twice."""
        ...
