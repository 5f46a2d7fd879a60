"""New versions and several targets in one running predictor: nothing is lost, crossed or kept."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from predictor_harness import GEOMETRY, check, connected, fake, random_tree, request, running

from ecospec_predictor.base import ExpertModel
from ecospec_predictor.errors import PredictorError
from ecospec_predictor.server import PredictorServer
from ecospec_predictor.versions import Loaded, Shelf, Watch, load_all
from ecospec_proto import predictor_pb2

OTHER = dataclasses.replace(GEOMETRY, name="other", experts=16)
TREE = ([1, 2, 3], [4, 5], [-1, 0])
STREAMS = 8
Made = Callable[[], Any]


class Shop:
    """A directory of versions on disk, the server, and its watch. made: version -> what makes its model, which may raise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[str, Made] = {}
        self.loads: list[str] = []

    def add(self, version: str, make: Made | None = None) -> None:
        def default() -> Any:
            model = fake.FakeExpertModel()
            model.version = version
            return model

        (self.root / version).mkdir()
        self.made[version] = make or default

    def choose(self, version: str) -> None:
        """As a careful publisher does it: the link is replaced by a rename."""
        fresh = self.root / "fresh"
        fresh.symlink_to(version)
        os.replace(fresh, self.root / "current")

    def load(self, directory: Path, _embeddings: Path | None) -> ExpertModel:
        self.loads.append(directory.name)
        return self.made[directory.name]()

    @contextlib.asynccontextmanager
    async def open(self, others: tuple[ExpertModel, ...] = ()) -> AsyncIterator[PredictorServer]:
        loaded: list[Loaded] = load_all([Shelf(self.root)], self.load)
        async with running(loaded[0].model, *others) as server:
            self.watch = Watch(loaded, self.load, server.swap, server.metrics)
            loaded.clear()
            watching = asyncio.create_task(self.watch.run(0.01))
            try:
                yield server
            finally:
                watching.cancel()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(tmp_path)
    shop.add("v1")
    shop.choose("v1")
    return shop


def metric(server: PredictorServer, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"ecospec_predictor_{name}", labels) or 0.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def serves(server: PredictorServer, version: str, geometry: Any = GEOMETRY) -> bool:
    labels = {"target": geometry.name, "fingerprint": geometry.fingerprint, "version": version}
    return metric(server, "model_info", **labels) == 1.0


async def test_eight_busy_streams_see_every_version_and_no_failure(shop: Shop) -> None:
    versions = [f"v{number}" for number in range(1, 7)]
    for version in versions[1:]:
        shop.add(version)
    done = False

    async def caller(number: int, server: PredictorServer) -> list[str]:
        generator, seen = np.random.default_rng(number), [""]
        async with connected(server) as stub:
            stream = stub.PredictStream()
            at = 0
            while not done:
                trees = {at + i: [random_tree(generator) for _ in range(2)] for i in range(4)}  # four in flight
                for request_id, asked in trees.items():
                    await stream.write(
                        predictor_pb2.PredictStreamRequest(request_id=request_id, request=request(asked))
                    )
                while trees:
                    answer = await stream.read()
                    assert answer.WhichOneof("result") == "response", answer.error
                    check(answer.response, trees.pop(answer.request_id))
                    if answer.response.model_version != seen[-1]:
                        seen.append(answer.response.model_version)
                at += 4
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
        return seen[1:]

    async with shop.open() as server:
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(caller(number, server)) for number in range(STREAMS)]
            for version in versions:
                shop.choose(version)
                await until(lambda version=version: serves(server, version))
                answered = metric(server, "requests_total", outcome="ok")
                await until(
                    lambda least=answered + 10 * STREAMS: metric(server, "requests_total", outcome="ok") > least
                )
            done = True
        for seen in (task.result() for task in callers):
            assert seen[-1] == versions[-1] and len(set(seen)) >= 3
            assert set(seen) <= set(versions)
        assert metric(server, "swaps_total", outcome="swapped") == len(versions) - 1
        for outcome in ("unavailable", "internal", "cancelled", "failed_precondition"):
            assert metric(server, "requests_total", outcome=outcome) == 0


async def test_what_the_old_version_has_accepted_it_answers_and_then_it_leaves_the_memory(shop: Shop) -> None:
    old = fake.FakeExpertModel()
    alive, gate = weakref.ref(old), old.gate
    shop.made["v1"] = lambda kept=[old]: kept.pop()
    del old
    shop.add("v2")
    async with shop.open() as server, connected(server) as stub:
        gate.clear()
        held = [asyncio.ensure_future(stub.Predict(request([TREE]))) for _ in range(3)]
        await until(lambda: len(alive().batches) == 2)  # the warm-up and the first; the others wait
        shop.choose("v2")
        await until(lambda: serves(server, "v2"))
        answer = await stub.Predict(request([TREE]))
        assert answer.model_version == "v2"
        check(answer, [TREE])
        assert not any(call.done() for call in held)
        gate.set()
        for call in held:
            answer = await call
            assert answer.model_version == "fake-1"
            check(answer, [TREE])
        del held, call
        await until(lambda: gc.collect() >= 0 and alive() is None)
        assert not serves(server, "fake-1")


