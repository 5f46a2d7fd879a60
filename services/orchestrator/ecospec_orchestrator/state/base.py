"""The seam to what replicas share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ecospec_proto.predictor_version import PredictorVersion

from ..quotas import Charge


class QuotaStore(Protocol):
    """Token buckets, full when first named. Losing them fills them, and never refuses a request."""

    async def take(self, charges: Sequence[Charge]) -> float:
        """0.0: all are taken. Else none is, and in so many seconds all could be."""
        ...

    def give_back(self, charges: Sequence[Charge]) -> None:
        """What was taken and not used; returns at once."""
        ...


class StateStore(QuotaStore, Protocol):
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

    def share_settings(self, changes: Mapping[str, str | None]) -> bool:
        """Change live settings for all replicas, None: back to what each was started with. False when they cannot be told. May wait
        for a moment."""
        ...

    def follow_settings(self, changed: Callable[[Mapping[str, str]], None]) -> None:
        """changed gets all shared settings whenever they are others than before, and now if there are any; in any thread."""
        ...

    def close(self) -> None:
        """Send what waits, for a moment, and end. Safe to call twice."""
        ...
