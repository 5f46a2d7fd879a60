"""The figures of an evaluation against plain sets, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_traces import GEOMETRY, make_document

from ecospec_predictor.training.baselines import predictions
from ecospec_predictor.training.calibration import Calibration
from ecospec_predictor.training.data import Part, Window, cut
from ecospec_predictor.training.scores import Scores
from ecospec_predictor.training.unions import UnionScores, trees
from ecospec_proto.token_table import TokenTable

N, LAYERS, EXPERTS, K = 12, 3, 10, 4


def routes(seed: int, unknown: float = 0.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(EXPERTS)[:K] for _ in range(N * LAYERS)]).reshape(N, LAYERS, K)
    return np.where(random.random(ids.shape) < unknown, -1, ids).astype(np.int16)


def test_accuracy_is_the_share_of_known_experts_that_were_named() -> None:
    predicted, actual = routes(1), routes(2, unknown=0.3)
    depths = np.arange(N) % 3
    scores = Scores(LAYERS)
    scores.add(predicted[:7], actual[:7], depths[:7], "a")
    scores.add(predicted[7:], actual[7:], depths[7:], "b")

    def expected(rows: list[int], layers: range = range(LAYERS)) -> float:
        pairs = [(set(predicted[r, at]), set(actual[r, at]) - {-1}) for r in rows for at in layers]
        return round(sum(len(p & a) for p, a in pairs) / sum(len(a) for _, a in pairs), 4)

    report = scores.report()
    assert report["accuracy"] == expected(list(range(N))) == round(scores.accuracy, 4)
    assert report["by_layer"] == [expected(list(range(N)), range(at, at + 1)) for at in range(LAYERS)]
    assert report["by_depth"] == {str(d): expected([r for r in range(N) if depths[r] == d]) for d in range(3)}
    assert report["by_domain"] == {"a": expected(list(range(7))), "b": expected(list(range(7, N)))}
    assert scores.experts == int((actual >= 0).sum())


def test_union_recall_and_precision_are_those_of_sets() -> None:
    predicted, actual = routes(3), routes(4)
    actual[2, 1, 0] = -1  # layer 1 of the first tree has no known union
    scores = UnionScores(EXPERTS)
    recalls, precisions = [], []
    for tree in (np.arange(4), np.arange(4, N)):
        scores.add(predicted[tree], actual[tree])
        for layer in range(LAYERS):
            if (actual[tree, layer] >= 0).all():
                ours, theirs = set(predicted[tree, layer].ravel()), set(actual[tree, layer].ravel())
                recalls.append(len(ours & theirs) / len(theirs))
                precisions.append(len(ours & theirs) / len(ours))
    assert len(recalls) == 5
    assert scores.report() == {
        "union_recall": pytest.approx(np.mean(recalls), abs=1e-4),
        "union_precision": pytest.approx(np.mean(precisions), abs=1e-4),
    }


def window(seed: int, drafts: bool) -> Window:
    (made,) = cut(make_document(seed, rows=34, drafts=drafts), 64, 64)
    return made


def test_a_tree_is_a_token_with_its_drafts_and_else_a_chain() -> None:
    random = np.random.default_rng(0)
    with_drafts, plain = window(1, True), window(1, False)
    rows = np.arange(len(with_drafts.tokens))
    found = list(trees(with_drafts, rows, random))
    assert len(found) == (with_drafts.depths == 1).sum() > 2
    for tree in found:
        assert with_drafts.depths[tree].tolist() == [0, 1, 2]
        assert (with_drafts.parents[tree[1:]] == tree[:-1]).all()
    chains = list(trees(plain, np.arange(34), random))
    assert np.concatenate(chains).tolist() == list(range(sum(map(len, chains))))
    assert all(4 <= len(chain) <= 10 for chain in chains[:-1])


def test_calibration_compares_probabilities_with_what_happened() -> None:
    calibration = Calibration()
    predicted = np.tile(np.arange(K), (N, 1, 1))
    actual = np.where(np.arange(N)[:, None, None] < 9, predicted, predicted + K)  # right in 9 of 12
    calibration.add(predicted, np.full((N, 1, K), 0.55 / K), actual)
    calibration.add(predicted, np.full((N, 1, K), 0.9), predicted)  # more than all of the mass: certain
    report = calibration.report()
    assert report["bins"] == [
        {"from": 0.5, "to": 0.6, "predictions": N * K, "predicted": 0.55, "observed": 0.75},
        {"from": 0.9, "to": 1.0, "predictions": N * K, "predicted": 1.0, "observed": 1.0},
    ]
    assert report["expected_calibration_error"] == pytest.approx(0.1)


def test_baselines_copy_what_was_verified_and_count_what_was_trained_on() -> None:
    made = window(2, True)
    made.routes[4, 1] = -1

    class Memory:
        geometry = GEOMETRY

        def __iter__(self):
            return iter([make_document(seed) for seed in range(5)])

    table = TokenTable.build(Part(Memory(), lambda name: True))
    answers = predictions(table, made, np.arange(len(made.tokens)))
    assert (answers["token_table"] == table.lookup(made.tokens)).all()
    assert (answers["popularity"] == table.popular).all()
    anchor = 0
    for row in range(len(made.tokens)):
        anchor = row if made.depths[row] == 0 else anchor
        before = made.parents[anchor]
        for layer in range(3):
            known = before >= 0 and (before, layer) != (4, 1)
            expected = made.routes[before, layer] if known else table.popular[layer]
            assert (answers["previous_token"][row, layer] == expected).all(), (row, layer)
