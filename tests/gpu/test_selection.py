"""Selection on the device makes the numpy kernel's choice, eagerly and as a graph."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from ecospec_orchestrator.engine.torch.cuda.graph import CudaCapture
from ecospec_orchestrator.engine.torch.cuda.select_device import DevicePack, greedy_marginal, to_device
from ecospec_orchestrator.selection import kernel
from ecospec_orchestrator.selection.pack import Pack

DEVICE = torch.device("cuda")
TREES, NODES, WORDS = 4, 20, 6


def random_pack(rng: np.random.Generator) -> Pack:
    """Four trees of up to 20 nodes with few, round probabilities: scores often tie."""
    sizes = rng.integers(0, NODES + 1, TREES) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = int(offsets[-1])
    parents, values = np.full(rows, -1, np.int64), np.ones(rows)
    for start, stop in zip(offsets, offsets[1:], strict=False):
        for row in range(start + 1, stop):
            parents[row] = rng.integers(start, row)
            values[row] = values[parents[row]] * rng.choice([0.25, 0.5, 1.0])
    bits = rng.random((rows, 64 * WORDS)) < rng.choice([0.02, 0.2])
    experts = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    return Pack(experts, rng.random(rows) < 0.9, values, parents, offsets, 1)


@pytest.mark.parametrize("mode", [kernel.BUFFER_BATCH, kernel.BUFFER_REQUEST, kernel.BUFFER_NONE])
def test_device_and_graph_choose_what_numpy_chooses(mode: int) -> None:
    rng = np.random.default_rng(mode)
    rows, options = TREES * (NODES + 1), (5, 1.0, 9, True, mode)
    static = to_device(random_pack(rng), rows, DEVICE)
    replay, outputs = CudaCapture(DEVICE).capture(lambda: {"chosen": greedy_marginal(static, TREES, *options)})
    for _ in range(100):
        pack = random_pack(rng)
        wanted = kernel.greedy_marginal(pack.experts, pack.known, pack.values, pack.parents, pack.offsets, *options)
        fresh = to_device(pack, rows, DEVICE)
        eager = greedy_marginal(fresh, TREES, *options)
        copy_into(static, fresh)
        replay()
        for chosen in (eager, outputs["chosen"]):
            np.testing.assert_array_equal(chosen.cpu().numpy()[: len(wanted)], wanted)
            assert not chosen[len(wanted) :].any()


def copy_into(static: DevicePack, fresh: DevicePack) -> None:
    for field in fields(DevicePack):
        getattr(static, field.name).copy_(getattr(fresh, field.name))
