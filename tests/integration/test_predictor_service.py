"""The predictor service over real sockets: answers, refusals, health, reflection, overload, deadlines."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from predictor_harness import (
    GEOMETRY,
    Tree,
    channel,
    check,
    connected,
    fake,
    query,
    random_tree,
    raw_method,
    request,
    running,
    settings,
)

from ecospec_predictor.errors import PredictorError
from ecospec_predictor.server import PredictorServer
from ecospec_predictor.service import SERVICE_NAME
from ecospec_proto import predictor_pb2
from ecospec_proto.geometry import TargetGeometry

Code = grpc.StatusCode
StreamRequest = predictor_pb2.PredictStreamRequest


async def refusal(call: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def metric(server: Any, name: str, **labels: str) -> float:
    return server.metrics.registry.get_sample_value(f"ecospec_predictor_{name}", labels) or 0.0


async def test_200_concurrent_callers_each_get_their_own_answers() -> None:
    model = fake.FakeExpertModel()
    generator = np.random.default_rng(1)
    work = [[random_tree(generator) for _ in range(generator.integers(1, 5))] for _ in range(200)]
    async with running(model, max_queue=256) as server, connected(server) as stub:

        async def unary(trees: list[Tree]) -> None:
            check(await stub.Predict(request(trees)), trees)

        async def stream(parts: list[list[Tree]]) -> None:
            call = stub.PredictStream()
            for number, trees in enumerate(parts):
                await call.write(StreamRequest(request_id=1000 + number, request=request(trees)))
            await call.done_writing()
            seen = set()
            async for answer in call:
                assert answer.WhichOneof("result") == "response", answer
                check(answer.response, parts[answer.request_id - 1000])
                seen.add(answer.request_id)
            assert seen == {1000 + number for number in range(len(parts))}

        calls = [unary(trees) for trees in work[:100]] + [stream(work[at : at + 10]) for at in range(100, 200, 10)]
        await asyncio.gather(*calls)
        assert metric(server, "requests_total", outcome="ok") == 200
        assert max(len(batch) for batch in model.batches) > 4  # callers really share a run of the model
        assert max(len(batch) for batch in model.batches) <= 64
        assert metric(server, "batch_trees_sum") == sum(len(trees) for trees in work) + 1  # and the warm-up


async def test_uint16_experts_and_model_info() -> None:
    geometry = TargetGeometry("wide", "r2", 500, 16, 5, 300, 8)
    async with running(fake.FakeExpertModel(geometry)) as server, connected(server) as stub:
        tree = ([1, 2], [3, 4, 5], [-1, 0, 0])
        response = await stub.Predict(request([tree], geometry.fingerprint))
        assert response.expert_dtype == predictor_pb2.EXPERT_DTYPE_UINT16 and response.model_version == "fake-1"
        check(response, [tree], geometry)
        info = await stub.GetModelInfo(predictor_pb2.GetModelInfoRequest())
        assert info.target_fingerprint == geometry.fingerprint and info.target_revision == "r2"
        assert (info.moe_layers, info.experts, info.top_k, info.max_trees, info.max_nodes_per_tree) == (
            5,
            300,
            8,
            64,
            256,
        )


async def test_another_target_is_refused_with_both_fingerprints() -> None:
    async with running() as server, connected(server) as stub:
        code, text = await refusal(stub.Predict(request([([1], [], [])], "f" * 32)))
        assert code is Code.FAILED_PRECONDITION and "f" * 32 in text and GEOMETRY.fingerprint in text


async def test_a_long_context_is_cut_to_its_tail_but_checked_in_full() -> None:
    async with running() as server, connected(server) as stub:
        tree = (list(range(100)), [7, 8], [-1, 0])
        check(await stub.Predict(request([tree])), [tree])
        code, text = await refusal(stub.Predict(request([([5000, *range(100)], [7], [-1])])))
        assert code is Code.INVALID_ARGUMENT and "context_tokens[0] is 5000" in text


def raw_query(context: bytes = b"\1\0\0\0", tokens: bytes = b"", parents: bytes = b"") -> predictor_pb2.PredictRequest:
    tree = predictor_pb2.TreeQuery(context_tokens=context, draft_tokens=tokens, parents=parents)
    return predictor_pb2.PredictRequest(target_fingerprint=GEOMETRY.fingerprint, trees=[tree])


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


HOSTILE = {
    "no trees": (request([]), "trees holds 0"),
    "too many trees": (request([([1], [], [])] * 65), "trees holds 65"),
    "empty context": (raw_query(b""), "context_tokens is empty"),
    "long context": (raw_query(ids(1) * (2**18 + 1)), "context_tokens has 1048580 bytes"),
    "odd bytes": (raw_query(tokens=b"\1\2\3"), "draft_tokens has 3 bytes"),
    "odd context": (raw_query(b"\1"), "context_tokens has 1 bytes"),
    "missing parents": (raw_query(tokens=ids(1, 2), parents=ids(-1)), "parents holds 1"),
    "cycle": (raw_query(tokens=ids(1, 2), parents=ids(1, 0)), "parents[0] is 1"),
    "own parent": (raw_query(tokens=ids(1), parents=ids(0)), "parents[0] is 0"),
    "forward": (raw_query(tokens=ids(1, 2, 3), parents=ids(-1, 2, 0)), "parents[1] is 2"),
    "below the root": (raw_query(tokens=ids(1), parents=ids(-2)), "parents[0] is -2"),
    "negative id": (raw_query(tokens=ids(-1), parents=ids(-1)), "draft_tokens[0] is -1"),
    "beyond the vocabulary": (raw_query(tokens=ids(1, 1000), parents=ids(-1, 0)), "draft_tokens[1] is 1000"),
    "extreme id": (raw_query(ids(2**31 - 1)), "context_tokens[0] is 2147483647"),
    "a million nodes": (
        raw_query(tokens=bytes(4 * 10**6), parents=ids(-1) * 10**6),
        "draft_tokens holds 1000000 nodes",
    ),
    "257 nodes": (raw_query(tokens=bytes(4 * 257), parents=ids(-1) * 257), "draft_tokens holds 257 nodes"),
}


async def test_hostile_messages_name_the_field_and_the_server_lives_on() -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model) as server, connected(server) as stub:
        for name, (message, words) in HOSTILE.items():
            code, text = await refusal(stub.Predict(message))
            assert code is Code.INVALID_ARGUMENT and words in text, (name, code, text)
        check(await stub.Predict(request([good])), [good])

        call = stub.PredictStream()
        for number, (message, _) in enumerate(HOSTILE.values()):
            await call.write(StreamRequest(request_id=number, request=message))
        await call.write(StreamRequest(request_id=99, request=request([good])))
        await call.write(StreamRequest(request_id=98, request=request([good], "x")))
        await call.done_writing()
        answers = {answer.request_id: answer async for answer in call}
        for number, (name, (_, words)) in enumerate(HOSTILE.items()):
            assert answers[number].error.code == 3 and words in answers[number].error.message, name
        check(answers[99].response, [good])
        assert answers[98].error.code == Code.FAILED_PRECONDITION.value[0]
        assert len(model.batches) == 3  # warm-up and the two good ones: nothing hostile reached the model
        assert metric(server, "requests_total", outcome="invalid_argument") == 2 * len(HOSTILE)


async def test_oversize_and_garbage_at_the_wire_level() -> None:
    good = ([1, 2], [3], [-1])
    async with running(max_message_bytes=2**20) as server, channel(server) as open_channel, connected(server) as stub:
        code, _ = await refusal(stub.Predict(HOSTILE["a million nodes"][0]))
        assert code is Code.RESOURCE_EXHAUSTED  # beyond max_message_bytes
        generator = np.random.default_rng(3)
        valid = request([good]).SerializeToString()
        garbage = [
            b"\xff" * 50,
            b"\x0a\xff\xff\xff\xff\x0f",
            valid[:-1],
            *(generator.bytes(n) for n in range(1, 200, 7)),
        ]
        for data in garbage:
            code, text = await refusal(raw_method(open_channel, "Predict")(data))
            # Random bytes may parse as a message with unknown fields: then the fingerprint is missing.
            assert code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION) and text, data
        assert (await refusal(raw_method(open_channel, "Predict")(b"\xff" * 50)))[0] is Code.INVALID_ARGUMENT
        assert (await refusal(raw_method(open_channel, "GetModelInfo")(b"\xff" * 50)))[0] is Code.INVALID_ARGUMENT

        call = open_channel.stream_stream(f"/{SERVICE_NAME}/PredictStream")()
        await call.write(b"\xff" * 20)
        error = predictor_pb2.PredictStreamResponse.FromString(await call.read()).error
        assert error.code == 3 and "PredictStreamRequest" in error.message
        await call.write(StreamRequest(request_id=5, request=request([good])).SerializeToString())
        check(predictor_pb2.PredictStreamResponse.FromString(await call.read()).response, [good])
        await call.done_writing()
        assert await call.code() is Code.OK


async def test_a_failing_model_is_internal_logged_once_and_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model) as server, connected(server) as stub:
        model.fail = True
        with caplog.at_level(logging.ERROR):
            code, text = await refusal(stub.Predict(request([good])))
        assert code is Code.INTERNAL and "secret" not in text and "RuntimeError" not in text
        assert [("secret detail" in str(r.exc_info)) for r in caplog.records] == [True]
        model.fail = False
        check(await stub.Predict(request([good])), [good])


async def test_health_is_not_serving_until_the_warm_up_ran() -> None:
    model = fake.FakeExpertModel()
    model.gate.clear()

    server = PredictorServer(settings(), model)
    starting = asyncio.create_task(server.start())
    await asyncio.to_thread(model.entered.wait, 10)
    async with channel(server) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await status("") == health_pb2.HealthCheckResponse.SERVING
        assert await status(SERVICE_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        model.gate.set()
        await starting
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await status(SERVICE_NAME) == health_pb2.HealthCheckResponse.SERVING
        stopping = asyncio.create_task(server.stop())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        await stopping


async def test_reflection_and_metrics() -> None:
    async with running(max_message_bytes=2**20) as server, channel(server) as open_channel:

        async def asked() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME)

        answers = [
            a async for a in reflection_pb2_grpc.ServerReflectionStub(open_channel).ServerReflectionInfo(asked())
        ]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {"ecospec.predictor.v1.ExpertPredictorService", "grpc.health.v1.Health"} <= names
        assert answers[1].file_descriptor_response.file_descriptor_proto

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=5) as response:
                return response.read().decode()

        text = await asyncio.to_thread(scrape)
        assert 'ecospec_predictor_requests_total{outcome="ok"} 0.0' in text
        assert 'ecospec_predictor_queue_seconds_bucket{le="0.0001"}' in text


async def test_a_full_queue_is_resource_exhausted() -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model, max_queue=2) as server, connected(server) as stub:
        model.gate.clear()
        first = asyncio.ensure_future(stub.Predict(request([good])))
        await until(lambda: len(model.batches) == 2)  # the warm-up and the one that now holds the model
        waiting = [asyncio.ensure_future(stub.Predict(request([good]))) for _ in range(2)]
        await asyncio.sleep(0.2)
        code, text = await refusal(stub.Predict(request([good])))
        assert code is Code.RESOURCE_EXHAUSTED and "max_queue is 2" in text
        call = stub.PredictStream()
        await call.write(StreamRequest(request_id=4, request=request([good])))
        assert (await call.read()).error.code == 8
        await call.done_writing()
        model.gate.set()
        for answered in (first, *waiting):
            check(await answered, [good])


async def test_one_run_is_bounded_in_rows_too() -> None:
    model = fake.FakeExpertModel()
    model.max_rows = 10
    small, large = ([1, 2], [3, 4], [-1, 0]), ([5], [7] * 20, [-1] * 20)  # 3 and 21 rows
    async with running(model) as server, connected(server) as stub:
        model.gate.clear()
        work = [small, small, small, small, large, small]
        calls = [asyncio.ensure_future(stub.Predict(request([work[0]])))]
        await until(lambda: len(model.batches) == 2)
        for tree in work[1:]:
            calls.append(asyncio.ensure_future(stub.Predict(request([tree]))))
            await asyncio.sleep(0.05)  # in this order
        model.gate.set()
        for tree, call in zip(work, calls, strict=True):
            check(await call, [tree])
        assert [len(batch) for batch in model.batches[1:]] == [1, 3, 1, 1]


async def test_late_work_makes_room_in_a_full_queue() -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model, max_queue=1) as server, connected(server) as stub:
        model.gate.clear()
        first = asyncio.ensure_future(stub.Predict(request([good])))
        await until(lambda: len(model.batches) == 2)
        stream = stub.PredictStream()
        await stream.write(StreamRequest(request_id=1, request=request([good]), timeout_microseconds=100_000))
        await asyncio.sleep(0.3)
        await stream.write(StreamRequest(request_id=2, request=request([good])))
        answer = await stream.read()  # the first one is told when the second takes its place
        assert answer.request_id == 1 and answer.error.code == Code.DEADLINE_EXCEEDED.value[0]
        model.gate.set()
        check((await stream.read()).response, [good])
        check(await first, [good])
        await stream.done_writing()


async def test_work_that_nobody_waits_for_never_reaches_the_model() -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model) as server, connected(server) as stub:
        model.gate.clear()
        first = asyncio.ensure_future(stub.Predict(request([good])))
        await until(lambda: len(model.batches) == 2)
        late = stub.Predict(request([([101], [], [])]), timeout=0.1)
        gone = stub.Predict(request([([102], [], [])]))
        stream = stub.PredictStream()
        await stream.write(StreamRequest(request_id=1, request=request([([103], [], [])]), timeout_microseconds=50_000))
        dropped = stub.PredictStream()
        await dropped.write(StreamRequest(request_id=1, request=request([([104], [], [])])))
        assert (await refusal(late))[0] is Code.DEADLINE_EXCEEDED
        gone.cancel()
        dropped.cancel()
        await asyncio.sleep(0.2)
        model.gate.set()
        check(await first, [good])
        answer = await stream.read()
        assert answer.request_id == 1 and answer.error.code == Code.DEADLINE_EXCEEDED.value[0]
        await stream.write(StreamRequest(request_id=2, request=request([good]), timeout_microseconds=5_000_000))
        check((await stream.read()).response, [good])
        await stream.done_writing()
        ran = {int(q.context_tokens[-1]) for batch in model.batches for q in batch}
        assert not ran & {101, 102, 103, 104}
        assert metric(server, "requests_total", outcome="cancelled") >= 2


async def test_stop_answers_what_was_accepted_and_ends_idle_streams() -> None:
    model = fake.FakeExpertModel()
    good = ([1, 2], [3], [-1])
    async with running(model, grace_seconds=30) as server, connected(server) as stub:
        idle = stub.PredictStream()
        await idle.write(StreamRequest(request_id=1, request=request([good])))
        check((await idle.read()).response, [good])
        model.gate.clear()
        busy = stub.PredictStream()
        await busy.write(StreamRequest(request_id=2, request=request([good])))
        await until(lambda: len(model.batches) == 3)
        stopping = asyncio.create_task(server.stop())
        assert await idle.read() is grpc.aio.EOF
        model.gate.set()
        check((await busy.read()).response, [good])
        assert await busy.read() is grpc.aio.EOF and await busy.code() is Code.OK
        async with asyncio.timeout(5):  # far below the grace
            await stopping


async def test_a_start_that_fails_says_why_and_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("port", "metrics_port"):
            with pytest.raises(PredictorError, match=str(port)):
                async with running(**{name: port}):
                    pass
    model = fake.FakeExpertModel()
    model.fail = True
    with pytest.raises(PredictorError, match="first prediction"):
        async with running(model):
            pass
    assert not [thread.name for thread in threading.enumerate() if thread.name == "expert-model"]


async def test_a_client_that_never_reads_cannot_fill_the_memory() -> None:
    async with running(max_queue=4) as server, connected(server) as stub:
        call = stub.PredictStream()
        bad = StreamRequest(
            request_id=1, request=predictor_pb2.PredictRequest(target_fingerprint="x", trees=[query(([1], [], []))])
        )
        for _ in range(200):
            await call.write(bad)
        await call.done_writing()
        assert len([answer async for answer in call]) == 200
        check(await stub.Predict(request([([1], [2], [-1])])), [([1], [2], [-1])])
