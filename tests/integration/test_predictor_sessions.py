"""Contexts kept between the real client and the real service: what is sent, lost, sent again and freed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from predictor_harness import GEOMETRY, connected, fake, query, request, running

from ecospec_orchestrator.core import DraftTree
from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_predictor.server import PredictorServer
from ecospec_proto import predictor_pb2
from ecospec_proto.codec import pack_bitsets

WINDOW = 16  # of the fake model
StreamRequest = predictor_pb2.PredictStreamRequest


def metric(server: PredictorServer, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"ecospec_predictor_{name}", labels) or 0.0


def item(request_id: str, tokens: list[int], generator: np.random.Generator) -> TreeContext:
    nodes = int(generator.integers(0, 9))
    parents = np.array([int(generator.integers(-1, n)) if n else -1 for n in range(nodes)], np.int32)
    drafts = generator.integers(0, GEOMETRY.vocab_size, nodes).astype(np.int32)
    return TreeContext(
        tokens, DraftTree(drafts, parents, np.ones(nodes, np.float32), np.ones(nodes, np.int32)), None, request_id
    )


def check(answers: Sequence[Any], items: Sequence[TreeContext]) -> None:
    assert len(answers) == len(items)
    for footprints, asked in zip(answers, items, strict=True):
        ids = fake.tree_experts(asked.context_tokens[-WINDOW:], asked.tree.tokens, asked.tree.parents, GEOMETRY)
        np.testing.assert_array_equal(footprints.experts, pack_bitsets(ids, GEOMETRY.experts))


class Client:
    def __init__(self, port: int, deadline: float = 5.0) -> None:
        self.source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, deadline)
        self.random = np.random.default_rng(4)
        self.texts: dict[str, list[int]] = {}

    def grow(self, name: str, count: int = 1) -> TreeContext:
        text = self.texts.setdefault(name, [])
        text += self.random.integers(0, GEOMETRY.vocab_size, count).tolist()
        return item(name, text, self.random)

    async def ask(self, *items: TreeContext) -> None:
        check(await asyncio.to_thread(lambda: self.source.begin(items)()), items)

    async def reason(self, *items: TreeContext) -> str:
        with pytest.raises(FootprintUnavailableError) as caught:
            await self.ask(*items)
        return caught.value.reason

    async def connect(self) -> None:
        async with asyncio.timeout(60):  # the client compiles a kernel first
            while True:
                with contextlib.suppress(FootprintUnavailableError):
                    return await self.ask(item("", [1, 2], self.random))
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def pair(deadline: float = 5.0, **changes: Any) -> AsyncIterator[tuple[PredictorServer, Any, Client]]:
    model = fake.FakeExpertModel()
    async with running(model, **changes) as server:
        client = Client(server.port, deadline)
        try:
            await client.connect()
            yield server, model, client
        finally:
            model.gate.set()
            await asyncio.to_thread(client.source.close)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_random_texts_are_answered_and_only_new_tokens_are_sent() -> None:
    async with pair(max_trees=3) as (server, model, client):  # five trees make two messages
        for _ in range(60):
            names = [n for n in "abcde" if client.random.random() < 0.7]
            await client.ask(*(client.grow(n, int(client.random.integers(1, 4))) for n in names))
        assert max(len(batch) for batch in model.batches) <= 3
        assert metric(server, "session_uses_total", result="started") == 5
        assert metric(server, "session_uses_total", result="hit") > 150
        assert metric(server, "session_uses_total", result="lost") == 0 == client.source.contexts_resent
        await client.ask(client.grow("a", WINDOW))  # further than a model looks: a fresh start
        assert metric(server, "session_uses_total", result="started") == 6
        assert metric(server, "sessions") == 5


async def test_lost_sessions_are_sent_again_once_within_the_call() -> None:
    async with pair() as (server, model, client):
        await client.ask(client.grow("a", 30), client.grow("b", 3))
        served = server.served()[0]  # the one of this target
        served.sessions.close()
        await client.ask(client.grow("a"), client.grow("b", 2), client.grow("new", 4))
        assert client.source.contexts_resent == 1 and metric(server, "sessions") == 3
        await client.ask(client.grow("a"), client.grow("b"))
        assert client.source.contexts_resent == 1
        assert metric(server, "requests_total", outcome="not_found") == 1


async def test_a_pool_that_is_too_small_costs_time_and_no_answer() -> None:
    async with pair() as (server, model, client):
        server.served()[0].sessions.capacity = 2
        for _ in range(10):
            await client.ask(*(client.grow(name) for name in "abcd"))
        assert metric(server, "sessions") == 2 and 1 <= client.source.contexts_resent <= 10


async def test_a_missed_deadline_and_a_full_queue_lose_no_token() -> None:
    async with pair(deadline=0.3, max_queue=1) as (server, model, client):
        await client.ask(client.grow("a", 5))
        model.gate.clear()
        assert await client.reason(client.grow("a", 2)) == "deadline"  # it holds the model
        async with connected(server) as stub:
            waiting = asyncio.ensure_future(stub.Predict(request([([1], [], [])])))
            await asyncio.sleep(0.2)
            assert await client.reason(client.grow("a")) == "unavailable"  # no room in the queue
            waiting.cancel()
            await until(lambda: metric(server, "requests_total", outcome="cancelled") == 1)
        assert await client.reason(client.grow("a")) == "deadline"  # it waits in the queue, and is dropped
        model.gate.set()
        await client.ask(client.grow("a"))
        assert client.source.contexts_resent == 0 and metric(server, "session_uses_total", result="lost") == 0


async def test_a_restarted_service_is_told_the_contexts_anew() -> None:
    async with pair() as (server, model, client):
        await client.ask(client.grow("a", 20))
        await server.stop()
        assert await client.reason(client.grow("a")) == "unavailable"
        async with running(port=server.port) as again:
            async with asyncio.timeout(20):
                while True:
                    with contextlib.suppress(FootprintUnavailableError):
                        await client.ask(client.grow("a"))
                        break
                    await asyncio.sleep(0.02)
            await client.ask(client.grow("a"))
            assert metric(again, "session_uses_total", result="started") == 1 == metric(again, "sessions")
            assert metric(again, "session_uses_total", result="lost") == 0 == client.source.contexts_resent


async def test_an_ended_request_frees_its_session_soon_and_with_the_next_question() -> None:
    async with pair() as (server, model, client):
        await client.ask(client.grow("a", 2), client.grow("b", 2), client.grow("c", 2))
        client.source.end("a")
        client.source.end("never asked about")
        await client.ask(client.grow("b"))
        assert metric(server, "sessions") == 2
        client.source.end("c")
        await until(lambda: metric(server, "sessions") == 1)
        await client.ask(client.grow("b"), client.grow("c"))  # a new request of an old name
        assert client.source.contexts_resent == 0
        assert metric(server, "sessions_dropped_total", cause="ended") == 2
        batches = len(model.batches)
    assert batches == 4 + 1  # warm-up and questions, the one for connecting among them: ending runs no model
    assert metric(server, "sessions") == 0


async def test_sessions_end_with_their_stream_and_are_nobody_elses() -> None:
    def message(number: int, start: int, *context: int) -> StreamRequest:
        asked = query(([*context], [4], [-1]))
        asked.session_id, asked.context_start = 77, start
        ask = predictor_pb2.PredictRequest(target_fingerprint=GEOMETRY.fingerprint, trees=[asked])
        return StreamRequest(request_id=number, request=ask)

    async with running() as server, connected(server) as stub:
        mine, other = stub.PredictStream(), stub.PredictStream()
        await mine.write(message(1, 0, 1, 2, 3))
        assert (await mine.read()).WhichOneof("result") == "response"
        await other.write(message(2, 3, 9))
        error = (await other.read()).error
        assert error.code == grpc.StatusCode.NOT_FOUND.value[0] and "77" in error.message
        await mine.write(message(3, 3))  # nothing new: the same root again
        answer = (await mine.read()).response
        wanted = fake.tree_experts([1, 2, 3], [4], [-1], GEOMETRY)
        assert answer.trees[0].experts == wanted.tobytes()
        await mine.write(message(4, 0))
        assert "context_tokens is empty" in (await mine.read()).error.message
        ended = predictor_pb2.PredictRequest(target_fingerprint=GEOMETRY.fingerprint, end_sessions=range(5000))
        await mine.write(StreamRequest(request_id=5, request=ended))
        assert "end_sessions holds 5000" in (await mine.read()).error.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Predict(message(0, 0, 1).request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "PredictStream" in caught.value.details()
        await other.done_writing()
        mine.cancel()
        await until(lambda: metric(server, "sessions") == 0)
        assert metric(server, "sessions_dropped_total", cause="disconnected") == 1
