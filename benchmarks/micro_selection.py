"""Time of one selection at Qwen3-235B geometry: 94 layers, 128 experts, top-8; of 60 nodes, for 1 and 32 trees.

EcoSpec takes 8 nodes per tree. Goodput takes what pays at two prices: pairs that stream from memory, and the slow, long
steps of the paper's timings, where at batch 32 about half of all nodes pay. It is also timed on one small tree: 10
nodes, 30 layers, 32 experts, top-4. Prints one line of JSON: medians in microseconds beside their targets, and how many
nodes goodput took. Random experts, the worst case for sharing work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from ecospec_orchestrator.core import ROOT, DraftTree, Footprints
from ecospec_orchestrator.selection import goodput_kernel, make_policy
from ecospec_orchestrator.selection.pack import pack

LAYERS, EXPERTS, TOP_K, NODES, GAMMA = 94, 128, 8, 60, 8
TARGETS_US = {"one_tree": 150.0, "batch_32": 4000.0, "small_tree": 60.0}
PRICES = {  # seconds; the plain step is taken as fixed_seconds
    "streamed": {"fixed_seconds": 0.02, "token_seconds": 1e-5, "pair_seconds": 1e-6},
    "paper": {"fixed_seconds": 0.3, "token_seconds": 1e-5, "pair_seconds": 3.4e-4},
}


def eagle_tree(generator: np.random.Generator, nodes: int = NODES, width: int = 10) -> DraftTree:
    """Nodes in levels of `width`, each under a random node of the level above."""
    parents = np.full(nodes, ROOT, np.int32)
    probabilities = np.zeros(nodes, np.float32)
    depths = np.ones(nodes, np.int32)
    for node in range(nodes):
        if node >= width:
            level = node // width
            parents[node] = (level - 1) * width + generator.integers(width)
        above = 1.0 if parents[node] == ROOT else probabilities[parents[node]]
        depths[node] = 1 if parents[node] == ROOT else depths[parents[node]] + 1
        probabilities[node] = above * generator.beta(1.0, 3.0)
    return DraftTree(np.arange(nodes, dtype=np.int32), parents, probabilities, depths)


def random_footprints(
    generator: np.random.Generator, nodes: int = NODES, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K
) -> Footprints:
    ids = generator.random((nodes + 1, layers, experts), np.float32).argpartition(top_k, axis=-1)[..., :top_k]
    used = np.zeros((nodes + 1, layers, -(-experts // 64) * 64), bool)
    np.put_along_axis(used, ids, True, axis=-1)
    bits = np.packbits(used, axis=-1, bitorder="little").view("<u8").astype(np.uint64)
    return Footprints(bits, np.ones(nodes + 1, bool))


def median_us(call: Callable[[], object], repeats: int) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(float(np.median(times)) * 1e6, 1)


def goodput(
    trees: list[DraftTree], footprints: list[Footprints], experts: int, top_k: int, prices: dict[str, float]
) -> Callable[[], int]:
    """One whole selection as a policy would make it, packing included; returns the number of nodes taken."""

    def select() -> int:
        packed = pack(trees, footprints)
        arrays = (packed.experts, packed.known, packed.values, packed.parents, packed.offsets)
        geometry = {"layers": packed.layers, "experts_count": experts, "top_k": top_k}
        chosen, _, _ = goodput_kernel.best_closure(*arrays, **geometry, **prices, plain_seconds=prices["fixed_seconds"])
        return sum(len(nodes) for nodes in packed.nodes(chosen))

    return select


def main() -> int:
    generator = np.random.default_rng(7)
    trees = [eagle_tree(generator) for _ in range(32)]
    footprints = [random_footprints(generator) for _ in trees]
    small = ([eagle_tree(generator, 10, 4)], [random_footprints(generator, 10, 30, 32, 4)], 32, 4)
    result: dict[str, dict[str, float]] = {"median_us": {}, "median_us_empty_buffer": {}, "target_us": TARGETS_US}
    for key, seed_root in (("median_us", True), ("median_us_empty_buffer", False)):
        policy = make_policy("ecospec", top_k=TOP_K, gamma=GAMMA, seed_root=seed_root)
        result[key]["one_tree"] = median_us(partial(policy.choose, trees[:1], footprints[:1]), 1000)
        result[key]["batch_32"] = median_us(partial(policy.choose, trees, footprints), 200)
    taken: dict[str, dict[str, int]] = {}
    goodput_kernel.warm_up()
    for key, prices in PRICES.items():
        calls = {
            "one_tree": goodput(trees[:1], footprints[:1], EXPERTS, TOP_K, prices),
            "batch_32": goodput(trees, footprints, EXPERTS, TOP_K, prices),
            "small_tree": goodput(*small, prices),
        }
        result[f"median_us_goodput_{key}"] = {name: median_us(call, 200) for name, call in calls.items()}
        taken[key] = {name: call() for name, call in calls.items()}
    measured = [medians for key, medians in result.items() if key.startswith("median_us")]
    met = all(us <= TARGETS_US[size] for medians in measured for size, us in medians.items())
    print(json.dumps({"benchmark": "selection", **result, "goodput_nodes": taken, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
