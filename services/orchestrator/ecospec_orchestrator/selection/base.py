"""The seam that decides which draft nodes are worth verifying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..core import DraftTree, Footprints


class SelectionPolicy(Protocol):
    """Chooses for the whole batch at once: one step, one union of experts."""

    name: str
    needs_drafts: bool  # False: the scheduler neither drafts nor predicts
    needs_footprints: bool  # False: the scheduler does not call the predictor

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """One int32 array of node indices per tree: ascending, unique, ancestor-closed (possibly empty).

        footprints is None when no prediction came for this step; a policy that needs them then falls back to
        likelihood for this step. Equal scores go to the ancestor, then to the lower (tree, node) index.
        """
        ...
