"""How right the predictor is on live routes, and when that is an alarm. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

WINDOW_ROWS = 512
ROLLING_WINDOWS = 8  # with fewer there is no alarm: one text says little of the next
BACK = 0.5  # an alarm ends within this share of the margin, so that an accuracy near its edge does not flap


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
    """A model's latest windows. drifts: their accuracy is an alarm, see observe()."""

    current: Counts
    current_rows: int = 0
    windows: tuple[Counts, ...] = ()
    drifts: bool = False

    @property
    def counts(self) -> Counts:
        """Of the kept windows and the one that is being filled."""
        total = self.current
        for window in self.windows:
            total = total + window
        return total


def observe(state: Rolling, counts: Counts, rows: int, baseline: float | None, margin: float) -> Rolling:
    """Add rows; a window ends once it has WINDOW_ROWS. The alarm begins where the accuracy over all that is kept, once ROLLING_WINDOWS
    are, lies more than margin below the baseline, and ends where it is back within BACK of it. baseline: None never alarms."""
    current, filled, windows = state.current + counts, state.current_rows + rows, state.windows
    if filled >= WINDOW_ROWS:
        current, filled, windows = Counts.none(len(current.used)), 0, (*windows, current)[-ROLLING_WINDOWS:]
    state = Rolling(current, filled, windows, state.drifts)
    if baseline is None or len(windows) < ROLLING_WINDOWS:
        return replace(state, drifts=False)
    allowed = margin * BACK if state.drifts else margin
    return replace(state, drifts=state.counts.accuracy < baseline - allowed)
