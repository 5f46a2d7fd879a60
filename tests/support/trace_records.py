"""Random, valid trace records of the fake expert model's target."""

from __future__ import annotations

import numpy as np
from fake_expert_model import GEOMETRY

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument


def random_record(
    random: np.random.Generator, rows: int, unrouted: int, geometry: TargetGeometry = GEOMETRY
) -> TraceDocument:
    """The first `unrouted` rows are an accepted chain without routes; behind them, rejected rows hang anywhere."""
    accepted = random.random(rows) < 0.6
    accepted[: max(1, unrouted)] = True
    parents = np.full(rows, -1, np.int32)
    for row in range(1, rows):
        earlier = np.flatnonzero(accepted[:row])
        parents[row] = earlier[-1] if accepted[row] else random.integers(0, row)
    positions = np.full(rows, random.integers(0, 1000), np.int32)
    for row in range(1, rows):
        positions[row] = positions[parents[row]] + 1
    order = random.random((rows, geometry.moe_layers, geometry.experts)).argsort(2)
    routes = order[:, :, : geometry.top_k].astype(np.int16)
    routes[:unrouted] = -1
    tokens = random.integers(0, geometry.vocab_size, rows).astype(np.int32)
    return TraceDocument(random.bytes(16).hex(), "live", tokens, positions, parents, routes, accepted)
