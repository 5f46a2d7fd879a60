"""What the goodput policy remembers: of kinds of traffic, of requests, of the step under way and of a rest between looks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .base import BatchView
from .cost import StepCost
from .means import Mean, nearest

PRIOR_STEPS = 2.0  # what others of its kind have shown counts like so many steps of the request's own
GAIN_STEPS = 12.0  # a request's own gain is a mean over about so many drafted steps: text changes within a paragraph
OWN_NODES = 60.0  # a request's own bias of acceptance, in observed nodes
OWN_PRIOR = 6.0  # expected acceptances that say "as usual"
OWN_RANGE = (0.3, 1.5)
RATE_STEPS = 60.0  # a request's own rate, in steps; shorter and one lucky step would make the policy shy
KIND_STEPS = 60.0  # what is known of a kind of traffic


@dataclass
class Kind:
    """What one class of temperature has shown. rate: tokens per token that plain decoding makes in the same time."""

    rate: Mean = field(default_factory=lambda: Mean(KIND_STEPS))
    gains: dict[int, Mean] = field(default_factory=dict)  # by requests in the batch: tokens net of verification
    trials: int = 0

    def gain(self, requests: int) -> float:
        """The prior of a request's gain in a batch of so many; the nearest size where this one was not seen."""
        seen = nearest(self.gains, requests)
        return 0.0 if seen is None else seen.value(0.0, 1e-9)


@dataclass
class OwnRecord:
    """What one request has shown. rate: as in Kind; gain: tokens net of verification, per drafted step."""

    rate: Mean = field(default_factory=lambda: Mean(RATE_STEPS))
    gain: Mean = field(default_factory=lambda: Mean(GAIN_STEPS))
    acceptance: Mean = field(default_factory=lambda: Mean(OWN_NODES))  # observed per expected
    looks: int = 0  # steps drafted

    @property
    def factor(self) -> float:
        """Conditional acceptance of this request's drafts over what is usual for such probabilities."""
        return min(OWN_RANGE[1], max(OWN_RANGE[0], self.acceptance.value(1.0, OWN_PRIOR)))


@dataclass
class StepPlan:
    """The step under way."""

    batch: BatchView
    cost: StepCost
    kinds: np.ndarray  # int [R], index into CLASSES
    root_pairs: float
    plain_seconds: float
    rate: float  # tokens per second
    probe: bool = False
    drafts: int = 0  # requests drafted for
    prediction: str = "off"
    reason: str | None = None
    nodes: list[np.ndarray] = field(default_factory=list)
    node_values: list[np.ndarray] = field(default_factory=list)  # calibrated P of the chosen nodes, per request
    tokens: float = 0.0
    extra_seconds: float = 0.0  # of verification, for the chosen nodes
    predicted_new: float | None = None  # new pairs by prediction, when every chosen node has one
    guessed_new: float | None = None  # new pairs at unknown_share 1, when no chosen node has a prediction


@dataclass
class Rest:
    """Plain steps until drafting is tried again. left, taken: steps; plain_seconds: of each, by the cost model and at its usual
    pace; earned_seconds: what each adds to the time that looking may take."""

    request_ids: tuple[str, ...]
    kinds: list[int]
    left: int
    plain_seconds: float
    earned_seconds: float
    nodes: list[np.ndarray]
    wanted: np.ndarray
    taken: int = 0
