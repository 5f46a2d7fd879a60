"""The state of a server that shares nothing: bounded, and gone with the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ecospec_proto.predictor_version import PredictorVersion

from ..accounting.state_metrics import StateMetrics
from .base import StateStore


class MemoryStore(StateStore):
    """Keeps the newest max_records records. Nobody else can publish a predictor here."""

    def __init__(self, max_records: int, metrics: StateMetrics) -> None:
        self._records: deque[Callable[[], bytes]] = deque(maxlen=max_records)
        self._metrics = metrics

    def append_trace(self, encode: Callable[[], bytes]) -> None:
        self._records.append(encode)
        self._metrics.records_written.inc()

    def read_traces(self, limit: int) -> list[bytes]:
        newest = list(self._records)[-limit:]
        return [encode() for encode in newest]

    def published_version(self) -> PredictorVersion | None:
        return None

    def close(self) -> None:
        self._records.clear()
