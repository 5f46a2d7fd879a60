"""Follows the cost of a step while serving: cheap, bounded, and hardly moved by outliers."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

import numpy as np

from .model import PARTS, Part, StepCost, StepFeatures, StepSeconds
from .profile import Profile

FORGETTING_STEPS = 500
BOUNDS = (0.25, 4.0)  # a coefficient relative to the profile's
PRIOR_STEPS = 3.0  # weight of "all coefficients change by the same factor" against what the steps show
WINDOW_STEPS = 101  # of the running medians
DRIFT, NO_DRIFT = math.log(1.25), math.log(1.15)
DRIFT_STEPS = 100
PACE_STEPS = 24  # the machine's pace is a mean over about so many steps
PACE_CLIP = 0.25  # of one step's log ratio: an interruption is no pace


class OnlineCost:
    """Follows the machine while it serves: recursive least squares on the steps' relative seconds, with forgetting.

    Each coefficient stays within a quarter and four times the profile's (one that is 0 stays 0). Where the steps do not
    tell coefficients apart, these change by their part's common factor. An outlier counts as much as an error of twice the
    usual size. Not thread-safe; observe() takes tens of microseconds.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile_cost = profile.cost
        self._learners = [_PartLearner(part, profile.cost) for part in PARTS]
        self._cost: StepCost | None = profile.cost
        self._errors, self._ratios = _RunningMedian(WINDOW_STEPS), _RunningMedian(WINDOW_STEPS)
        self._log_pace = 0.0
        self._steps_off = 0
        self._drifted = False

    @property
    def pace(self) -> float:
        """Measured over expected seconds of the last steps: what all costs are multiplied by. Memory that others use, too, or a
        changed clock is seen within tens of steps; what one thing costs against another is learned slowly."""
        return math.exp(self._log_pace)

    def follow(self, expected_seconds: float, measured_seconds: float) -> None:
        """Every step, cheap: what it was expected to take at the present pace, and what it took."""
        if expected_seconds > 0 and 0 < measured_seconds < math.inf:
            self._errors.add(abs(expected_seconds / measured_seconds - 1))
            error = math.log(measured_seconds / expected_seconds)
            self._log_pace += max(-PACE_CLIP, min(PACE_CLIP, error)) / PACE_STEPS

    @property
    def paced(self) -> StepCost:
        """cost at the present pace."""
        pace, cost = self.pace, self.cost
        return StepCost(**{name: value * pace for name, value in vars(cost).items()})

    @property
    def cost(self) -> StepCost:
        """As learned so far, at the usual pace."""
        if self._cost is None:
            learned: dict[str, float] = {}
            for learner in self._learners:
                learned.update(learner.coefficients())
            self._cost = StepCost(**learned)
        return self._cost

    @property
    def median_error(self) -> float:
        """Median of |predicted - measured| / measured over the last 101 steps, each predicted before it was learned from."""
        return self._errors.value

    @property
    def times_profile(self) -> float:
        """Measured seconds over the profile's own prediction, in the median of recent steps; 1 before the first."""
        return math.exp(self._ratios.value)

    @property
    def drifted(self) -> bool:
        """The profile itself (not what was learned) has been off by more than a quarter, in the median, for 100 steps;
        ends when it is off by less than 15 %."""
        return self._drifted

    def observe(self, features: StepFeatures, seconds: StepSeconds) -> None:
        """Learn from one step. A step without a finite, positive duration is left out."""
        measured = seconds.total
        if not 0 < measured < math.inf:
            return
        expected = self._profile_cost.total(features)
        if expected > 0:
            self._watch(math.log(measured / expected))
        for learner in self._learners:
            learner.learn(features, seconds)
        self._cost = None

    def _watch(self, log_ratio: float) -> None:
        self._ratios.add(log_ratio)
        off = abs(self._ratios.value)
        self._steps_off = self._steps_off + 1 if off > DRIFT else 0
        if self._steps_off >= DRIFT_STEPS:
            self._drifted = True
        elif off < NO_DRIFT:
            self._drifted = False


class _PartLearner:
    """Learns one part's factors on the profile's coefficients, from each step's ratio of measured to profiled seconds:
    ratio = sum of factor * share, the shares being the profile's."""

    def __init__(self, part: Part, cost: StepCost) -> None:
        self._part = part
        self._profiled = [getattr(cost, name) for name in part.names]
        count = len(part.names)
        self._factors = [1.0] * count
        self._squares = np.zeros((count, count))
        self._products = np.zeros(count)
        self._ratio_sum = self._weight_sum = PRIOR_STEPS
        self._spread = 0.1  # usual relative error

    def coefficients(self) -> dict[str, float]:
        return {
            name: value * factor
            for name, value, factor in zip(self._part.names, self._profiled, self._factors, strict=True)
        }

    def learn(self, features: StepFeatures, seconds: StepSeconds) -> None:
        charges = [a * c for a, c in zip(self._part.amounts(features), self._profiled, strict=True)]
        expected = sum(charges)
        if expected <= 0:
            return
        shares = np.array(charges) / expected
        ratio = self._part.measured(seconds) / expected
        error = abs(ratio / float(shares @ self._factors) - 1)
        weight = min(1.0, 2 * self._spread / max(error, 1e-12))
        self._spread = max(0.01, self._spread + (min(error, 3 * self._spread) - self._spread) / 64)
        keep = 1 - 1 / FORGETTING_STEPS
        self._squares *= keep
        self._squares += np.multiply.outer(shares * weight, shares)
        self._products *= keep
        self._products += shares * (weight * ratio)
        self._ratio_sum = keep * self._ratio_sum + weight * ratio
        self._weight_sum = keep * self._weight_sum + weight
        self._descend(PRIOR_STEPS, self._ratio_sum / self._weight_sum)

    def _descend(self, prior: float, common: float) -> None:
        """One sweep of coordinate descent within the bounds; the next step goes on from there."""
        factors, low, high = self._factors, *BOUNDS
        rows, products = self._squares.tolist(), self._products.tolist()
        for j, row in enumerate(rows):
            others = sum(a * b for a, b in zip(row, factors, strict=True)) - row[j] * factors[j]
            factors[j] = min(high, max(low, (products[j] - others + prior * common) / (row[j] + prior)))


class _RunningMedian:
    """Exact, over the last `window` values; 0 before the first."""

    def __init__(self, window: int) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._window = window

    @property
    def value(self) -> float:
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    def add(self, value: float) -> None:
        if len(self._recent) == self._window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)
