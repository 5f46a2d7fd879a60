"""The greedy of cost-aware selection as tensor operations: fixed shapes, no host synchronisation, capturable in a CUDA graph.

It makes exactly the choice of selection.kernel.greedy_marginal, which stays the definition; here every node is priced in every
round, which a device does at once. It can run on any torch device. Torch and the standard library only: it also runs inside the
process of another engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..expert_buffers import BUFFER_BATCH, BUFFER_NONE, BUFFER_REQUEST


@dataclass(frozen=True)
class DevicePack:
    """The trees of a step as in selection.pack.Pack, on a device; rows hold tree after tree, each with its root first.

    experts: int64 [rows, words], the uint64 bitsets by their bits; known: bool [rows]; values: float64 [rows]; parents: int64
    [rows], row numbers of the whole pack, -1 for roots; tree: int64 [rows], the tree of every row, counted from 0. A padding
    row is a root of any tree that is not known: it is never chosen and changes nothing.
    """

    experts: torch.Tensor
    known: torch.Tensor
    values: torch.Tensor
    parents: torch.Tensor
    tree: torch.Tensor


def greedy_marginal(
    pack: DevicePack,
    trees: int,
    gamma: int,
    eps: float,
    unknown_cost: int,
    seed_root: bool,
    buffer_mode: int,
    lockstep: bool = False,
) -> torch.Tensor:
    """bool [rows], True for chosen nodes: gamma per tree, or all of its nodes. Arguments as in selection.kernel.

    trees: more than every number in pack.tree. Takes gamma * trees rounds of small operations: the batch is one greedy order
    with one buffer under BUFFER_BATCH. lockstep: gamma rounds, in each of which every tree opens its best node, all priced
    against the buffer as the round found it. With one tree it is the same choice; with several it is not, but where every
    tree takes gamma nodes in any case, the order among trees is all that differs.
    """
    state = _Prices(pack, trees, unknown_cost, seed_root, buffer_mode)
    rows = len(pack.parents)
    number = torch.arange(rows, device=pack.parents.device)
    is_root = pack.parents < 0
    above = pack.parents.clamp(min=0)
    # Like the kernel, whose comparisons a NaN never wins.
    values = pack.values.masked_fill(pack.values.isnan(), -torch.inf)
    reached = is_root.clone()
    taken = torch.zeros(trees, dtype=torch.int64, device=number.device)
    for _ in range(gamma if lockstep else gamma * trees):
        frontier = reached[above] & ~reached & (taken < gamma)[pack.tree]
        scores = (values / (state.costs().double() + eps)).masked_fill_(~frontier, -torch.inf)
        opened = _first_of_best(scores, number, pack.tree, trees) if lockstep else _first_of_best(scores, number)
        reached |= opened
        taken.index_add_(0, pack.tree, opened.long())
        state.add(opened)
    return reached & ~is_root


def _first_of_best(
    scores: torch.Tensor, number: torch.Tensor, tree: torch.Tensor | None = None, trees: int = 1
) -> torch.Tensor:
    """bool [rows]: the first of the rows of the best score, whatever a device's argmax would take: ancestors and earlier trees
    come first. One row of all, or one of each tree; none where all scores are -inf."""
    rows = len(scores)
    if tree is None:
        best = scores.max()
        first = torch.where(scores == best, number, rows).min()
    else:
        best = scores.new_full((trees,), -torch.inf).scatter_reduce(0, tree, scores, "amax")[tree]
        candidates = torch.where(scores == best, number, rows)
        first = number.new_full((trees,), rows).scatter_reduce(0, tree, candidates, "amin")[tree]
    return (number == first) & (best > -torch.inf)


class _Prices:
    """What every row would add to the buffer, in experts; int64 [rows]."""

    def __init__(self, pack: DevicePack, trees: int, unknown_cost: int, seed_root: bool, buffer_mode: int) -> None:
        if buffer_mode not in (BUFFER_BATCH, BUFFER_REQUEST, BUFFER_NONE):
            raise ValueError(f"buffer_mode is {buffer_mode!r}; take BUFFER_BATCH, BUFFER_REQUEST or BUFFER_NONE.")
        self.unknown_cost, self.known = unknown_cost, pack.known
        self.fixed: torch.Tensor | None = None  # BUFFER_NONE: costs that no choice changes
        self.bits = unpack_bits(pack.experts) & pack.known[:, None]  # unknown rows never touch the buffer
        self.tree, self.shared = pack.tree, buffer_mode == BUFFER_BATCH
        self.buffer = torch.zeros(
            1 if self.shared else trees, self.bits.shape[1], dtype=torch.bool, device=self.bits.device
        )
        if seed_root:
            self.add(pack.parents < 0)
        if buffer_mode == BUFFER_NONE:
            self.fixed = self._trajectories(pack)

    def costs(self) -> torch.Tensor:
        return self._marginal(self.bits, ~self.known) if self.fixed is None else self.fixed

    def add(self, opened: torch.Tensor) -> None:
        """Put the experts of the opened rows, bool [rows], into the buffers of their trees."""
        if self.fixed is not None:
            return
        if self.shared:
            self.buffer |= (self.bits & opened[:, None]).any(0)
        else:
            added = torch.zeros(self.buffer.shape, dtype=torch.int32, device=self.buffer.device)
            added.index_add_(0, self.tree, (self.bits & opened[:, None]).int())
            self.buffer |= added > 0

    def _marginal(self, bits: torch.Tensor, unknown: torch.Tensor) -> torch.Tensor:
        """Experts beyond the buffer plus unknown_cost per unknown node (unknown: bool or counts)."""
        buffer = self.buffer if self.shared else self.buffer[self.tree]
        return (bits & ~buffer).sum(1) + self.unknown_cost * unknown

    def _trajectories(self, pack: DevicePack) -> torch.Tensor:
        """Costs of whole paths, each root's own row not counted, by joining rows with ever farther ancestors."""
        is_root = pack.parents < 0
        bits, unknown = self.bits & ~is_root[:, None], (~pack.known & ~is_root).long()
        up = torch.where(is_root, torch.arange(len(is_root), device=is_root.device), pack.parents)
        for _ in range(len(is_root).bit_length()):
            bits, unknown, up = bits | bits[up], unknown + unknown[up], up[up]
        return self._marginal(bits, unknown)


def unpack_bits(experts: torch.Tensor) -> torch.Tensor:
    """int64 [rows, words] -> bool [rows, 64 * words], in the order of the bytes in memory."""
    eight = torch.arange(8, dtype=torch.uint8, device=experts.device)
    return (experts.contiguous().view(torch.uint8)[:, :, None] >> eight & 1).bool().flatten(1)