def _refuses() -> Any:
    raise PredictorError("The file is cut off.")


def _breaks() -> Any:
    raise ZeroDivisionError("a bug")


def _fails_at_first() -> Any:
    model = fake.FakeExpertModel()
    model.fail = True
    return model


@pytest.mark.parametrize(
    ("make", "outcome", "words"),
    [
        (_refuses, "failed", "cut off"),
        (_breaks, "failed", "ZeroDivisionError"),
        (_fails_at_first, "failed", "first prediction"),
        (lambda: fake.FakeExpertModel(OTHER), "another_target", OTHER.fingerprint),
    ],
)
async def test_a_version_that_is_no_good_is_told_once_and_the_old_one_goes_on(
    shop: Shop, caplog: pytest.LogCaptureFixture, make: Made, outcome: str, words: str
) -> None:
    shop.add("bad", make)
    shop.add("good")
    async with shop.open() as server, connected(server) as stub:
        shop.choose("bad")
        await until(lambda: metric(server, "swaps_total", outcome=outcome) == 1)
        await asyncio.sleep(0.1)  # ten more looks
        assert shop.loads == ["v1", "bad"]
        assert words in caplog.text and len([r for r in caplog.records if "is not served" in r.getMessage()]) == 1
        assert (await stub.Predict(request([TREE]))).model_version == "v1"
        shop.watch.look_now()  # a person asks: it is tried again
        await until(lambda: metric(server, "swaps_total", outcome=outcome) == 2)
        shop.made["bad"] = shop.made["good"]
        (shop.root / "bad" / "config.json").write_text("repaired")
        await until(lambda: serves(server, "good"))
        check(await stub.Predict(request([TREE])), [TREE])


async def test_a_directory_that_loses_its_current_version_serves_on(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    async with shop.open() as server, connected(server) as stub:
        (shop.root / "CURRENT").write_text("nowhere")
        (shop.root / "current").unlink()
        await until(lambda: "cannot be found" in caplog.text)
        await asyncio.sleep(0.1)
        assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
        assert (await stub.Predict(request([TREE]))).model_version == "v1"
        shop.choose("v1")
        await asyncio.sleep(0.1)
        assert shop.loads == ["v1"]


async def test_a_stop_in_the_middle_of_a_swap_ends_both(shop: Shop) -> None:
    slow = fake.FakeExpertModel()
    slow.gate.clear()
    shop.add("v2", lambda: slow)
    async with shop.open() as server:
        shop.choose("v2")
        await until(slow.entered.is_set)
    slow.gate.set()
    assert not serves(server, "fake-1")


async def test_each_target_has_its_own_model_and_a_swap_of_one_leaves_the_other(shop: Shop) -> None:
    shop.add("v2")
    info = predictor_pb2.GetModelInfoRequest
    async with shop.open((fake.FakeExpertModel(OTHER),)) as server, connected(server) as stub:
        generator = np.random.default_rng(0)
        for version in ("v1", "v2"):
            shop.choose(version)
            await until(lambda version=version: serves(server, version))
            for geometry, expected in ((GEOMETRY, version), (OTHER, "fake-1")):
                tree = random_tree(generator, geometry)
                answer = await stub.Predict(request([tree], geometry.fingerprint))
                assert answer.model_version == expected
                check(answer, [tree], geometry)
                told = await stub.GetModelInfo(info(target_fingerprint=geometry.fingerprint))
                assert (told.target_name, told.model_version) == (geometry.name, expected)
            assert serves(server, "fake-1", OTHER)
        for asked in (info(), info(target_fingerprint="f" * 32)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelInfo(asked)
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            for words in (GEOMETRY.fingerprint, OTHER.fingerprint, "fake", "other"):
                assert words in caught.value.details()


async def test_a_session_of_the_old_version_is_asked_for_its_context_once(shop: Shop) -> None:
    shop.add("v2")
    async with shop.open() as server, connected(server) as stub:
        stream = stub.PredictStream()

        async def ask(tokens: list[int], start: int) -> predictor_pb2.PredictStreamResponse:
            message = request([(tokens, TREE[1], TREE[2])])
            message.trees[0].session_id, message.trees[0].context_start = 7, start
            await stream.write(predictor_pb2.PredictStreamRequest(request=message))
            return await stream.read()

        check((await ask([1, 2], 0)).response, [([1, 2], TREE[1], TREE[2])])
        check((await ask([3], 2)).response, [TREE])
        shop.choose("v2")
        await until(lambda: serves(server, "v2"))
        assert (await ask([4], 3)).error.code == grpc.StatusCode.NOT_FOUND.value[0]
        answer = (await ask([1, 2, 3, 4], 0)).response
        assert answer.model_version == "v2"
        check(answer, [([1, 2, 3, 4], TREE[1], TREE[2])])
        await stream.done_writing()
