"""Metrics of what the predictor learns from live routes. Labels: the target's fingerprint, and the layer."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge

from .drift import Rolling


class LiveMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"ecospec_predictor_{name}", text, labels, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"ecospec_predictor_{name}", text, registry=registry)

        of_target = ("fingerprint",)
        self.drift = gauge(
            "drift",
            "1 from when live accuracy falls below the held-out accuracy by more than the margin until it is back within half of it.",
            of_target,
        )
        self.rolling = gauge("rolling_top_k_accuracy_mean", "Top-k accuracy on recent live routes, 0 to 1.", of_target)
        self.rolling_by_layer = gauge("rolling_top_k_accuracy", "The same of each MoE layer.", ("fingerprint", "layer"))
        self.baseline = gauge("held_out_top_k_accuracy", "Of the model that is served, when it was trained.", of_target)
        self.scored_tokens = counter("scored_tokens", "Live rows that were scored.")
        self.records_refused = counter("trace_records_refused", "Trace records that broke the format.")
        self.store_up = gauge("state_store_up", "1 while the state store answers.")

    def show(self, fingerprint: str, state: Rolling, baseline: float | None) -> None:
        counts = state.counts
        self.drift.labels(fingerprint).set(state.drifts)
        self.rolling.labels(fingerprint).set(counts.accuracy)
        for layer, accuracy in enumerate(counts.by_layer.tolist()):
            self.rolling_by_layer.labels(fingerprint, str(layer)).set(accuracy)
        self.baseline.labels(fingerprint).set(math.nan if baseline is None else baseline)
