"""Cost-aware draft selection as in EcoSpec (arXiv 2607.12696): probability per expert that is not yet read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core import DraftTree, Footprints
from .base import FixedPolicy
from .kernel import greedy_marginal, warm_up
from .likelihood import LikelihoodPolicy
from .options import check_count, check_eps, check_expert_buffer, check_flag, check_gamma
from .pack import pack


class EcoSpecPolicy(FixedPolicy):
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
    expert_buffer (ablations): "batch" as above; "request": one B per request; "none": the paper's static trajectory cost,
    |E_traj(t)| beyond the node's own root (seed_root) whatever is chosen.
    """

    name = "ecospec"
    needs_drafts = True
    needs_footprints = True

    def __init__(
        self, top_k: int, gamma: int = 4, eps: float = 1.0, seed_root: bool = True, expert_buffer: str = "batch"
    ) -> None:
        self.top_k = check_count("top_k", top_k)
        self.gamma = check_gamma(gamma)
        self.eps = check_eps(eps)
        self.seed_root = check_flag("seed_root", seed_root)
        self.expert_buffer = expert_buffer
        self._buffer_mode = check_expert_buffer(expert_buffer)
        self._without_footprints = LikelihoodPolicy(gamma)
        warm_up()

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """int32 node indices per tree: ascending, ancestor-closed. Equal scores go to the ancestor, then to the lower
        (tree, node) index. Without footprints: likelihood's choice. Raises ValueError for arrays that do not fit."""
        if footprints is None:
            return self._without_footprints.choose(trees, None)
        if not trees:
            return []
        packed = pack(trees, footprints)
        chosen = greedy_marginal(
            packed.experts,
            packed.known,
            packed.values,
            packed.parents,
            packed.offsets,
            self.gamma,
            self.eps,
            packed.layers * self.top_k,
            self.seed_root,
            self._buffer_mode,
        )
        return packed.nodes(chosen)
