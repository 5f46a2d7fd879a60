"""The engine with its model on the device against the engine on the CPU: a tiny mixture, a prompt, a tree."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec_orchestrator.engine.base import StepBytes, Verified, VerifyItem
from ecospec_orchestrator.engine.torch.cuda.experts_triton import TritonExperts
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_proto.geometry import TargetGeometry

LAYERS, EXPERTS, TOP_K, VOCABULARY = 3, 8, 2, 97
TREE = np.array([-1, 0, 0, 1, 1, 2, 3])


def make_engine(device: str) -> TorchEngine:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        if "experts." in name:
            parameter.data = parameter.data.bfloat16()
    geometry = TargetGeometry("tiny", "test", VOCABULARY, 64, LAYERS, EXPERTS, TOP_K)
    model = copy.deepcopy(model).to(device)
    return TorchEngine(model, geometry, StepBytes(1, 1, 1, 1, 1), (0, 2), 512, kv_pages=32)


def run(engine: TorchEngine) -> list[Verified]:
    """Two prompts, the second over a page long, then two steps of a tree each with a branch kept in between."""
    rng = np.random.default_rng(0)
    engine.enter_thread()
    sequences = [engine.new_sequence(), engine.new_sequence()]
    for sequence, length in zip(sequences, (5, 70), strict=True):
        engine.prefill(sequence, rng.integers(3, VOCABULARY, length))
    results: list[Verified] = []
    for _ in range(2):
        items = [VerifyItem(s, rng.integers(3, VOCABULARY, len(TREE)), TREE) for s in sequences]
        results += engine.verify(items)
        for sequence in sequences:
            engine.commit(sequence, np.array([0, 2, 5]))
    return results


def test_logits_and_experts_are_the_cpus() -> None:
    device = make_engine("cuda")
    assert all(isinstance(module.store, TritonExperts) for module in device._experts)
    for got, wanted in zip(run(device), run(make_engine("cpu")), strict=True):
        np.testing.assert_array_equal(got.experts, wanted.experts)
        np.testing.assert_allclose(got.logits, wanted.logits, atol=2e-3 * np.abs(wanted.logits).max())
