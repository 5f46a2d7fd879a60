"""A real predictor server on a real port for the tests, and what its clients need."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import numpy as np

from ecospec_predictor.server import PredictorServer
from ecospec_predictor.service import SERVICE_NAME
from ecospec_predictor.settings import Settings
from ecospec_proto import predictor_pb2, predictor_pb2_grpc
from ecospec_proto.codec import decode_experts, encode_tree


def _load_fake() -> ModuleType:
    name = "fake_expert_model"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "support" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


fake = _load_fake()
GEOMETRY = fake.GEOMETRY
Tree = tuple[list[int], list[int], list[int]]


def settings(**changes: Any) -> Settings:
    return Settings(
        **({"model_dir": ".", "embeddings": ".", "port": 0, "metrics_port": 0, "grace_seconds": 2} | changes)
    )


@contextlib.asynccontextmanager
async def running(*models: Any, **changes: Any) -> AsyncIterator[PredictorServer]:
    """With one fake model unless others are given."""
    server = PredictorServer(settings(**changes), *(models or [fake.FakeExpertModel()]))
    del models  # the server's own are the only ones: one that is replaced must leave the memory
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def connected(server: PredictorServer) -> AsyncIterator[predictor_pb2_grpc.ExpertPredictorServiceStub]:
    async with channel(server) as open_channel:
        yield predictor_pb2_grpc.ExpertPredictorServiceStub(open_channel)


def channel(server: PredictorServer) -> grpc.aio.Channel:
    # A subchannel pool of its own: two tests may get the same port, and must not share a connection.
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}",
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
    )


def raw_method(open_channel: grpc.aio.Channel, name: str) -> Any:
    """A unary method that sends bytes as they are."""
    return open_channel.unary_unary(f"/{SERVICE_NAME}/{name}")


def random_tree(generator: np.random.Generator, geometry: Any = GEOMETRY) -> Tree:
    nodes = int(generator.integers(0, 12))
    context = generator.integers(0, geometry.vocab_size, int(generator.integers(1, 16))).tolist()
    parents = [int(generator.integers(-1, node)) if node else -1 for node in range(nodes)]
    return context, generator.integers(0, geometry.vocab_size, nodes).tolist(), parents


def query(tree: Tree) -> predictor_pb2.TreeQuery:
    context, tokens, parents = encode_tree(tree[0], np.array(tree[1], np.int32), np.array(tree[2], np.int32))
    return predictor_pb2.TreeQuery(context_tokens=context, draft_tokens=tokens, parents=parents)


def request(trees: Sequence[Tree], fingerprint: str = GEOMETRY.fingerprint) -> predictor_pb2.PredictRequest:
    return predictor_pb2.PredictRequest(target_fingerprint=fingerprint, trees=[query(tree) for tree in trees])


def check(
    response: predictor_pb2.PredictResponse, trees: Sequence[Tree], geometry: Any = GEOMETRY, tail: int = 16
) -> None:
    """The response is the fake model's answer to exactly these trees, in this order."""
    assert len(response.trees) == len(trees)
    for prediction, (context, tokens, parents) in zip(response.trees, trees, strict=True):
        rows = 1 + len(tokens)
        got = decode_experts(prediction.experts, response.expert_dtype, rows, geometry.moe_layers, geometry.top_k)
        np.testing.assert_array_equal(got, fake.tree_experts(context[-tail:], tokens, parents, geometry))
