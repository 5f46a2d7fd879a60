"""Cost-aware draft selection as in EcoSpec (arXiv 2607.12696): probability per expert that is not yet read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import ROOT, DraftTree, Footprints
from .kernel import greedy_marginal, warm_up
from .likelihood import LikelihoodPolicy
from .options import check_count, check_eps, check_flag, check_gamma


class EcoSpecPolicy:
    """Greedy by score(t) = P(t) / (|E_traj(t) minus B| + eps), gamma nodes per request.

    E_traj(t): predicted (layer, expert) pairs of all nodes on the path from the root to t, t included, the root itself
    not: it is verified whatever is chosen. B: the pairs of everything chosen so far in this step, one buffer and one
    greedy order for all requests of the batch; a request that has its gamma nodes takes no more.

    top_k: experts per token and layer of the target. A node without a prediction counts as top_k fresh pairs in every
    layer, shared with nobody: it adds nothing to B, and others' pairs do not make it cheaper.
    gamma: nodes per request and step, 1 to 64; the paper uses 4.
    eps: above 0. The paper does not state it; 1.0 is our choice: one (layer, expert) pair, little beside costs in the
    hundreds, and among nodes without new experts P decides. Scores are float64: equal operands give equal scores.
    seed_root: start B with the roots' own predicted experts, which the step reads in any case (default). False starts B
    empty, as in the paper.
    """

    name = "ecospec"
    needs_drafts = True
    needs_footprints = True

    def __init__(self, top_k: int, gamma: int = 4, eps: float = 1.0, seed_root: bool = True) -> None:
        self.top_k = check_count("top_k", top_k)
        self.gamma = check_gamma(gamma)
        self.eps = check_eps(eps)
        self.seed_root = check_flag("seed_root", seed_root)
        self._without_footprints = LikelihoodPolicy(gamma)
        warm_up()

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """int32 node indices per tree: ascending, ancestor-closed. Equal scores go to the ancestor, then to the lower
        (tree, node) index. Without footprints: likelihood's choice. Raises ValueError for arrays that do not fit."""
        if footprints is None:
            return self._without_footprints.choose(trees, None)
        if not trees:
            return []
        layers = _check(trees, footprints)
        sizes = np.array([len(tree) + 1 for tree in trees], np.int64)
        offsets = np.zeros(len(trees) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        # A fresh pack also gives the kernel one array type: read-only input would compile it anew in a request.
        experts = np.concatenate([footprint.experts for footprint in footprints])
        probabilities = np.ones(offsets[-1], np.float64)
        parents = np.full(offsets[-1], -1, np.int64)
        for tree, start, end in zip(trees, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            probabilities[start + 1 : end] = tree.probabilities
            np.add(tree.parents, start + 1, out=parents[start + 1 : end])
        chosen = greedy_marginal(
            experts.reshape(len(experts), -1),
            np.concatenate([footprint.known for footprint in footprints]),
            probabilities,
            parents,
            offsets,
            self.gamma,
            self.eps,
            layers * self.top_k,
            self.seed_root,
        )
        rows = np.flatnonzero(chosen)
        cuts = np.searchsorted(rows, offsets).tolist()
        starts = offsets.tolist()
        return [(rows[cuts[i] : cuts[i + 1]] - (starts[i] + 1)).astype(np.int32) for i in range(len(trees))]


def _check(trees: Sequence[DraftTree], footprints: Sequence[Footprints]) -> int:
    """The number of layers; ValueError unless every footprint fits its tree and parents come before children."""
    if len(trees) != len(footprints):
        raise ValueError(f"{len(footprints)} footprints for {len(trees)} trees; one footprint per tree is needed.")
    layers, words = footprints[0].experts.shape[1:]
    for index, (tree, footprint) in enumerate(zip(trees, footprints, strict=True)):
        rows = len(tree) + 1
        if footprint.experts.shape != (rows, layers, words) or footprint.experts.dtype != np.uint64:
            raise ValueError(
                f"footprint {index} holds {footprint.experts.dtype} {footprint.experts.shape}; "
                f"uint64 {(rows, layers, words)} is needed."
            )
        if footprint.known.shape != (rows,) or footprint.known.dtype != np.bool_:
            raise ValueError(
                f"known of footprint {index} holds {footprint.known.dtype} {footprint.known.shape}; bool {(rows,)} is needed."
            )
        if len(tree) and not (tree.parents.min() >= ROOT and (tree.parents < np.arange(len(tree))).all()):
            raise ValueError(f"tree {index} has a parent that does not come before its child; order nodes by level.")
    return int(layers)
