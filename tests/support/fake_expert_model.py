"""A deterministic ExpertModel: the experts of a node are a hash of the tokens on its path, so a crossed answer shows."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ecospec_predictor.base import Query
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry(name="fake", revision="r1", vocab_size=1000, hidden_size=8, moe_layers=3, experts=32, top_k=4)


def path_experts(path: Sequence[int], geometry: TargetGeometry) -> np.ndarray:
    """[moe_layers, top_k] for the tokens from the oldest one to the node."""
    value = 14695981039346656037
    for token in path:
        value = (value ^ (int(token) + 1)) * 1099511628211 % 2**64
    cells = np.arange(geometry.moe_layers * geometry.top_k, dtype=np.uint64)
    mixed = (np.uint64(value) + cells * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    return (mixed % np.uint64(geometry.experts)).reshape(geometry.moe_layers, geometry.top_k)


def tree_experts(
    context: Sequence[int], tokens: Sequence[int], parents: Sequence[int], geometry: TargetGeometry
) -> np.ndarray:
    """[1 + nodes, moe_layers, top_k] in the dtype of the wire."""
    paths = [list(context)]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*paths[1 + parent], token])
    dtype = np.uint8 if geometry.experts <= 256 else np.uint16
    return np.stack([path_experts(path, geometry) for path in paths]).astype(dtype)


class FakeExpertModel:
    """gate: the model waits for it. batches: the queries of every run. fail: raise instead of answering."""

    def __init__(self, geometry: TargetGeometry = GEOMETRY, max_context_tokens: int = 16) -> None:
        self.geometry, self.max_context_tokens, self.version = geometry, max_context_tokens, "fake-1"
        self.session_bytes, self.max_rows = 0, 10_000
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail = False
        self.batches: list[list[Query]] = []

    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        self.batches.append(list(queries))
        self.entered.set()
        if not self.gate.wait(30):
            raise TimeoutError("the test never opened the gate")
        if self.fail:
            raise RuntimeError("secret detail of the inside")
        return [tree_experts(q.context_tokens, q.draft_tokens, q.parents, self.geometry) for q in queries]
