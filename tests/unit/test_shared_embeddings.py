"""Versions of one target share its embedding table, so that a swap neither reads it again nor holds it twice."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from ecospec_predictor.model import load_model
from ecospec_predictor.network import ExpertPredictor, PredictorConfig
from ecospec_predictor.networks import load_embeddings
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("small", "1", vocab_size=50, hidden_size=16, moe_layers=2, experts=8, top_k=2)


def write_table(path: Path, value: float) -> None:
    table = torch.full((GEOMETRY.vocab_size, GEOMETRY.hidden_size), value, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": table}, path)


def test_two_versions_in_memory_share_the_table_and_a_changed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    write_table(path, 1.0)
    network = ExpertPredictor(PredictorConfig(16, 1, 2, 32, 4), GEOMETRY, load_embeddings(path))
    for name in ("a", "b"):
        network.save(tmp_path / name, {"version": name})
    del network
    gc.collect()

    first, second = (load_model(tmp_path / name, path, 1) for name in ("a", "b"))
    reached = load_embeddings(path).data_ptr()
    assert first.packed._embeddings.ctypes.data == second.packed._embeddings.ctypes.data == reached

    write_table(tmp_path / "new", 2.0)
    os.replace(tmp_path / "new", path)
    os.utime(path, ns=(1, 1))  # another time, however coarse the clock of the file system
    third = load_model(tmp_path / "a", path, 1)
    assert third.packed._embeddings.ctypes.data != reached
    assert float(load_embeddings(path)[0, 0]) == 2.0
