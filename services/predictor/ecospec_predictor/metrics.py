"""Prometheus metrics of the service, on a port of their own."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from .errors import PredictorError

SECONDS = (1e-4, 2e-4, 4e-4, 6e-4, 1e-3, 2e-3, 4e-3, 6e-3, 0.01, 0.02, 0.04, 0.1, 0.2, 0.5, 1.0, 5.0)
TREES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OUTCOMES = (
    "ok",
    "invalid_argument",
    "failed_precondition",
    "not_found",
    "resource_exhausted",
    "deadline_exceeded",
    "cancelled",
    "internal",
    "unavailable",
)
SWAP_OUTCOMES = ("swapped", "another_target", "failed")


class Metrics:
    """Every instance has its own registry, so that several servers can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ecospec_predictor_requests",
            "Requests, unary and of streams, by outcome.",
            ["outcome"],
            registry=self.registry,
        )
        self.batch_trees = Histogram(
            "ecospec_predictor_batch_trees", "Trees in one run of the model.", buckets=TREES, registry=self.registry
        )
        self.model_seconds = Histogram(
            "ecospec_predictor_model_seconds", "Time of one run of the model.", buckets=SECONDS, registry=self.registry
        )
        self.queue_seconds = Histogram(
            "ecospec_predictor_queue_seconds",
            "Time a request waited for the model.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.model_info = Gauge(
            "ecospec_predictor_model_info",
            "1 for each model that is served.",
            ["target", "fingerprint", "version"],
            registry=self.registry,
        )
        self.swaps = Counter(
            "ecospec_predictor_swaps", "New versions that were found, by outcome.", ["outcome"], registry=self.registry
        )
        for outcome in SWAP_OUTCOMES:
            self.swaps.labels(outcome)
        self.sessions = Gauge("ecospec_predictor_sessions", "Sessions whose context is kept.", registry=self.registry)
        self.session_uses = Counter(
            "ecospec_predictor_session_uses",
            "Trees of a session: started with a context, hit (only new tokens came) or lost (asked for the context).",
            ["result"],
            registry=self.registry,
        )
        self.sessions_dropped = Counter(
            "ecospec_predictor_sessions_dropped",
            "Sessions that ended: ended or disconnected by the caller, idle, evicted for room, or closed with their model.",
            ["cause"],
            registry=self.registry,
        )
        for result in ("started", "hit", "lost"):
            self.session_uses.labels(result)
        for cause in ("ended", "disconnected", "idle", "evicted", "closed"):
            self.sessions_dropped.labels(cause)
        for outcome in OUTCOMES:  # a series that exists from the start can be alerted on
            self.requests.labels(outcome)


class MetricsServer:
    """Serves /metrics from start() to stop(). Raises PredictorError when the port is taken."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        self._server: Any
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(port, host, registry=metrics.registry)
        except OSError as error:
            raise PredictorError(
                f"The metrics cannot be served on {host}:{port} ({error.strerror}); stop what listens there or choose another "
                "metrics_port."
            ) from None
        self.port: int = self._server.server_address[1]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
