"""How many (layer, expert) pairs a step reads: counted where experts are known, guessed from recent steps where not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ecospec_proto.codec import pack_bitsets

from .base import StepOutcome
from .means import Mean, nearest
from .pack import Pack

RECENT_STEPS = 60.0


@dataclass(frozen=True)
class TargetShape:
    """layers: MoE layers; experts: routed experts per layer; top_k: routed experts per token and layer."""

    layers: int
    experts: int
    top_k: int


def rank_masks(placement: np.ndarray, shape: TargetShape) -> np.ndarray:
    """int [layers, experts], the rank of every expert -> uint64 [ranks, layers * words], the bits of each rank's experts.

    Raises ValueError for another shape or negative ranks.
    """
    if placement.shape != (shape.layers, shape.experts) or placement.dtype.kind not in "iu" or placement.min() < 0:
        raise ValueError(
            f"placement holds {placement.dtype} {placement.shape}; ranks from 0 for {(shape.layers, shape.experts)} are needed."
        )
    words = -(-shape.experts // 64)
    masks = np.zeros((int(placement.max()) + 1, shape.layers, words), np.uint64)
    for expert in range(shape.experts):
        bit = np.uint64(1) << np.uint64(expert % 64)
        for layer in range(shape.layers):
            masks[placement[layer, expert], layer, expert // 64] |= bit
    return masks.reshape(len(masks), -1)


class PairEstimates:
    """placement: int [layers, experts], the expert-parallel rank of every expert, and pairs are then those of each layer's
    fullest rank; None: one rank. Raises ValueError for a placement of another shape."""

    def __init__(self, shape: TargetShape, placement: np.ndarray | None) -> None:
        self._shape = shape
        self.masks = None if placement is None else rank_masks(placement, shape)
        self._ranks = 1 if self.masks is None else len(self.masks)
        self._roots: dict[int, Mean] = {}  # by requests in the batch
        self._unknown_share: dict[int, Mean] = {}
        self._known_factor = Mean(RECENT_STEPS)

    def roots(self, requests: int) -> float:
        """Pairs that the roots of so many requests read."""
        apart = self._shape.layers * self._shape.experts * self._hit(requests) / self._ranks
        seen = self._roots.get(requests)
        return apart if seen is None else seen.value(apart, 1.0)

    def guess(self, root_pairs: float, nodes: int) -> float:
        """New pairs of so many unknown nodes if experts were drawn at random."""
        left = max(0.0, self._shape.layers * self._shape.experts - root_pairs * self._ranks)
        return left * self._hit(nodes) / self._ranks

    def share(self, requests: int) -> float:
        """Of that guess, what unknown nodes really add in a batch of so many."""
        seen = nearest(self._unknown_share, requests)
        # Before anything was seen: nodes of one tree are known to share (about half), and to charge too little costs more.
        return 0.7 if seen is None else min(2.0, max(0.05, seen.value(0.7, 1.0)))

    @property
    def known_factor(self) -> float:
        """Pairs that known nodes really add, over those predicted."""
        return min(2.0, max(0.5, self._known_factor.value(1.0, float(self._shape.layers * self._shape.top_k))))

    def added(self, packed: Pack, chosen: np.ndarray) -> float:
        """Pairs that the predictions say the chosen rows (bool) add to the roots'."""
        roots = np.zeros(len(packed.known), bool)
        roots[packed.offsets[:-1]] = True
        return self._load(packed.experts[chosen | roots]) - self._load(packed.experts[roots])

    def learn(self, outcome: StepOutcome, predicted_new: float | None, guessed_new: float | None) -> int:
        """Take in a step of which so many new pairs were predicted or guessed; returns the pairs that it read."""
        requests = len(outcome.experts)
        roots = np.stack([experts[0] for experts in outcome.experts])
        rows = np.concatenate(list(outcome.experts))
        packed = (pack_bitsets(ids, self._shape.experts).reshape(len(ids), -1) for ids in (roots, rows))
        root_pairs, pairs = (self._load(bitsets) for bitsets in packed)
        self._roots.setdefault(requests, Mean(RECENT_STEPS)).add(root_pairs)
        if predicted_new:
            self._known_factor.add(pairs - root_pairs, predicted_new)
        if guessed_new:
            self._unknown_share.setdefault(requests, Mean(RECENT_STEPS)).add(pairs - root_pairs, guessed_new)
        return pairs

    def _hit(self, rows: int) -> float:
        """Share of a layer's experts that so many rows hit if each drew its own at random."""
        return 1 - (1 - self._shape.top_k / self._shape.experts) ** rows

    def _load(self, bitsets: np.ndarray) -> int:
        """uint64 [rows, layers * words] -> pairs of the union, with several ranks those of each layer's fullest rank."""
        union = np.bitwise_or.reduce(bitsets, axis=0)
        if self.masks is None:
            return int(np.bitwise_count(union).sum())
        loads = np.bitwise_count(union & self.masks).reshape(self._ranks, self._shape.layers, -1).sum(-1)
        return int(loads.max(0).sum())
