"""Decayed means: what recent steps have shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Mean:
    """A decayed mean over about `steps` observations."""

    steps: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0, times: int = 1) -> None:
        """One observation, or the sums of several."""
        keep = (1 - 1 / self.steps) ** times
        self.total = keep * self.total + value
        self.weight = keep * self.weight + weight

    def value(self, prior: float, prior_weight: float) -> float:
        return (self.total + prior * prior_weight) / (self.weight + prior_weight)


def nearest(sizes: Mapping[int, Mean], requests: int) -> Mean | None:
    """The mean of the batch size that is nearest to so many requests (of two, the smaller); None where none was seen."""
    size = min(sizes, key=lambda size: (abs(size - requests), size), default=None)
    return None if size is None else sizes[size]
