"""A predictor on a Hugging Face backbone: trained whole or head only, served like the small one, refused by vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_traces import GEOMETRY, make_document, write_run_inputs
from transformers import Qwen3Config, Qwen3ForCausalLM

from ecospec_predictor.base import Query
from ecospec_predictor.errors import PredictorError
from ecospec_predictor.hf_model import HfExpertModel
from ecospec_predictor.hf_network import HfExpertPredictor
from ecospec_predictor.model import load_model
from ecospec_predictor.training.config import load_config
from ecospec_predictor.training.evaluate import evaluate
from ecospec_predictor.training.loop import train


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the family of Qwen3-0.6B, as its directory."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("backbone")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def run(folder: Path, backbone: Path, mode: str, *overrides: str) -> tuple[dict[str, Any], Path]:
    folder.mkdir(exist_ok=True)
    config = write_run_inputs(folder, drafts=True)
    section = f"backbone={{kind: hf, path: {backbone}, train: {mode}, context_tokens: 8}}"
    return train(load_config(config, (section, "embeddings=null", *overrides)), "c"), folder / "run"


def test_a_whole_backbone_learns_and_serves_trees(backbone: Path, tmp_path: Path) -> None:
    note, directory = run(tmp_path, backbone, "whole", "training.epochs=12")
    assert note["held_out_top_k_accuracy"] > 0.9
    report, _ = evaluate(directory / "best", tmp_path / "traces", None, 10_000, "cpu")
    assert report["predictors"]["predictor"]["accuracy"] > 0.9
    model = load_model(directory / "best", Path("unused"), 1, GEOMETRY)
    assert isinstance(model, HfExpertModel) and model.max_context_tokens == 8
    text = make_document(3).tokens.astype(np.int64)
    none = np.zeros(0, np.int64)
    tree = Query(text[:4], text[4:7], np.array([-1, 0, 1]))
    answer, branch, alone = model.predict(
        [tree, Query(text[:4], text[[9, 4, 5]], np.array([-1, -1, 1])), Query(text[:7], none, none)]
    )
    assert answer.shape == (4, 3, 2) and answer.dtype == np.uint8
    assert set(map(int, answer[3, 1])) == set(map(int, alone[0, 1]))  # a branch is predicted like plain text
    assert (np.sort(answer[[1, 2]]) == np.sort(branch[[2, 3]])).all()  # whatever hangs beside it


def test_a_head_alone_leaves_the_backbone_as_it_was(backbone: Path, tmp_path: Path) -> None:
    before = HfExpertPredictor.from_pretrained(backbone, GEOMETRY, 8).backbone.state_dict()
    _, directory = run(tmp_path, backbone, "head", "training.epochs=2")
    state = torch.load(directory / "checkpoint.pt", weights_only=True)["weights"]
    assert all(torch.equal(state[f"network.backbone.{name}"], value) for name, value in before.items())
    assert state["network.router.bias"].abs().max() > 0
    train(load_config(tmp_path / "run/config.yaml", ("training.epochs=3",)), "c", resume=True)
    run(tmp_path / "other", backbone, "whole", "training.epochs=1", "training.precision=bfloat16")


def test_another_vocabulary_is_refused_by_name(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="qwen3 has a vocabulary of 16 tokens, but tiny has 17"):
        HfExpertPredictor.from_pretrained(backbone, replace(GEOMETRY, vocab_size=17), 8)
    with pytest.raises(PredictorError, match="holds no config.json; give the directory of a Hugging Face model"):
        run(tmp_path, tmp_path, "whole")
