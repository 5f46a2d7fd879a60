"""Trees and footprints of a step as the flat arrays that the kernels take, and their mask as indices again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core import ROOT, DraftTree, Footprints


@dataclass(frozen=True)
class Pack:
    """Rows hold tree after tree, each with its root first.

    experts: uint64 [rows, layers*words] ([rows, 0] without footprints); known: bool [rows]; values: float64 [rows], 1 for
    roots; parents: int64 [rows], row numbers of the whole pack, -1 for roots; offsets: int64 [trees + 1]; layers: 0
    without footprints. All arrays are fresh: read-only or strided input would compile a kernel anew in a request.
    """

    experts: np.ndarray
    known: np.ndarray
    values: np.ndarray
    parents: np.ndarray
    offsets: np.ndarray
    layers: int

    def nodes(self, chosen: np.ndarray) -> list[np.ndarray]:
        """int32 node indices per tree, ascending, of a bool [rows] mask that holds no root."""
        rows = np.flatnonzero(chosen)
        cuts = np.searchsorted(rows, self.offsets).tolist()
        starts = self.offsets.tolist()
        return [(rows[cuts[i] : cuts[i + 1]] - (starts[i] + 1)).astype(np.int32) for i in range(len(starts) - 1)]


def pack(
    trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None, values: Sequence[np.ndarray] | None = None
) -> Pack:
    """Pack at least one tree. values: float [len(tree)] per tree, the drafter's own path probabilities when None. Without
    footprints no row is known. Raises ValueError for arrays that do not fit."""
    layers = _check(trees, footprints)
    sizes = np.array([len(tree) + 1 for tree in trees], np.int64)
    offsets = np.zeros(len(trees) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    rows = int(offsets[-1])
    flat_values = np.ones(rows, np.float64)
    parents = np.full(rows, -1, np.int64)
    for index, (tree, start, end) in enumerate(zip(trees, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        flat_values[start + 1 : end] = tree.probabilities if values is None else values[index]
        np.add(tree.parents, start + 1, out=parents[start + 1 : end])
    if footprints is None:
        return Pack(np.zeros((rows, 0), np.uint64), np.zeros(rows, np.bool_), flat_values, parents, offsets, 0)
    experts = np.concatenate([footprint.experts for footprint in footprints])
    known = np.concatenate([footprint.known for footprint in footprints])
    return Pack(experts.reshape(rows, -1), known, flat_values, parents, offsets, layers)


def _check(trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> int:
    """The number of layers; ValueError unless every footprint fits its tree and parents come before children."""
    for index, tree in enumerate(trees):
        if len(tree) and not (tree.parents.min() >= ROOT and (tree.parents < np.arange(len(tree))).all()):
            raise ValueError(f"tree {index} has a parent that does not come before its child; order nodes by level.")
    if footprints is None:
        return 0
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
    return int(layers)
