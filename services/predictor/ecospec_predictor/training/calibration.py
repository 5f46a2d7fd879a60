"""Is a predicted probability true? Reliability of the chosen experts, and the expected calibration error. Numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 10


class Calibration:
    """The training target puts 1/K on each activated expert, so K times an expert's share of the router's mass, at most 1,
    is the predicted probability that it is activated."""

    def __init__(self) -> None:
        self._count, self._predicted, self._observed = (np.zeros(BINS) for _ in range(3))

    def add(self, predicted: np.ndarray, mass: np.ndarray, routes: np.ndarray) -> None:
        """[n, layers, top_k] each; entries with an unknown expert are left out."""
        whole = (routes >= 0).all(-1)
        probability = np.minimum(mass[whole] * routes.shape[-1], 1.0).ravel()
        hit = (predicted[whole][..., None] == routes[whole][..., None, :]).any(-1).ravel()
        bins = np.minimum((probability * BINS).astype(int), BINS - 1)
        self._count += np.bincount(bins, minlength=BINS)
        self._predicted += np.bincount(bins, probability, BINS)
        self._observed += np.bincount(bins, hit, BINS)

    def report(self) -> dict[str, Any]:
        """expected_calibration_error: mean distance of predicted and observed, weighted by the number of predictions."""
        count = np.maximum(self._count, 1)
        predicted, observed = self._predicted / count, self._observed / count
        error = float((np.abs(predicted - observed) * self._count).sum() / max(self._count.sum(), 1))
        return {
            "expected_calibration_error": round(error, 4),
            "bins": [
                {
                    "from": at / BINS,
                    "to": (at + 1) / BINS,
                    "predictions": int(self._count[at]),
                    "predicted": round(float(predicted[at]), 4),
                    "observed": round(float(observed[at]), 4),
                }
                for at in range(BINS)
                if self._count[at]
            ],
        }
