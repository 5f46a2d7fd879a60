"""EAGLE-3's own selection: the most probable paths, whatever experts they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import DraftTree, Footprints
from .base import FixedPolicy
from .options import check_gamma


class LikelihoodPolicy(FixedPolicy):
    """The gamma nodes of largest path probability P in each tree, every request for itself.

    gamma: nodes per request and step, 1 to 64 (the paper verifies 4).
    """

    name = "likelihood"
    needs_drafts = True
    needs_footprints = False

    def __init__(self, gamma: int = 4) -> None:
        self.gamma = check_gamma(gamma)

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """int32 node indices per tree; footprints are ignored. Ties go to the ancestor, then to the lower index."""
        return [self._top(tree) for tree in trees]

    def _top(self, tree: DraftTree) -> np.ndarray:
        if len(tree) <= self.gamma:
            return np.arange(len(tree), dtype=np.int32)
        order = np.argsort(-_never_above_parent(tree), kind="stable")  # stable: equal P keeps the lower index first
        return np.sort(order[: self.gamma]).astype(np.int32)


def _never_above_parent(tree: DraftTree) -> np.ndarray:
    """P with each node at most its parent, float32 [N]. A drafter that rounds may break that; closure must not."""
    inner = np.flatnonzero(tree.parents >= 0)
    if (tree.probabilities[inner] <= tree.probabilities[tree.parents[inner]]).all():
        return tree.probabilities
    capped = tree.probabilities.copy()
    for node in inner:
        capped[node] = np.minimum(capped[node], capped[tree.parents[node]])
    return capped
