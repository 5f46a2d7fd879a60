"""Plain autoregressive decoding as a policy: nothing is drafted, nothing is chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import DraftTree, Footprints
from .base import FixedPolicy


class NonePolicy(FixedPolicy):
    """Chooses no node of any tree; the step verifies the roots alone."""

    name = "none"
    needs_drafts = False
    needs_footprints = False

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """One empty int32 array per tree."""
        return [np.zeros(0, np.int32) for _ in trees]
