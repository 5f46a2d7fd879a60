"""Metrics of what the server shares with others: samples of routes, the state store, the predictor's version."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

DROPPED = ("queue_full", "invalid", "closed")
VERSION_CHARACTERS = 64  # of a label


class StateMetrics:
    """Thread-safe. records_dropped: queue_full (the store took no more for too long), invalid (could not be encoded), closed
    (unsent at the end). A version gauge has one series, that of the version now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"ecospec_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"ecospec_{name}", text, labels, registry=registry)

        self.sampled_tokens = counter(
            "trace_sampled_tokens", "Rows whose routes were sampled, rejected drafts included."
        )
        self.records_written = counter("trace_records_written", "Trace records that the state store has taken.")
        self.records_dropped = counter("trace_records_dropped", "Trace records that were lost, by reason.", ("reason",))
        self.store_up = gauge(
            "state_store_up", "1 while the shared state store answers; 1 also when nothing is shared."
        )
        self.quotas_degraded = gauge(
            "quotas_degraded", "1 while the state store does not answer and each replica applies quotas by itself."
        )
        self.quota_local_decisions = counter("quota_local_decisions", "Quota decisions made meanwhile.")
        self.version_changes = counter(
            "predictor_version_changes", "Times that the predictor came back as another version."
        )
        self._in_use = gauge("predictor_version_info", "1 for the predictor's version in use.", ("version",))
        self._published = gauge(
            "predictor_published_version_info", "1 for the version published last in the state store.", ("version",)
        )
        self._answered = False
        for reason in DROPPED:
            self.records_dropped.labels(reason)

    def observe_version_in_use(self, version: str) -> None:
        """Called with a version that is not the one before."""
        if self._answered:
            self.version_changes.inc()
        self._answered = True
        self._in_use.clear()
        self._in_use.labels(version[:VERSION_CHARACTERS]).set(1)

    def observe_published_version(self, version: str) -> None:
        self._published.clear()
        self._published.labels(version[:VERSION_CHARACTERS]).set(1)
