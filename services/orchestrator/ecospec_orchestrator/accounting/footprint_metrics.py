"""Metrics of the experts that steps used and were predicted to use, by layer and by draft nodes. Counts throughout."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from ..core import StepReport

# Of one step, all requests together; a label stands for more than the one before it, up to itself.
NODES = (0, *(2**power for power in range(17)))
BY_LAYER = (
    ("predicted_experts_by_layer", "Experts predicted for verified nodes."),
    ("actual_experts_by_layer", "Experts that the same nodes used."),
    ("predicted_and_actual_experts_by_layer", "Predicted experts that were used."),
)
BY_NODES = (
    ("layer_steps_by_nodes", "Layers of decode steps, by draft nodes of the step, at most so many."),
    ("distinct_experts_by_nodes", "Distinct routed experts that these layers read."),
    ("predicted_layer_steps_by_nodes", "Layers of the steps in which at least one row had a prediction."),
    (
        "predicted_distinct_experts_by_nodes",
        "Distinct experts predicted for the rows with a prediction, roots included.",
    ),
    ("predicted_rows_distinct_experts_by_nodes", "Distinct experts that the same rows used."),
)


class FootprintMetrics(Collector):
    """Arrays that become samples at a scrape: with a hundred layers, a counter for each would cost more than choosing nodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._by_layer = np.zeros((len(BY_LAYER), 0), np.int64)
        self._by_nodes = np.zeros((len(BY_NODES), len(NODES)), np.int64)
        registry.register(self)

    def observe_step(self, report: StepReport) -> None:
        layers, found = len(report.distinct_experts), report.footprint
        at = min(bisect_left(NODES, report.nodes), len(NODES) - 1)
        with self._lock:
            self._by_nodes[:2, at] += (layers, int(report.distinct_experts.sum()))
            if found is None:
                return
            if found.rows:
                self._by_nodes[2:, at] += (layers, int(found.union_predicted.sum()), int(found.union_actual.sum()))
            if not self._by_layer.shape[1]:
                self._by_layer = np.zeros((len(BY_LAYER), layers), np.int64)
            self._by_layer += found.nodes

    def collect(self) -> Iterator[CounterMetricFamily]:
        with self._lock:
            by_layer, by_nodes = self._by_layer.copy(), self._by_nodes.copy()
        layers = [str(layer) for layer in range(by_layer.shape[1])]
        yield from _families(BY_LAYER, "layer", layers, by_layer)
        yield from _families(BY_NODES, "nodes", [str(nodes) for nodes in NODES], by_nodes)


def _families(
    names: tuple[tuple[str, str], ...], label: str, values: list[str], counts: np.ndarray
) -> Iterator[CounterMetricFamily]:
    for (name, text), row in zip(names, counts.tolist(), strict=True):
        family = CounterMetricFamily(f"ecospec_{name}", text, labels=[label])
        for value, count in zip(values, row, strict=True):
            family.add_metric([value], count)
        yield family
