"""The state of a server that shares nothing: bounded, and gone with the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ecospec_proto.predictor_version import PredictorVersion

from ..accounting.state_metrics import StateMetrics
from ..quotas import Buckets, Charge
from .base import QuotaStore, StateStore


class MemoryQuotas(QuotaStore):
    """This process's own buckets."""

    def __init__(self) -> None:
        self._buckets = Buckets()

    async def take(self, charges: Sequence[Charge]) -> float:
        return self._buckets.take(charges)

    def give_back(self, charges: Sequence[Charge]) -> None:
        self._buckets.add(charges)


class MemoryStore(MemoryQuotas, StateStore):
    """Keeps the newest max_records records. Nobody else can publish a predictor or change a setting here."""

    def __init__(self, max_records: int, metrics: StateMetrics) -> None:
        super().__init__()
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

    def share_settings(self, changes: Mapping[str, str | None]) -> bool:
        return False

    def follow_settings(self, changed: Callable[[Mapping[str, str]], None]) -> None: ...

    def close(self) -> None:
        self._records.clear()
