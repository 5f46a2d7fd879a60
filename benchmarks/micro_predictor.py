"""Overhead of a call to the predictor over loopback, at Qwen3-235B geometry: 60 nodes x 94 layers x top-8 of 128.

RemoteFootprintSource.begin and its answer, from trees to bitsets, minus the model time that the service reports. The service
is the real one in a process of its own, with a model that answers at once; the context is kept in a session. Prints one line
of JSON with milliseconds beside the target.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import uvloop

from ecospec_proto.geometry import TargetGeometry

if TYPE_CHECKING:
    from ecospec_predictor.base import Query

GEOMETRY = TargetGeometry(
    "Qwen3-235B", "benchmark", vocab_size=151936, hidden_size=4096, moe_layers=94, experts=128, top_k=8
)
NODES, CONTEXT = 60, 64
REPEATS = 2000
TARGET_MS = 0.6


class ConstantModel:
    """An ExpertModel: experts 0 to 7 everywhere."""

    geometry = GEOMETRY
    version = "constant"
    max_context_tokens = CONTEXT
    session_bytes = 0
    max_rows = 256

    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        answer = np.tile(np.arange(GEOMETRY.top_k, dtype=np.uint8), (NODES + 1, GEOMETRY.moe_layers, 1))
        return [answer[: 1 + len(query.draft_tokens)] for query in queries]


async def serve() -> None:
    from pathlib import Path

    from ecospec_predictor.server import PredictorServer
    from ecospec_predictor.settings import Settings

    server = PredictorServer(Settings(model_dir=Path(), embeddings=Path(), port=0, metrics_port=0), ConstantModel())
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes our input
    await server.stop()


def measure(port: int) -> np.ndarray:
    """Seconds of overhead, float64 [REPEATS]."""
    from ecospec_orchestrator.core import DraftTree
    from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext
    from ecospec_orchestrator.footprint.remote import RemoteFootprintSource

    model_seconds: list[float] = []

    class Measured(RemoteFootprintSource):
        def _decode(self, part):  # type: ignore[no-untyped-def]
            model_seconds.append(part.response.model_nanoseconds / 1e9)
            return super()._decode(part)

    ids = np.arange(NODES, dtype=np.int32)
    tree = DraftTree(ids, (ids - 1) // 2, np.ones(NODES, np.float32), np.ones(NODES, np.int32))
    text = list(range(CONTEXT))
    source = Measured(f"127.0.0.1:{port}", GEOMETRY, 1.0)
    times: list[float] = []
    try:
        end = time.monotonic() + 15
        while len(times) < REPEATS + 100:
            text.append(1)  # a step decides at least one token
            start = time.perf_counter()
            try:
                (footprints,) = source.begin([TreeContext(text, tree, request_id="benchmark")])()
            except FootprintUnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
                continue
            times.append(time.perf_counter() - start)
            time.sleep(0.001)  # a step lies between two calls
        assert (footprints.experts == np.array([255, 0], np.uint64)).all()
    finally:
        source.close()
    return (np.array(times) - np.array(model_seconds))[100:]


def main() -> int:
    if sys.argv[1:] == ["serve"]:
        uvloop.run(serve())  # as the service itself
        return 0
    process = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        overhead = measure(int(process.stdout.readline()))
    finally:
        process.communicate()
    median, p99 = (round(float(v) * 1e3, 3) for v in np.percentile(overhead, [50, 99]))
    print(
        json.dumps(
            {"what": "predictor call without model time", "median_ms": median, "p99_ms": p99, "target_ms": TARGET_MS}
        )
    )
    return 0 if median <= TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
