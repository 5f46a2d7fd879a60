"""Plain autoregressive decoding as a policy: nothing is drafted, nothing is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import Decision, DraftTree, Footprints
from .base import BatchView, FixedPolicy, StepOutcome
from .options import check_flag


class NonePolicy(FixedPolicy):
    """Chooses no node of any tree; the step verifies the roots alone. keep_drafter: what is decided is fed to the drafter all the same,
    so that another policy may take over in the middle of an answer."""

    name = "none"
    needs_footprints = False

    def __init__(self, keep_drafter: bool = False) -> None:
        self.needs_drafts = check_flag("keep_drafter", keep_drafter)

    def begin_step(self, batch: BatchView) -> np.ndarray:
        return np.zeros(len(batch), bool)

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """One empty int32 array per tree."""
        return [np.zeros(0, np.int32) for _ in trees]

    def end_step(self, outcome: StepOutcome) -> Decision:
        return Decision(self.name, "policy", prediction="off")
