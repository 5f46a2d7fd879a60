"""From draft probabilities to acceptance probabilities, learned from what the target really did. Numpy and numba."""

from __future__ import annotations

import numpy as np

from ..core import DraftTree
from .kernel import _compiled
from .options import check_count

# How a drafted token fares depends on how sharp the target is made. Greedy decoding takes the best token for certain;
# sampling does not, so the two never share a map. Common settings gather at 0.6 to 0.7 and at 1.0, and the draft's own
# probabilities are those of temperature 1: up to 0.7 the target is clearly sharper than the draft, above it is not.
CLASSES = ("greedy", "sampled_low", "sampled_high")
LOW_TEMPERATURE = 0.7

BINS = 12  # of logit(c): one unit wide from -5 to 5 (c from 0.7 % to 99.3 %), and two open ends
PRIOR = 4.0  # pseudo-observations per bin that say "acceptance = c": a first step moves the map, it does not make it
# A topic or a user's style lasts some hundreds to thousands of tokens. Half the weight after 2000 observations follows
# that, and still leaves about 2900 effective observations per class and depth: 1 % noise where they spread over bins.
HALF_LIFE = 2000.0
REFIT_AFTER = 16  # new observations per class and depth until its map is fitted again
MIN_C = 1e-6  # logits stay finite: nothing is taken for impossible or certain

_KEEP = 0.5 ** (1 / HALF_LIFE)
_CENTRES = 1 / (1 + np.exp(-(np.arange(BINS) - (BINS - 1) / 2)))  # c at the middle of every bin


def temperature_class(temperature: float) -> int:
    """Index into CLASSES."""
    return 0 if temperature == 0 else 1 if temperature <= LOW_TEMPERATURE else 2


class Calibrator:
    """Learns, per class of temperature and depth, one monotone map from the draft's conditional probability
    c = P(node) / P(parent) to the probability that the node is accepted given that its parent was.

    A map is a weighted isotonic regression over bins of logit(c), on sums that decay, with the identity as prior;
    between bins it is linear in (logit c, logit acceptance), through each bin's mean c. Above the highest bin's mean c
    it is flat and below the lowest it falls with c, so that it promises nothing beyond what was seen. Depths beyond
    max_depth share the last map. Only nodes whose outcome was observed teach: a map is best where the policy chooses.
    One thread at a time.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = check_count("max_depth", max_depth)
        shape = (len(CLASSES), self.max_depth)
        # Decayed sums per (class, depth, bin). Prediction errors are of what was said before learning.
        self._learned = np.zeros((*shape, BINS, 3))  # weight, c, observed acceptance
        self._judged = np.zeros((*shape, BINS, 3))  # weight, predicted, observed acceptance
        self._fresh = np.zeros(shape, np.int64)  # observations since the last fit
        # The maps: logit(c) and logit(acceptance) at each bin's mean, both ascending.
        self._knots = np.zeros((*shape, BINS))
        self._values = np.zeros((*shape, BINS))
        for learned, knots, values in zip(
            self._learned.reshape(-1, BINS, 3),
            self._knots.reshape(-1, BINS),
            self._values.reshape(-1, BINS),
            strict=True,
        ):
            fit_map(learned, _CENTRES, knots, values)
        warm = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._paths(*warm, 0)  # compile now, so that no request waits for it
        self._learn(*warm, np.zeros(0), 0)

    def path_probabilities(self, tree: DraftTree, temperature: float) -> np.ndarray:
        """float64 [N]: calibrated probability that each node is accepted, the product along its path.

        A child is never above its parent. Siblings never sum to more than their parent (one token is drawn for all of
        them): they are scaled down together.
        """
        return self._paths(*_fresh_arrays(tree), temperature_class(temperature))

    def observe(self, tree: DraftTree, mass: np.ndarray, temperature: float) -> None:
        """Learn from one verified tree.

        mass: float64 [N], the probability that the target gave the node's token after its parent's path (at temperature
        0: 1 or 0), NaN where it was not observed. Raises ValueError for another shape.
        """
        if mass.shape != (len(tree),):
            raise ValueError(f"mass has shape {mass.shape}; the tree has {len(tree)} nodes, one entry each is needed.")
        self._learn(*_fresh_arrays(tree), mass.astype(np.float64), temperature_class(temperature))

    def error(self, temperature: float) -> float:
        """Expected calibration error of recent predictions for this temperature's class: the mean, over (depth, bin of
        c), of |predicted - observed| conditional acceptance, weighted by (decayed) observations.

        0 is perfect, NaN means nothing observed. Differences within a bin cancel; with few observations per bin and
        outcomes of 0 or 1 (greedy), chance alone gives one or two percent.
        """
        return self._error_of(temperature_class(temperature))

    @property
    def errors(self) -> dict[str, float]:
        """error() by name of the temperature class."""
        return {name: self._error_of(index) for index, name in enumerate(CLASSES)}

    def _error_of(self, index: int) -> float:
        judged = self._judged[index]
        weight = float(judged[..., 0].sum())
        return float(np.abs(judged[..., 1] - judged[..., 2]).sum()) / weight if weight else float("nan")

    def _paths(self, probabilities: np.ndarray, parents: np.ndarray, depths: np.ndarray, index: int) -> np.ndarray:
        result = _conditionals(probabilities, parents, depths, self._knots[index], self._values[index])[1]
        _multiply_down(result, parents)
        return result

    def _learn(
        self, probabilities: np.ndarray, parents: np.ndarray, depths: np.ndarray, mass: np.ndarray, index: int
    ) -> None:
        _observe(
            probabilities,
            parents,
            depths,
            mass,
            self._learned[index],
            self._judged[index],
            self._fresh[index],
            self._knots[index],
            self._values[index],
            _CENTRES,
        )


def _fresh_arrays(tree: DraftTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of one type each: read-only or other input would compile the kernels anew in a request."""
    return tree.probabilities.astype(np.float64), tree.parents.astype(np.int64), tree.depths.astype(np.int64)


