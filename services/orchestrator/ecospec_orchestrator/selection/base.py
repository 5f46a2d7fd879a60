"""The seam that decides what a step does beyond the roots: for whom to draft, how deep, whom to ask, what to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..core import Decision, DraftTree, Footprints


@dataclass(frozen=True)
class BatchView:
    """What a policy may know of the batch before a step; one entry per request.

    temperatures: float64 [R]; context_tokens: int64 [R], committed tokens; remaining_tokens: int64 [R], tokens that the
    request may still emit; unfed_rows: int64 [R], committed positions that the drafter was not fed yet; may_draft: bool [R], False where
    the request wants plain decoding, or True for all.
    """

    request_ids: tuple[str, ...]
    temperatures: np.ndarray
    context_tokens: np.ndarray
    remaining_tokens: np.ndarray
    unfed_rows: np.ndarray
    may_draft: np.ndarray | bool = True

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True)
class StepOutcome:
    """What the step really did; lists have one entry per request.

    trees: the drafted trees; chosen: int32 node indices; accepted_nodes: int32 node indices, a path; mass: float64
    [len(tree)], the probability that the target gives this node's token after its parent's path (1 or 0 at temperature
    0), NaN where it was not observed; experts: [1 + chosen, layers, top_k] ids that the rows used, the root first.
    verify_seconds: everything after the choice: target forward, acceptance, commit. draft_seconds: drafting and feeding.
    """

    trees: Sequence[DraftTree]
    chosen: Sequence[np.ndarray]
    accepted_nodes: Sequence[np.ndarray]
    mass: Sequence[np.ndarray]
    experts: Sequence[np.ndarray]
    draft_seconds: float
    predict_seconds: float
    select_seconds: float
    verify_seconds: float
    fed_rows: int
    draft_levels: int
    drafted_requests: int
    predicted: bool


@dataclass(frozen=True)
class PolicyHealth:
    """How far the policy's own estimates can be trusted, asked at a scrape. Errors are shares (0.1: ten percent)."""

    calibration_error: Mapping[str, float] = field(default_factory=dict)  # by class of temperature
    cost_error: float = 0.0
    cost_drifted: bool = False
    profile_valid: bool = False


class SelectionPolicy(Protocol):
    """Decides for the whole batch at once: one step, one union of experts. Called by one thread, in this order:
    begin_step, another_level (after each draft level), wants_footprints, choose, end_step."""

    name: str
    needs_drafts: bool  # False: the scheduler never drafts, and does not keep the drafter up to date
    needs_footprints: bool  # False: the predictor is never asked
    overlaps_prediction: bool  # True: asks while the last level is drafted and goes without that level's experts

    def begin_step(self, batch: BatchView) -> np.ndarray:
        """bool [R]: the requests to draft for."""
        ...

    def another_level(self, trees: Sequence[DraftTree], level: int) -> bool:
        """trees hold levels 1 to `level` (empty where nothing is drafted); is it worth drafting the next one?"""
        ...

    def wants_footprints(self, trees: Sequence[DraftTree]) -> bool:
        """Is it worth asking the predictor about these nodes? Asked at most once per step."""
        ...

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """One int32 array of node indices per tree: ascending, unique, ancestor-closed (possibly empty).

        footprints is None when no prediction came for this step; a fixed policy that needs them then falls back to
        likelihood for this step. Equal scores go to the ancestor, then to the lower (tree, node) index.
        """
        ...

    def end_step(self, outcome: StepOutcome) -> Decision:
        """Learn from the step and say why it did what it did."""
        ...

    def health(self) -> PolicyHealth: ...


class FixedPolicy:
    """What policies have in common that always do the same: draft for everybody to the full depth, or never."""

    name: str
    needs_drafts: bool
    needs_footprints: bool
    overlaps_prediction = False

    def begin_step(self, batch: BatchView) -> np.ndarray:
        return np.full(len(batch), self.needs_drafts)

    def another_level(self, trees: Sequence[DraftTree], level: int) -> bool:
        return True

    def wants_footprints(self, trees: Sequence[DraftTree]) -> bool:
        return self.needs_footprints

    def end_step(self, outcome: StepOutcome) -> Decision:
        speculated = any(len(nodes) for nodes in outcome.chosen)
        return Decision(
            self.name,
            None if speculated else "nothing_drafted" if self.needs_drafts else "policy",
            prediction="asked" if outcome.predicted else "off",
        )

    def health(self) -> PolicyHealth:
        return PolicyHealth()  # no estimates, so nothing to trust
