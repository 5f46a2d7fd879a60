"""Footprints from the target itself, for ablations: what perfect, or exactly so imperfect, predictions would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ecospec_proto.codec import pack_bitsets

from ..core import Footprints, SettingsError
from ..engine.base import Engine
from ..step import verify_item
from .base import FootprintSource, TreeContext


class OracleFootprintSource(FootprintSource):
    """Verifies the whole trees on the engine, commits nothing, and reports the experts that the rows really used.

    The rows stay behind the committed end of each sequence, where the step's own verification overwrites them, so its
    logits do not change. It costs a target forward per call: measure what is chosen, not how long the step took.

    accuracy a, 0 to 1: each expert of each (row, layer) is kept with probability a and otherwise replaced by one that
    the row does not use there, uniformly, no two alike; so the expected top-k accuracy is exactly a. Below 1 the target
    needs at least 2 * top_k experts, or there might be too few to replace with. seed: of these random numbers.
    Raises SettingsError. Must be called by the thread that owns the engine.
    """

    def __init__(self, engine: Engine, accuracy: float = 1.0, seed: int = 0) -> None:
        if isinstance(accuracy, bool) or not isinstance(accuracy, (int, float)) or not 0 <= accuracy <= 1:
            raise SettingsError(f"the oracle's accuracy is {accuracy!r}; it must be a number from 0 to 1.")
        geometry = engine.geometry
        if accuracy < 1 and geometry.experts < 2 * geometry.top_k:
            raise SettingsError(
                f"the oracle's accuracy is {accuracy!r}; with {geometry.experts} experts and top_k {geometry.top_k} "
                f"only 1 is possible, because fewer than top_k other experts are left to replace with."
            )
        self._engine, self._accuracy = engine, accuracy
        self._random = np.random.default_rng(seed)

    def begin(self, trees: Sequence[TreeContext]) -> Callable[[], list[Footprints]]:
        """The returned function gives one Footprints per tree, all known: uint64 [1 + N, layers, words].

        The forward runs when it is called, so that its time counts as predicting wherever the question was asked; the
        sequences must not be verified or committed in between. Raises ValueError without a sequence.
        """
        if any(item.sequence is None for item in trees):
            raise ValueError("a tree came without its engine sequence; the oracle needs TreeContext.sequence.")
        return lambda: self._answer(trees)

    def _answer(self, trees: Sequence[TreeContext]) -> list[Footprints]:
        if not trees:
            return []
        verified = self._engine.verify([verify_item(t.sequence, t.context_tokens[-1], t.tree) for t in trees])
        count = self._engine.geometry.experts
        result = []
        for v in verified:
            experts = v.experts if self._accuracy == 1 else degrade(v.experts, count, self._accuracy, self._random)
            result.append(Footprints(pack_bitsets(experts, count), np.ones(len(experts), np.bool_)))
        return result

    def close(self) -> None:
        """Nothing to close: the engine is not ours."""


def degrade(experts: np.ndarray, count: int, accuracy: float, random: np.random.Generator) -> np.ndarray:
    """Keep each id of experts [rows, layers, k], distinct per (row, layer), with probability accuracy.

    The others are replaced by distinct ids, uniform among those of 0 .. count - 1 that the (row, layer) does not use.
    count must be at least 2 * k.
    """
    k = experts.shape[2]
    order = random.random((*experts.shape[:2], count))
    np.put_along_axis(order, experts.astype(np.int64), 2.0, axis=2)  # used ids sort behind every other
    others = order.argsort(axis=2)[:, :, :k].astype(experts.dtype)
    return np.where(random.random(experts.shape) < accuracy, experts, others)
