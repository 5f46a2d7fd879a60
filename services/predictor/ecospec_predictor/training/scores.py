"""Top-k accuracy, counted exactly: which share of the experts that the target used were among the predicted ones. Numpy only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np


def hits(predicted: np.ndarray, routes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """predicted: [n, layers, top_k]; routes: [n, layers, top_k], -1 where unknown.

    Returns int64 [n, layers] twice: known experts that were predicted, and known experts.
    """
    known = routes >= 0
    found = (routes[..., None] == predicted[..., None, :]).any(-1) & known
    return found.sum(-1), known.sum(-1)


class Scores:
    """Accuracy of one predictor, overall, per layer, per depth and per domain."""

    def __init__(self, layers: int) -> None:
        self._layers = np.zeros((2, layers), np.int64)
        self._depths: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(2, np.int64))
        self._domains: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2, np.int64))

    def add(self, predicted: np.ndarray, routes: np.ndarray, depths: np.ndarray, domain: str) -> None:
        """Rows of one domain. depths: int [n]."""
        both = np.stack(hits(predicted, routes))  # [2, n, layers]
        self._layers += both.sum(1)
        rows = both.sum(2)
        self._domains[domain] += rows.sum(1)
        for depth in np.unique(depths):
            self._depths[int(depth)] += rows[:, depths == depth].sum(1)

    @property
    def accuracy(self) -> float:
        return _share(self._layers.sum(1))

    @property
    def experts(self) -> int:
        """Known experts that were compared."""
        return int(self._layers[1].sum())

    def report(self) -> dict[str, Any]:
        """Shares from 0 to 1; a depth is the distance of a rejected draft row from the text, 0 for the text itself."""
        return {
            "accuracy": _share(self._layers.sum(1)),
            "by_layer": [_share(layer) for layer in self._layers.T],
            "by_depth": {str(depth): _share(pair) for depth, pair in sorted(self._depths.items())},
            "by_domain": {domain: _share(pair) for domain, pair in sorted(self._domains.items())},
        }


def _share(pair: np.ndarray) -> float:
    return round(float(pair[0] / pair[1]), 4) if pair[1] else 0.0
