"""What a step costs in seconds, as a sum of coefficients times what the step did. Numpy only.

seconds = fixed + per_request * requests + per_token * tokens + per_pair * pairs + per_context_token * context_tokens
for everything after the choice, and the like for drafting, feeding the drafter and asking the predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepFeatures:
    """What a step did, in the units that it is charged for.

    tokens: rows of the target's forward, roots and nodes; pairs: distinct (layer, expert) pairs that they read, all
    requests together (with experts placed on several ranks: the sum over layers of the fullest rank's); context_tokens:
    summed over requests; draft_levels: draft forwards, 0 when nothing was drafted; fed_rows: rows that the drafter was fed;
    predicted_requests: requests that the predictor was asked about, 0 when it was not asked.
    """

    requests: int
    tokens: int
    pairs: int
    context_tokens: int
    draft_levels: int = 0
    drafted_requests: int = 0
    fed_rows: int = 0
    predicted_requests: int = 0


@dataclass(frozen=True)
class StepSeconds:
    """draft: drafting and feeding; predict: the call to the predictor; verify: everything after the choice."""

    draft: float
    predict: float
    verify: float

    @property
    def total(self) -> float:
        return self.draft + self.predict + self.verify


@dataclass(frozen=True)
class StepCost:
    """Coefficients, all in seconds and at least 0: per step (fixed), request, row (per_token), (layer, expert) pair and
    context token of verification; per draft level and per level and drafted request; per feeding and per row fed; per
    call of the predictor and per request in it."""

    fixed: float
    per_request: float
    per_token: float
    per_pair: float
    per_context_token: float
    draft_level: float
    draft_level_request: float
    feed: float
    feed_row: float
    predict: float
    predict_request: float

    def verify(self, requests: float, tokens: float, pairs: float, context_tokens: float) -> float:
        """Seconds of everything after the choice."""
        return (
            self.fixed
            + self.per_request * requests
            + self.per_token * tokens
            + self.per_pair * pairs
            + self.per_context_token * context_tokens
        )

    def draft(self, levels: float, requests: float) -> float:
        """Seconds of `levels` draft forwards for so many requests."""
        return levels * (self.draft_level + self.draft_level_request * requests)

    def feeding(self, rows: float) -> float:
        """Seconds of feeding the drafter so many committed positions, all requests in one call."""
        return self.feed + self.feed_row * rows if rows > 0 else 0.0

    def predicting(self, requests: float) -> float:
        """Seconds of one call to the predictor."""
        return self.predict + self.predict_request * requests if requests > 0 else 0.0

    def total(self, features: StepFeatures) -> float:
        """Seconds of the whole step."""
        f = features
        return (
            self.verify(f.requests, f.tokens, f.pairs, f.context_tokens)
            + self.draft(f.draft_levels, f.drafted_requests)
            + self.feeding(f.fed_rows)
            + self.predicting(f.predicted_requests)
        )


@dataclass(frozen=True)
class FitQuality:
    """How well a cost describes measured steps. error: median of |predicted - measured| / measured; r_squared: share of
    the variance that is explained, outliers counted less; draft is over steps that drafted or fed, step is the whole."""

    samples: int
    verify_error: float
    verify_r_squared: float
    draft_error: float
    draft_r_squared: float
    step_error: float
    step_r_squared: float


Sample = tuple[StepFeatures, StepSeconds]


@dataclass(frozen=True)
class Part:
    """One measured figure: the coefficients that make it up and, for a step, the amounts that they multiply."""

    what: str
    names: tuple[str, ...]
    amounts: Callable[[StepFeatures], tuple[float, ...]]
    measured: Callable[[StepSeconds], float]


VERIFYING, DRAFTING, PREDICTING = PARTS = (
    Part(
        "were verified",
        ("fixed", "per_request", "per_token", "per_pair", "per_context_token"),
        lambda f: (1.0, f.requests, f.tokens, f.pairs, f.context_tokens),
        lambda s: s.verify,
    ),
    Part(
        "drafted",
        ("draft_level", "draft_level_request", "feed", "feed_row"),
        lambda f: (f.draft_levels, f.draft_levels * f.drafted_requests, float(f.fed_rows > 0), f.fed_rows),
        lambda s: s.draft,
    ),
    Part(
        "asked the predictor",
        ("predict", "predict_request"),
        lambda f: (float(f.predicted_requests > 0), f.predicted_requests),
        lambda s: s.predict,
    ),
)


def charges(cost: StepCost, features: StepFeatures) -> dict[str, float]:
    """Seconds of the step by coefficient; they add up to cost.total(features)."""
    return {
        name: getattr(cost, name) * amount
        for part in PARTS
        for name, amount in zip(part.names, part.amounts(features), strict=True)
    }


def distinct_pairs(experts: Sequence[np.ndarray]) -> int:
    """experts: integer ids [rows, layers, top_k] per request -> distinct (layer, expert) pairs of the step."""
    ids = np.concatenate(experts).astype(np.int64)
    return len(np.unique(ids + (np.arange(ids.shape[1]) << 16)[:, None]))  # ids fit 16 bits (TargetGeometry)
