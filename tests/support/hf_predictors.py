"""A tiny predictor on a Hugging Face backbone with random weights, and questions for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ecospec_predictor.base import Query
from ecospec_predictor.hf_network import HfConfig, HfExpertPredictor
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("tiny", "1", vocab_size=40, hidden_size=16, moe_layers=3, experts=16, top_k=4)
CONTEXT = 12


def save_random(directory: Path) -> None:
    torch.manual_seed(0)
    backbone = {
        "model_type": "qwen3",
        "vocab_size": GEOMETRY.vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
    }
    HfExpertPredictor(HfConfig("hf", backbone, CONTEXT), GEOMETRY).save(directory, {"version": "random"})


def random_queries(generator: np.random.Generator, count: int) -> list[Query]:
    queries = []
    for _ in range(count):
        nodes = int(generator.integers(0, 9))
        context = generator.integers(0, GEOMETRY.vocab_size, int(generator.integers(1, 20)))
        parents = np.array([generator.integers(-1, node) if node else -1 for node in range(nodes)], np.int64)
        queries.append(Query(context, generator.integers(0, GEOMETRY.vocab_size, nodes), parents))
    return queries
