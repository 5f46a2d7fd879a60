"""Where a predictor runs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_predictors import GEOMETRY, random_queries, save_random
from safetensors.torch import save_file

from ecospec_predictor.errors import SettingsError
from ecospec_predictor.hf_model import HfExpertModel
from ecospec_predictor.hf_network import HfExpertPredictor
from ecospec_predictor.model import LoadedExpertModel, load_model
from ecospec_predictor.network import ExpertPredictor, PredictorConfig
from ecospec_predictor.settings import load_settings


def test_off_the_cpu_the_backbone_is_bfloat16_but_its_rotary_frequencies_keep_their_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: what is moved there stays here, all else is the same."""
    save_random(tmp_path)
    full = load_model(tmp_path, None, 1, device="cpu")
    assert isinstance(full, HfExpertModel)
    monkeypatch.setattr(HfExpertPredictor, "to", lambda network, _device: network)
    half = HfExpertModel(load_model(tmp_path, None, 1, device="cpu").network, "1", torch.device("cuda"))
    half._device = torch.device("cpu")
    assert {p.dtype for p in half.network.backbone.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in half.network.backbone.buffers()} == {torch.float32}
    assert half.network.router.weight.dtype == torch.float32
    queries = random_queries(np.random.default_rng(0), 20)
    pairs = [
        (set(a), set(b))
        for mine, yours in zip(full.predict(queries), half.predict(queries), strict=True)
        for a, b in zip(mine.reshape(-1, 4).tolist(), yours.reshape(-1, 4).tolist(), strict=True)
    ]
    assert np.mean([len(a & b) / 4 for a, b in pairs]) > 0.95


def test_a_device_that_is_not_there_is_refused_and_auto_takes_what_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert isinstance(load_model(tmp_path, None, 1), HfExpertModel)
    with pytest.raises(ValueError, match="finds 0 CUDA devices"):
        load_model(tmp_path, None, 1, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="'cuda:2'.*finds 2 CUDA devices"):
        load_model(tmp_path, None, 1, device="cuda:2")


def test_a_small_predictor_runs_on_the_cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(GEOMETRY.vocab_size, GEOMETRY.hidden_size, dtype=torch.bfloat16)
    ExpertPredictor(PredictorConfig(16, 1, 2, 32, 4), GEOMETRY, table).save(tmp_path, {"version": "small"})
    save_file({"embed_tokens.weight": table}, tmp_path / "table.safetensors")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert isinstance(load_model(tmp_path, tmp_path / "table.safetensors", 1), LoadedExpertModel)
    with pytest.raises(ValueError, match="'cuda'.*runs on the CPU"):
        load_model(tmp_path, tmp_path / "table.safetensors", 1, device="cuda")


@pytest.mark.parametrize("value", ["gpu", "cuda:x", "cuda:", "tpu:0", ""])
def test_a_device_of_another_form_is_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="device"):
        load_settings({"model_dir": ".", "device": value}, {})
