"""Metrics of what is served, and on what."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge


class ModelMetrics:
    """Set once, when the model is loaded. Other metrics have no label of the model: join them by instance."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._info = Gauge(
            "ecospec_model_info", "1 for the model that is served.", ("model", "revision", "device"), registry=registry
        )
        self._bandwidth = Gauge(
            "ecospec_memory_bandwidth_bytes_per_second",
            "Peak bandwidth of the memory that holds the weights, all devices together, as set; 0 when it is not known.",
            registry=registry,
        )

    def describe(self, model: str, revision: str, device: str, bandwidth: float = 0.0) -> None:
        """bandwidth: bytes per second."""
        self._info.clear()
        self._info.labels(model, revision, device).set(1)
        self._bandwidth.set(bandwidth)
