"""How well the union of experts over a draft tree is predicted: what a verification step's cost depends on. Numpy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .data import Window

CHAIN_TOKENS = range(4, 11)  # lengths of the chains that stand for trees where no draft was rejected


class UnionScores:
    """Recall: share of the experts that a tree really used, found in the predicted union. Precision: the reverse."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._recall, self._precision, self._entries = 0.0, 0.0, 0

    def add(self, predicted: np.ndarray, routes: np.ndarray) -> None:
        """One tree: int [n, layers, top_k] twice; a layer with an unknown expert is left out."""
        whole = (routes >= 0).all((0, 2))
        if not whole.any():
            return
        ours, theirs = (_union(ids[:, whole], self._experts) for ids in (predicted, routes))
        both = (ours & theirs).sum(1)
        self._recall += float((both / theirs.sum(1)).sum())
        self._precision += float((both / ours.sum(1)).sum())
        self._entries += int(whole.sum())

    def report(self) -> dict[str, float]:
        """Means over the layers of all trees."""
        entries = max(self._entries, 1)
        return {
            "union_recall": round(self._recall / entries, 4),
            "union_precision": round(self._precision / entries, 4),
        }


def _union(ids: np.ndarray, experts: int) -> np.ndarray:
    """int [n, layers, k] -> bool [layers, experts]."""
    union = np.zeros((ids.shape[1], experts), bool)
    union[np.arange(ids.shape[1])[None, :, None], ids] = True
    return union


def trees(window: Window, rows: np.ndarray, random: np.random.Generator) -> Iterator[np.ndarray]:
    """Indices into `rows` of what one step would verify together: a token with the rejected drafts that hang from it, or,
    in a window without any, chains of 4 to 10 tokens."""
    if (window.depths[rows] > 0).any():
        anchors = window.anchors
        for anchor in np.unique(anchors[rows[window.depths[rows] > 0]]):
            yield np.flatnonzero(anchors[rows] == anchor)
        return
    start = 0
    while start + CHAIN_TOKENS[0] <= len(rows):
        size = int(random.integers(CHAIN_TOKENS[0], CHAIN_TOKENS[-1] + 1))
        yield np.arange(start, min(start + size, len(rows)))
        start += size