@_compiled
def _logit(p: float) -> float:
    p = min(max(p, MIN_C), 1 - MIN_C)
    return np.log(p / (1 - p))


@_compiled
def fit_map(learned: np.ndarray, centres: np.ndarray, knots: np.ndarray, values: np.ndarray) -> None:
    """Isotonic regression of one map: learned float64 [BINS, 3] (weight, c, mass) -> knots, values [BINS], written.

    Pool adjacent violators: bins enter from the left, and a block swallows its left neighbours while their mean is
    larger, which gives the least-squares non-decreasing means.
    """
    weights, means, first = np.empty(BINS), np.empty(BINS), np.empty(BINS, np.int64)
    blocks = 0
    for b in range(BINS):
        weight = learned[b, 0] + PRIOR
        knots[b] = _logit((learned[b, 1] + PRIOR * centres[b]) / weight)
        mean, start = (learned[b, 2] + PRIOR * centres[b]) / weight, b
        while blocks and means[blocks - 1] >= mean:
            blocks -= 1
            total = weights[blocks] + weight
            mean = (weights[blocks] * means[blocks] + weight * mean) / total
            weight, start = total, first[blocks]
        weights[blocks], means[blocks], first[blocks] = weight, mean, start
        blocks += 1
    end = BINS
    for block in range(blocks - 1, -1, -1):
        values[first[block] : end] = _logit(means[block])
        end = first[block]


@_compiled
def _conditionals(
    probabilities: np.ndarray, parents: np.ndarray, depths: np.ndarray, knots: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(c, calibrated acceptance given the parent's), both float64 [N]; knots, values: float64 [max_depth, BINS]."""
    nodes = len(probabilities)
    draft, calibrated, of_parent = np.empty(nodes), np.empty(nodes), np.zeros(nodes + 1)
    for node in range(nodes):
        parent = parents[node]
        above = 1.0 if parent < 0 else probabilities[parent]
        draft[node] = probabilities[node] / above if above > 0 else 0.0
        depth = min(depths[node], len(knots)) - 1
        x, xs, ys = _logit(draft[node]), knots[depth], values[depth]
        if x < xs[0]:
            y = ys[0] + x - xs[0]
        elif x >= xs[BINS - 1]:
            y = ys[BINS - 1]
        else:
            b = 0
            while x >= xs[b + 1]:
                b += 1
            y = ys[b] + (ys[b + 1] - ys[b]) * (x - xs[b]) / (xs[b + 1] - xs[b])
        calibrated[node] = 1 / (1 + np.exp(-y))
        of_parent[parent + 1] += calibrated[node]
    for node in range(nodes):
        total = of_parent[parents[node] + 1]
        if total > 1:
            calibrated[node] /= total
    return draft, calibrated


@_compiled
def _multiply_down(values: np.ndarray, parents: np.ndarray) -> None:
    """Conditional to path probabilities, in place."""
    for node in range(len(values)):
        if parents[node] >= 0:
            values[node] *= values[parents[node]]


@_compiled
def _observe(
    probabilities: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    mass: np.ndarray,
    learned: np.ndarray,
    judged: np.ndarray,
    fresh: np.ndarray,
    knots: np.ndarray,
    values: np.ndarray,
    centres: np.ndarray,
) -> None:
    """Calibrator.observe for one class; everything behind mass is its state, indexed by depth, and changed."""
    nodes, levels = len(probabilities), len(knots)
    draft, calibrated = _conditionals(probabilities, parents, depths, knots, values)
    counts = np.zeros(levels, np.int64)
    for node in range(nodes):
        if not np.isnan(mass[node]):
            counts[min(depths[node], levels) - 1] += 1
    for level in range(levels):
        if counts[level]:
            keep = _KEEP ** counts[level]
            learned[level] *= keep
            judged[level] *= keep
    for node in range(nodes):
        seen = mass[node]
        if np.isnan(seen):
            continue
        level = min(depths[node], levels) - 1
        b = min(max(int(np.floor(_logit(draft[node]) + BINS / 2)), 0), BINS - 1)
        learned[level, b, 0] += 1
        learned[level, b, 1] += draft[node]
        learned[level, b, 2] += seen
        judged[level, b, 0] += 1
        judged[level, b, 1] += calibrated[node]
        judged[level, b, 2] += seen
    for level in range(levels):
        fresh[level] += counts[level]
        if fresh[level] >= REFIT_AFTER:
            fresh[level] = 0
            fit_map(learned[level], centres, knots[level], values[level])
