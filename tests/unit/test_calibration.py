"""Calibration: the fit against scipy's isotonic regression, learned maps against known truths, trees by property."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from scipy.special import expit, logit

from ecospec_orchestrator.core import ROOT, DraftTree, SettingsError
from ecospec_orchestrator.selection.calibration import BINS, HALF_LIFE, PRIOR, Calibrator, fit_map

CENTRES = expit(np.arange(BINS) - (BINS - 1) / 2)
GRID = np.linspace(0.02, 0.98, 49)


def tree_of(parents: list[int], conditionals: list[float]) -> DraftTree:
    probabilities, depths = [], []
    for parent, c in zip(parents, conditionals, strict=True):
        probabilities.append(c * (1.0 if parent == ROOT else probabilities[parent]))
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return DraftTree(
        np.arange(len(parents), dtype=np.int32),
        np.array(parents, np.int32),
        np.array(probabilities, np.float32),
        np.array(depths, np.int32),
    )


def chain(conditionals: list[float]) -> DraftTree:
    return tree_of(list(range(-1, len(conditionals) - 1)), conditionals)


def predicted(calibrator: Calibrator, depth: int, temperature: float, grid: np.ndarray = GRID) -> np.ndarray:
    """The map of one depth, read off chains."""
    paths = [calibrator.path_probabilities(chain([0.9] * (depth - 1) + [c]), temperature) for c in grid]
    return np.array([p[-1] / (p[-2] if depth > 1 else 1.0) for p in paths])


def teach(calibrator, truth, temperature, steps, rng, depth=1, sampled=False) -> None:
    """Chains whose masses are truth(c), or 0/1 outcomes of that probability (then the first 0 ends what is seen)."""
    for _ in range(steps):
        c = rng.uniform(0.01, 0.99, depth)
        mass = truth(c)
        if sampled:
            mass = (rng.random(depth) < mass).astype(np.float64)
            refused = np.flatnonzero(mass == 0)
            if len(refused):
                mass[refused[0] + 1 :] = np.nan
        calibrator.observe(chain(c.tolist()), mass, temperature)


@st.composite
def random_tree(draw):
    """Sibling probabilities sum to at most 1, as a draft's do; zeros and ones included."""
    nodes = draw(st.integers(0, 14))
    parents = [draw(st.integers(ROOT, i - 1)) for i in range(nodes)]
    conditionals, left = [], dict.fromkeys(range(ROOT, nodes), 1.0)
    for parent in parents:
        c = draw(st.sampled_from([0.0, 1.0, 0.5]) | st.floats(0, 1, width=32)) * left[parent]
        left[parent] -= c
        conditionals.append(c)
    return tree_of(parents, conditionals)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_the_fit_is_the_weighted_isotonic_regression(seed):
    rng = np.random.default_rng(seed)
    weight = rng.choice([0.0, 1.0, 7.0, 500.0], BINS) * rng.random(BINS)
    learned = np.stack([weight, weight * CENTRES, weight * rng.random(BINS)], 1)
    knots, values = np.empty(BINS), np.empty(BINS)
    fit_map(learned, CENTRES, knots, values)
    total = weight + PRIOR
    expected = isotonic_regression((learned[:, 2] + PRIOR * CENTRES) / total, weights=total).x
    np.testing.assert_allclose(expit(values), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(knots, logit(CENTRES), atol=1e-9)


def test_before_anything_was_seen_the_draft_is_believed():
    calibrator = Calibrator(3)
    for temperature in (0.0, 0.5, 1.0):
        for depth in (1, 3, 7):
            np.testing.assert_allclose(predicted(calibrator, depth, temperature), GRID, atol=1e-5)
        assert math.isnan(calibrator.error(temperature))
    assert set(calibrator.errors) == {"greedy", "sampled_low", "sampled_high"}
    # Beyond the bins: near-certain drafts are not promised, near-impossible ones stay near-impossible.
    high, low = predicted(calibrator, 1, 1.0, np.array([0.9999999, 1e-5]))
    assert 0.99 < high < 0.9999 and low < 2e-5


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_known_distortion_is_recovered_at_every_depth(temperature):
    calibrator, rng = Calibrator(4), np.random.default_rng(3)
    truths = [np.sqrt, np.square, lambda c: 0.2 + 0.5 * c, np.sqrt]
    for depth, truth in enumerate(truths, 1):
        for _ in range(3000):
            c = rng.uniform(0.01, 0.99, depth)
            mass = np.full(depth, np.nan)
            mass[-1] = rng.random() < truth(c[-1]) if temperature == 0 else truth(c[-1])
            calibrator.observe(chain(c.tolist()), mass, temperature)
    # Outcomes of 0 or 1 bring chance; towards the ends of c, where few were seen, the prior still weighs.
    largest, mean = (0.12, 0.04) if temperature == 0 else (0.03, 0.01)
    middle = (GRID > 0.05) & (GRID < 0.95)
    for depth, truth in enumerate(truths, 1):
        error = np.abs(predicted(calibrator, depth, temperature) - truth(GRID))
        assert error[middle].max() < largest and error.mean() < mean, depth
    np.testing.assert_allclose(predicted(calibrator, 9, temperature), predicted(calibrator, 4, temperature), atol=1e-5)


def test_outcomes_seen_only_below_accepted_parents_give_conditional_probabilities():
    calibrator, rng = Calibrator(3), np.random.default_rng(4)
    teach(calibrator, np.sqrt, 0.0, 6000, rng, depth=3, sampled=True)
    for depth in (1, 2, 3):
        assert np.abs(predicted(calibrator, depth, 0.0) - np.sqrt(GRID)).mean() < 0.04
    c = [0.5, 0.3, 0.6]
    assert calibrator.path_probabilities(chain(c), 0.0)[-1] == pytest.approx(math.sqrt(0.5 * 0.3 * 0.6), abs=0.06)


def test_a_map_never_falls_whatever_it_was_taught():
    calibrator, rng = Calibrator(1), np.random.default_rng(5)
    teach(calibrator, lambda c: 0.9 - 0.8 * c, 1.0, 500, rng)
    values = predicted(calibrator, 1, 1.0, np.linspace(1e-4, 1 - 1e-4, 500))
    assert (np.diff(values) > -1e-7).all()


def test_old_observations_fade():
    calibrator, rng = Calibrator(1), np.random.default_rng(6)
    teach(calibrator, np.sqrt, 1.0, 4000, rng)
    before = calibrator.error(1.0)
    teach(calibrator, np.square, 1.0, 200, rng)
    assert calibrator.error(1.0) > before  # a changed truth shows at once
    teach(calibrator, np.square, 1.0, int(5 * HALF_LIFE), rng)
    assert np.abs(predicted(calibrator, 1, 1.0) - np.square(GRID)).max() < 0.04
    halved = Calibrator(1)
    for seen, times in ((1.0, 20_000), (0.0, int(HALF_LIFE))):
        for _ in range(times):
            halved.observe(chain([0.5]), np.array([seen]), 1.0)
    assert predicted(halved, 1, 1.0, np.array([0.5]))[0] == pytest.approx(0.5, abs=0.01)


def test_classes_of_temperature_learn_apart():
    calibrator, rng = Calibrator(2), np.random.default_rng(7)
    teach(calibrator, np.sqrt, 0.0, 500, rng)
    for temperature in (0.3, 0.7, 0.71, 1.5):
        np.testing.assert_allclose(predicted(calibrator, 1, temperature), GRID, atol=1e-5)
    teach(calibrator, np.square, 0.7, 500, rng)
    np.testing.assert_allclose(predicted(calibrator, 1, 0.71), GRID, atol=1e-5)
    np.testing.assert_array_equal(predicted(calibrator, 1, 0.3), predicted(calibrator, 1, 0.7))
    assert predicted(calibrator, 1, 0.0)[10] > GRID[10] > predicted(calibrator, 1, 0.5)[10]


def test_what_was_not_observed_teaches_nothing():
    calibrator, tree = Calibrator(2), tree_of([-1, -1, 0, 1], [0.6, 0.3, 0.5, 0.5])
    for _ in range(100):
        calibrator.observe(tree, np.full(4, np.nan), 1.0)
    np.testing.assert_allclose(predicted(calibrator, 1, 1.0), GRID, atol=1e-6)
    assert math.isnan(calibrator.error(1.0))
    for _ in range(100):
        calibrator.observe(tree, np.array([0.9, np.nan, np.nan, np.nan]), 1.0)
    np.testing.assert_allclose(predicted(calibrator, 2, 1.0), GRID, atol=1e-5)
    assert predicted(calibrator, 1, 1.0, np.array([0.6]))[0] > 0.85


def test_the_error_is_the_mean_over_bins_of_the_gap_before_learning():
    calibrator = Calibrator(2)
    # Fewer than the refit takes: predictions stay the prior's. c is a bin's centre, so it is predicted exactly.
    low, high = float(CENTRES[4]), float(CENTRES[7])
    for _ in range(5):
        calibrator.observe(chain([low]), np.array([low + 0.2]), 1.0)
        calibrator.observe(chain([low]), np.array([low]), 1.0)  # same bin: half of the gap cancels
        calibrator.observe(chain([high]), np.array([high - 0.1]), 1.0)
    assert calibrator.error(1.0) == pytest.approx(0.1, abs=1e-4)  # the first weigh a trifle less
    calibrator.observe(chain([0.5, low]), np.array([np.nan, low]), 1.0)  # another depth, no gap
    assert calibrator.error(1.0) == pytest.approx(0.1 * 15 / 16, abs=1e-4)
    assert calibrator.errors["sampled_high"] == calibrator.error(1.0)
    assert math.isnan(calibrator.errors["greedy"])


def test_the_error_of_a_learned_map_is_small():
    calibrator, rng = Calibrator(2), np.random.default_rng(8)
    teach(calibrator, np.sqrt, 1.0, 20_000, rng, depth=2)
    assert calibrator.error(1.0) < 0.01
    teach(calibrator, np.sqrt, 0.0, 20_000, rng, depth=2, sampled=True)
    assert calibrator.error(0.0) < 0.03


@settings(max_examples=200, deadline=None)
@given(st.lists(random_tree(), min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2**32 - 1))
def test_path_probabilities_fit_the_tree_whatever_was_learned(trees, temperature, seed):
    calibrator, rng = Calibrator(3), np.random.default_rng(seed)
    for tree in trees:
        for _ in range(8):
            mass = np.where(rng.random(len(tree)) < 0.3, np.nan, rng.random(len(tree)))
            calibrator.observe(tree, np.round(mass) if temperature == 0 else mass, temperature)
    for tree in trees:
        p = calibrator.path_probabilities(tree, temperature)
        assert p.shape == (len(tree),) and p.dtype == np.float64
        assert ((p >= 0) & (p <= 1)).all()
        above = np.append(p, 1.0)[tree.parents]
        assert (p <= above).all()
        below = np.zeros(len(tree) + 1)
        np.add.at(below, tree.parents, p)
        assert (below <= np.append(p, 1.0) * (1 + 1e-12)).all()
        error = calibrator.error(temperature)
        assert math.isnan(error) or 0 <= error <= 1


def test_siblings_share_one_token():
    calibrator, rng = Calibrator(1), np.random.default_rng(9)
    teach(calibrator, np.sqrt, 1.0, 3000, rng)
    tree = tree_of([-1, -1, -1], [0.5, 0.3, 0.1])
    p = calibrator.path_probabilities(tree, 1.0)
    alone = [calibrator.path_probabilities(chain([c]), 1.0)[0] for c in (0.5, 0.3, 0.1)]
    assert sum(alone) > 1.4 and p.sum() == pytest.approx(1)
    np.testing.assert_allclose(p, np.array(alone) / sum(alone), rtol=1e-6)


def test_read_only_trees_are_fine_and_wrong_arguments_are_refused():
    calibrator, tree = Calibrator(2), chain([0.5, 0.5])
    for array in (tree.probabilities, tree.parents, tree.depths):
        array.flags.writeable = False
    assert len(calibrator.path_probabilities(tree, 0.0)) == 2
    assert len(calibrator.path_probabilities(DraftTree.empty(), 0.0)) == 0
    with pytest.raises(ValueError, match=r"mass has shape \(3,\); the tree has 2 nodes"):
        calibrator.observe(tree, np.zeros(3), 0.0)
    with pytest.raises(SettingsError, match="max_depth is 0"):
        Calibrator(0)
