"""A predictor on a Hugging Face backbone on the device: the answers of the CPU, but for what bfloat16 decides otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hf_predictors import GEOMETRY, random_queries, save_random

from ecospec_predictor.hf_model import HfExpertModel
from ecospec_predictor.model import load_model


def test_the_device_chooses_the_experts_of_the_cpu(tmp_path: Path) -> None:
    save_random(tmp_path)
    here, there = (load_model(tmp_path, None, 1, device=device) for device in ("cpu", "cuda"))
    assert isinstance(there, HfExpertModel)
    assert {p.device.type for p in there.network.parameters()} == {"cuda"}
    queries = random_queries(np.random.default_rng(0), 20)
    same = [
        len(set(a) & set(b)) / GEOMETRY.top_k
        for mine, yours in zip(here.predict(queries), there.predict(queries), strict=True)
        for a, b in zip(
            mine.reshape(-1, GEOMETRY.top_k).tolist(), yours.reshape(-1, GEOMETRY.top_k).tolist(), strict=True
        )
    ]
    assert np.mean(same) > 0.95
    assert torch.cuda.memory_allocated() > 0
