"""Coefficients of a step's cost from measured steps. Numpy and scipy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from .model import PARTS, PREDICTING, FitQuality, Sample, StepCost

MIN_SAMPLES = 20  # steps per part
MIN_SINGULAR_VALUE = 1e-3  # of the scaled columns, relative to the largest: below, two columns are the same
HUBER = 1.345  # standard deviations; 95 % efficient on clean data


def fit(samples: Sequence[Sample], with_predictor: bool = True) -> tuple[StepCost, FitQuality]:
    """Non-negative coefficients that make relative errors small; outliers (a busy machine) hardly count.

    Huber's estimator by iterated weights around non-negative least squares. The quality is that on the samples
    themselves. with_predictor: False for a system that has none, whose calls cost nothing. Raises ValueError when there
    are too few steps or when they do not tell one coefficient from another.
    """
    found: dict[str, float] = {}
    for part in PARTS:
        amounts = np.array([part.amounts(f) for f, _ in samples], np.float64).reshape(len(samples), len(part.names))
        measured = np.array([part.measured(s) for _, s in samples], np.float64)
        used = amounts.any(1)
        if part is PREDICTING and not with_predictor:
            found |= dict.fromkeys(part.names, 0.0)
            continue
        if used.sum() < MIN_SAMPLES:
            raise ValueError(
                f"{used.sum()} measured steps {part.what}; at least {MIN_SAMPLES} are needed: measure for longer."
            )
        names, columns = list(part.names), amounts[used]
        if "feed" in names and np.array_equal(columns[:, 0], columns[:, names.index("feed")]):
            # A drafter of one level is fed whenever it drafts: one coefficient stands for both.
            columns = np.delete(columns, names.index("feed"), 1)
            names.remove("feed")
        _require_distinct(columns, names)
        found |= dict.fromkeys(part.names, 0.0) | dict(
            zip(names, _robust_nnls(columns, measured[used]).tolist(), strict=True)
        )
    cost = StepCost(**found)
    return cost, assess(cost, samples)


def assess(cost: StepCost, samples: Sequence[Sample]) -> FitQuality:
    """How well the cost describes these steps, which need not be those that it was fitted to."""
    rows = [
        (
            cost.verify(f.requests, f.tokens, f.pairs, f.context_tokens),
            s.verify,
            cost.draft(f.draft_levels, f.drafted_requests) + cost.feeding(f.fed_rows),
            s.draft if f.draft_levels or f.fed_rows else 0.0,
            cost.total(f),
            s.total,
        )
        for f, s in samples
    ]
    table = np.array(rows, np.float64).reshape(-1, 6)
    parts = [_error_and_r_squared(table[:, i], table[:, i + 1]) for i in (0, 2, 4)]
    return FitQuality(len(samples), *(value for part in parts for value in part))


def _error_and_r_squared(predicted: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    used = measured > 0
    predicted, measured = predicted[used], measured[used]
    if not len(measured):
        return 0.0, 0.0
    relative = np.abs(predicted - measured) / measured
    weights = _huber_weights((predicted - measured) / np.maximum(predicted, 0.1 * np.median(measured)))
    spread = weights @ (measured - np.average(measured, weights=weights)) ** 2
    explained = 1 - weights @ (predicted - measured) ** 2 / spread if spread > 0 else 0.0
    return float(np.median(relative)), float(explained)


def _require_distinct(columns: np.ndarray, names: Sequence[str]) -> None:
    sizes = np.linalg.norm(columns, axis=0)
    if not sizes.all():
        name = names[int(np.flatnonzero(sizes == 0)[0])]
        raise ValueError(f"no measured step shows what {name} costs; measure steps in which it takes part.")
    _, values, directions = np.linalg.svd(columns / sizes, full_matrices=False)
    if values[-1] < MIN_SINGULAR_VALUE * values[0]:
        one, other = sorted(np.argsort(-np.abs(directions[-1]))[:2].tolist())
        raise ValueError(
            f"the measured steps do not tell {names[other]} from {names[one]}; measure steps in which they vary "
            "independently."
        )


def _huber_weights(relative: np.ndarray) -> np.ndarray:
    size = np.abs(relative)
    limit = HUBER * max(1.4826 * float(np.median(size)), 1e-9)
    return np.minimum(1.0, limit / np.maximum(size, 1e-300))


def _robust_nnls(columns: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """columns: [steps, coefficients]; measured: seconds [steps] -> coefficients, each at least 0."""
    floor = 0.1 * float(np.median(measured)) + 1e-12
    scale, weights, found = np.maximum(measured, floor), np.ones(len(measured)), np.zeros(columns.shape[1])
    for _ in range(50):
        row_scale = np.sqrt(weights) / scale
        scaled = columns * row_scale[:, None]
        sizes = np.linalg.norm(scaled, axis=0)
        before, found = found, nnls(scaled / sizes, measured * row_scale)[0] / sizes
        if np.allclose(before, found, rtol=1e-6, atol=0):
            break
        predicted = columns @ found
        scale = np.maximum(predicted, floor)
        weights = _huber_weights((measured - predicted) / scale)
    return found
