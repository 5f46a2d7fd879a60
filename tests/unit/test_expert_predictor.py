"""The predictor network: a tree node must be predicted as if its path were plain text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ecospec_predictor import networks as module
from ecospec_predictor.base import Query
from ecospec_predictor.model import LoadedExpertModel, load_model
from ecospec_predictor.network import ExpertPredictor, PredictorConfig
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("tiny", "test", 61, 20, 3, 12, 3)
CONFIG = PredictorConfig(hidden_size=32, layers=2, heads=4, mlp_size=48, max_context_tokens=10)


def network() -> ExpertPredictor:
    torch.manual_seed(0)
    made = ExpertPredictor(CONFIG, GEOMETRY, torch.randn(61, 20).bfloat16())
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return made


@pytest.fixture(scope="module")
def predictor() -> LoadedExpertModel:
    return LoadedExpertModel(network(), "test")


def sets(experts: np.ndarray) -> list[set[int]]:
    return [set(row) for row in experts.tolist()]


def test_a_node_is_predicted_like_its_path_as_text(predictor: LoadedExpertModel) -> None:
    rng = np.random.default_rng(1)
    queries = []
    for size, nodes in ((1, 0), (4, 6), (7, 9)):
        parents = np.array([int(rng.integers(-1, n)) if n else -1 for n in range(nodes)], np.int64)
        queries.append(Query(rng.integers(0, 61, size), rng.integers(0, 61, nodes), parents))
    for query, answer in zip(queries, predictor.predict(queries), strict=True):
        assert answer.shape == (1 + len(query.draft_tokens), 3, 3) and answer.dtype == np.uint8
        for node in range(-1, len(query.draft_tokens)):
            path, at = [], node
            while at >= 0:
                path.append(int(query.draft_tokens[at]))
                at = int(query.parents[at])
            text = np.concatenate([query.context_tokens, path[::-1]]).astype(np.int64)
            if len(text) > CONFIG.max_context_tokens:
                continue  # a plain text this long would lose its first tokens
            (alone,) = predictor.predict([Query(text, np.zeros(0, np.int64), np.zeros(0, np.int64))])
            assert sets(answer[node + 1]) == sets(alone[0]), node


def test_only_the_tail_of_the_context_counts(predictor: LoadedExpertModel) -> None:
    tail = np.arange(10)
    empty = np.zeros(0, np.int64)
    short, long, other = predictor.predict(
        [Query(tail, empty, empty), Query(np.append([7, 7, 7], tail), empty, empty), Query(tail + 1, empty, empty)]
    )
    assert sets(short[0]) == sets(long[0]) != sets(other[0])


def saved(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ExpertPredictor:
    made = network()
    made.save(directory, {"version": "7"})
    monkeypatch.setattr(module, "load_embeddings", lambda _: made.embeddings)
    return made


def test_a_saved_predictor_loads_and_answers_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(tmp_path, monkeypatch)
    loaded = load_model(tmp_path, Path("unused.gguf"), 1)
    assert loaded.version == "7" and loaded.geometry == GEOMETRY
    query = Query(np.arange(8), np.arange(20, 26), np.array([-1, -1, 0, 0, 1, 4]))
    ((first,), (second,)) = LoadedExpertModel(made, "").predict([query]), loaded.predict([query])
    same = [len(a & b) for x, y in zip(first, second, strict=True) for a, b in zip(sets(x), sets(y), strict=True)]
    assert np.mean(same) > 2.5  # of 3; bfloat16 may swap neighbours


@pytest.mark.parametrize(("field", "value", "words"), [("format_version", 2, "format_version 2")])
def test_another_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object, words: str
) -> None:
    saved(tmp_path, monkeypatch)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=words):
        load_model(tmp_path, Path("unused.gguf"), 1)


def test_embeddings_of_another_target_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(60, 20\).*\(61, 20\)"):
        ExpertPredictor(CONFIG, GEOMETRY, torch.zeros(60, 20))
