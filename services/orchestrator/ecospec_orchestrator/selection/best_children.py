"""What the next draft level may bring: how likely the best child of the best node has been lately, by kind and depth."""

from __future__ import annotations

import numpy as np

from ..core import DraftTree

SAMPLES = 64  # remembered conditionals per kind and depth


class BestChildren:
    """kinds: of traffic. Before anything was seen, conditionals are all over the range."""

    def __init__(self, kinds: int, max_levels: int) -> None:
        self._max_levels = max_levels
        self._conditionals = np.tile((np.arange(SAMPLES) + 0.5) / SAMPLES, (kinds, max_levels + 1, 1))
        self._at = np.zeros((kinds, max_levels + 1), np.int64)

    def of(self, kind: int, depth: int) -> np.ndarray:
        """float64 [SAMPLES]: conditionals at this depth, those of the deepest level below it."""
        return self._conditionals[kind, min(depth, self._max_levels)]

    def remember(self, tree: DraftTree, values: np.ndarray, kind: int) -> None:
        """values: calibrated path probabilities, float64 [N]; of each level the best child of the best node counts."""
        above, parent = 1.0, -1
        for depth in range(1, self._max_levels + 1):
            children = np.flatnonzero(tree.parents == parent)
            if not len(children):
                return
            best = int(children[values[children].argmax()])
            if above > 0:
                self._conditionals[kind, depth, self._at[kind, depth] % SAMPLES] = values[best] / above
                self._at[kind, depth] += 1
            above, parent = float(values[best]), best
