"""Serving on CUDA: a checkpoint of every family and every kind of drafter, loaded by the setting, against the same on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoding import CASES, decode, differs_beyond_ties, load_tiny

from ecospec_orchestrator.engine.torch.cuda.experts_triton import FP8_CAPABILITY, has_triton
from ecospec_orchestrator.loading import summary
from ecospec_orchestrator.profiling import binding_of

PLAIN_EXPERTS = ("gpt_oss",)  # which the Triton kernel does not take


@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_a_served_model_decodes_the_cpus_tokens(family: str, drafter: str, tmp_path: Path, byte_tokenizer: Any) -> None:
    if family == "deepseek_v3" and torch.cuda.get_device_capability(0) < FP8_CAPABILITY:
        pytest.skip("FP8 needs compute capability 8.9")
    exact, served = (load_tiny(family, drafter, tmp_path / where, byte_tokenizer, where) for where in ("cpu", "cuda"))
    engine, name = served.engine, torch.cuda.get_device_name(0)
    assert engine.device == torch.device("cuda", 0)
    on_device = [*engine.model.parameters(), *engine.model.buffers(), engine.kv_pool.keys, engine.kv_pool.values]
    pool = getattr(served.drafter, "kv_pool", engine.kv_pool)
    assert all(tensor.device == engine.device for tensor in [*on_device, pool.keys, pool.values])
    if has_triton():
        assert (engine.computed_by == "CUDA graphs") == (family not in PLAIN_EXPERTS)
    assert any(line.startswith(f"device: cuda:0, {name}") for line in summary(served))
    assert binding_of(engine, served.drafter, None).device.startswith(name)
    wanted, _ = decode(exact, "none")
    for policy in ("none", "likelihood", "ecospec", "goodput"):
        found, reports = decode(served, policy)
        assert differs_beyond_ties(exact, wanted, found) is None, policy
        assert policy == "none" or any(report.speculated for report in reports), policy
    assert engine.check_idle() is None
