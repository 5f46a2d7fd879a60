"""Time of one selection at Qwen3-235B geometry: 94 layers, 128 experts, top-8; 8 of 60 nodes, for 1 and 32 trees.

Prints one line of JSON: medians in microseconds beside their targets. Random experts, the worst case for sharing work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ecospec_orchestrator.core import ROOT, DraftTree, Footprints
from ecospec_orchestrator.selection import make_policy

LAYERS, EXPERTS, TOP_K, NODES, GAMMA = 94, 128, 8, 60, 8
TARGETS_US = {"one_tree": 150.0, "batch_32": 4000.0}


def eagle_tree(generator: np.random.Generator, width: int = 10) -> DraftTree:
    """NODES nodes in levels of `width`, each under a random node of the level above."""
    parents = np.full(NODES, ROOT, np.int32)
    probabilities = np.zeros(NODES, np.float32)
    depths = np.ones(NODES, np.int32)
    for node in range(NODES):
        if node >= width:
            level = node // width
            parents[node] = (level - 1) * width + generator.integers(width)
        above = 1.0 if parents[node] == ROOT else probabilities[parents[node]]
        depths[node] = 1 if parents[node] == ROOT else depths[parents[node]] + 1
        probabilities[node] = above * generator.beta(1.0, 3.0)
    return DraftTree(np.arange(NODES, dtype=np.int32), parents, probabilities, depths)


def random_footprints(generator: np.random.Generator) -> Footprints:
    ids = generator.random((NODES + 1, LAYERS, EXPERTS), np.float32).argpartition(TOP_K, axis=-1)[..., :TOP_K]
    used = np.zeros((NODES + 1, LAYERS, EXPERTS), bool)
    np.put_along_axis(used, ids, True, axis=-1)
    bits = np.packbits(used, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    return Footprints(bits, np.ones(NODES + 1, bool))


def median_us(call: Callable[[], object], repeats: int) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(float(np.median(times)) * 1e6, 1)


def main() -> int:
    generator = np.random.default_rng(7)
    trees = [eagle_tree(generator) for _ in range(32)]
    footprints = [random_footprints(generator) for _ in trees]
    result: dict[str, dict[str, float]] = {"median_us": {}, "median_us_empty_buffer": {}, "target_us": TARGETS_US}
    for key, seed_root in (("median_us", True), ("median_us_empty_buffer", False)):
        policy = make_policy("ecospec", top_k=TOP_K, gamma=GAMMA, seed_root=seed_root)
        result[key]["one_tree"] = median_us(partial(policy.choose, trees[:1], footprints[:1]), 1000)
        result[key]["batch_32"] = median_us(partial(policy.choose, trees, footprints), 200)
    measured = (result["median_us"], result["median_us_empty_buffer"])
    met = all(medians[size] <= target for medians in measured for size, target in TARGETS_US.items())
    print(json.dumps({"benchmark": "selection", **result, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
