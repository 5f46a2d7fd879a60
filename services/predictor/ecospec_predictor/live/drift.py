"""How right the predictor is on live routes, and when that is an alarm. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

WINDOW_ROWS = 512
ROLLING_WINDOWS = 8
ALARM_WINDOWS = 3


@dataclass(frozen=True)
class Counts:
    """int64 [layers]: experts that rows used, and how many of them were predicted."""

    used: np.ndarray
    predicted: np.ndarray

    @classmethod
    def none(cls, layers: int) -> Counts:
        return cls(np.zeros(layers, np.int64), np.zeros(layers, np.int64))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.used + other.used, self.predicted + other.predicted)

    @property
    def accuracy(self) -> float:
        """Top-k accuracy over all layers, 0 to 1; NaN when nothing was counted."""
        used = int(self.used.sum())
        return int(self.predicted.sum()) / used if used else float("nan")

    @property
    def by_layer(self) -> np.ndarray:
        """float64 [layers], NaN where nothing was counted."""
        return np.divide(self.predicted, self.used, out=np.full(len(self.used), np.nan), where=self.used > 0)


def count(predicted: np.ndarray, used: np.ndarray) -> Counts:
    """predicted: ids [rows, layers, k]; used: ids [rows, layers, k], -1 where unknown, without repeats."""
    known = used >= 0
    found = (used[..., :, None].astype(np.int64) == predicted[..., None, :].astype(np.int64)).any(-1) & known
    return Counts(known.sum((0, 2)), found.sum((0, 2)))


@dataclass(frozen=True)
class Rolling:
    """A model's latest windows. below: windows in a row that ended under the threshold."""

    current: Counts
    current_rows: int = 0
    windows: tuple[Counts, ...] = ()
    below: int = 0

    @property
    def drifts(self) -> bool:
        return self.below >= ALARM_WINDOWS

    @property
    def counts(self) -> Counts:
        """Of the kept windows and the one that is being filled."""
        total = self.current
        for window in self.windows:
            total = total + window
        return total


def observe(state: Rolling, counts: Counts, rows: int, threshold: float | None) -> Rolling:
    """Add rows; a window ends once it has WINDOW_ROWS. threshold: baseline minus margin; None never alarms."""
    current, filled = state.current + counts, state.current_rows + rows
    if filled < WINDOW_ROWS:
        return replace(state, current=current, current_rows=filled)
    below = threshold is not None and current.accuracy < threshold
    return Rolling(
        Counts.none(len(current.used)),
        0,
        (*state.windows, current)[-ROLLING_WINDOWS:],
        state.below + 1 if below else 0,
    )
