"""Live routes from a real Redis: scored while callers come first, collected for training; versions published and followed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from fake_engine import ChainEngine
from ports import free_port
from predictor_harness import GEOMETRY, check, connected, fake, request, running
from predictor_server import predictor_process
from prometheus_client import CollectorRegistry
from redis_server import RedisServer, eventually
from safetensors.torch import save_file
from scheduler_harness import Harness
from tiny_traces import CONFIG
from trace_records import random_record

from ecospec_orchestrator.accounting.state_metrics import StateMetrics
from ecospec_orchestrator.state.redis import RedisStore
from ecospec_orchestrator.state.route_sampler import RouteSampler
from ecospec_predictor.base import Query
from ecospec_predictor.cli import main
from ecospec_predictor.errors import PredictorError
from ecospec_predictor.live import drift, registry, scorer
from ecospec_predictor.live.metrics import LiveMetrics
from ecospec_predictor.live.questions import questions_of
from ecospec_predictor.live.scorer import LiveScorer
from ecospec_predictor.live.serving import end
from ecospec_predictor.live.stream_source import documents_from_stream
from ecospec_predictor.server import PredictorServer
from ecospec_proto import predictor_pb2, predictor_pb2_grpc
from ecospec_proto.predictor_version import PredictorVersion
from ecospec_proto.shared_state import (
    TRACE_FIELD,
    VERSION_FIELD,
    StateStoreError,
    StoreAddress,
    traces_key,
    versions_key,
)
from ecospec_proto.trace_document import TraceDocument
from ecospec_proto.trace_record import encode_record
from ecospec_proto.traces import TraceReader, TraceWriter

KEY = traces_key(GEOMETRY.fingerprint)
ROWS = 40  # of a record
PREFIX = "ECOSPEC_PREDICTOR_SERVICE_"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running_server:
        yield running_server


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """int16 [rows, layers, top_k]: what TokenModel predicts."""
    shape = (len(tokens), GEOMETRY.moe_layers, GEOMETRY.top_k)
    return ((tokens[:, None, None] + np.arange(np.prod(shape[1:])).reshape(shape[1:])) % GEOMETRY.experts).astype(
        np.int16
    )


class TokenModel(fake.FakeExpertModel):  # type: ignore[name-defined,misc]
    """The experts of a row follow from its token alone, no two alike in a layer."""

    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        super().predict(queries)
        return [routes_of(np.r_[q.context_tokens[-1:], q.draft_tokens]).astype(np.uint8) for q in queries]


def record(seed: int, wrong_layer: int | None = None) -> TraceDocument:
    """What the model predicts, but for one layer."""
    made = random_record(np.random.default_rng(seed), ROWS, unrouted=0)
    routes = routes_of(made.tokens)
    if wrong_layer is not None:
        routes[:, wrong_layer] = (routes[:, wrong_layer] + GEOMETRY.top_k) % GEOMETRY.experts
    return dataclasses.replace(made, routes=routes)


def add(server: RedisServer, *records: TraceDocument) -> None:
    with server.client() as client:
        for each in records:
            client.xadd(KEY, {TRACE_FIELD: encode_record(each, GEOMETRY)})


class Scoring:
    """The server, its scorer, and the scorer's metrics."""

    def __init__(self, server: PredictorServer, prometheus: CollectorRegistry) -> None:
        self.server, self._prometheus = server, prometheus

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._prometheus.get_sample_value(f"ecospec_predictor_{name}", labels)

    def of_target(self, name: str, **labels: str) -> float | None:
        return self(name, fingerprint=GEOMETRY.fingerprint, **labels)

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not true():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def scoring(
    url: str, model: Any = None, rate: float = 1e6, baseline: float | None = 0.95
) -> AsyncIterator[Scoring]:
    async with running(model or TokenModel()) as predictor:
        prometheus = CollectorRegistry()
        metrics, address = LiveMetrics(prometheus), StoreAddress.parse(url)
        live = LiveScorer(address, predictor.served, lambda _model: baseline, metrics, rate, margin=0.05, max_nodes=256)
        task = asyncio.create_task(live.run())
        try:
            yield Scoring(predictor, prometheus)
        finally:
            await end([task])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOK_SECONDS", 0.01), ("BACKOFF_SECONDS", (0.02, 0.1))):
        monkeypatch.setattr(scorer, name, value)
    monkeypatch.setattr(registry, "BACKOFF_SECONDS", (0.02, 0.1))


async def test_a_model_is_scored_per_layer_and_drift_is_an_alarm(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(drift, "WINDOW_ROWS", 30)
    monkeypatch.setattr(drift, "ROLLING_WINDOWS", 3)
    async with scoring(server.url) as live:
        add(server, record(0))
        scored = ROWS
        await live.until(lambda: live("scored_tokens_total") == scored)
        await live.until(lambda: live.of_target("rolling_top_k_accuracy_mean") == 1)
        assert live.of_target("drift") == 0 and live.of_target("held_out_top_k_accuracy") == 0.95
        for seed in range(1, 5):
            add(server, record(seed, wrong_layer=1))
            scored += ROWS
            await live.until(lambda scored=scored: live("scored_tokens_total") == scored)
        await live.until(lambda: live.of_target("drift") == 1)
        assert live.of_target("rolling_top_k_accuracy", layer="0") == 1
        assert (live.of_target("rolling_top_k_accuracy", layer="1") or 0) < 0.3
        assert 0.6 < (live.of_target("rolling_top_k_accuracy_mean") or 0) < 0.8
        for seed in range(9, 14):
            add(server, record(seed))
            scored += ROWS
            await live.until(lambda scored=scored: live("scored_tokens_total") == scored)
        await live.until(lambda: live.of_target("drift") == 0)
    told = [r.getMessage() for r in caplog.records if "drifts" in r.getMessage()]
    assert len(told) == 2 and "0.950 when it was trained" in told[0] and "no more" in told[1]


async def test_callers_come_first(server: RedisServer) -> None:
    model = TokenModel()
    async with scoring(server.url, model) as live:
        model.gate.clear()
        model.entered.clear()
        model.batches.clear()
        async with connected(live.server) as stub:
            trees = [([1, 2], [3], [-1])]
            calls = [asyncio.ensure_future(stub.Predict(request(trees))) for _ in range(3)]
            await asyncio.to_thread(model.entered.wait, 10)
            batcher = live.server.served()[0].batcher
            await live.until(lambda: batcher.waiting or len(model.batches[0]) == 3)
            calls += [asyncio.ensure_future(stub.Predict(request(trees))) for _ in range(3)]
            await live.until(lambda: batcher.waiting >= 3)
            add(server, record(1))
            await asyncio.sleep(0.2)  # time in which a scorer without manners would have queued its question
            assert sum(len(b) for b in model.batches) + batcher.waiting == 6
            model.gate.set()
            await asyncio.gather(*calls)
        await live.until(lambda: live("scored_tokens_total") == ROWS)
        asked = [q for batch in model.batches for q in batch]
        assert len(asked) > 6 and all(q.context_tokens.tolist() == [1, 2] for q in asked[:6])


async def test_the_rate_is_kept(server: RedisServer) -> None:
    """A slow machine only makes it later."""
    rate, now = 40.0, asyncio.get_running_loop().time
    async with scoring(server.url, rate=rate) as live:
        began = now()
        add(server, record(1))
        await live.until(lambda: live("scored_tokens_total") == ROWS)
        last = len(questions_of(record(1), 16, 256)[-1].rows)  # which need not be paid for yet
        assert now() - began >= (ROWS - last) / rate


async def test_broken_entries_are_passed_over_and_the_newest_is_taken(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    add(server, *(record(seed, wrong_layer=0) for seed in range(5)), record(9))
    async with scoring(server.url) as live:
        await live.until(lambda: live.of_target("rolling_top_k_accuracy_mean") == 1)
        assert live("scored_tokens_total") == ROWS
        with server.client() as client:
            client.xadd(KEY, {TRACE_FIELD: b"EsTr" + bytes(60)})
            await live.until(lambda: live("trace_records_refused_total") == 1)
            client.xadd(KEY, {"other": b"x"})
            await live.until(lambda: live("trace_records_refused_total") == 2)
        add(server, record(2))
        await live.until(lambda: live("scored_tokens_total") == 2 * ROWS)
    assert [r.levelname for r in caplog.records if "passed over" in r.getMessage()] == ["WARNING"] * 2


async def test_a_store_that_is_gone_is_told_once_and_taken_up_again(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ecospec_predictor")
    async with scoring(server.url) as live:
        await live.until(lambda: live("state_store_up") == 1)
        server.kill()
        await live.until(lambda: live("state_store_up") == 0)
        await asyncio.sleep(0.2)  # some tries
        async with connected(live.server) as stub:
            tree = ([1, 2], [3], [-1])
            assert (await stub.Predict(request([tree]))).trees  # serving goes on
        await asyncio.to_thread(server.start)
        await live.until(lambda: live("state_store_up") == 1)
        add(server, record(1))
        await live.until(lambda: live("scored_tokens_total") == ROWS)
    told = [r.getMessage() for r in caplog.records if "state store" in r.getMessage()]
    assert len(told) == 2 and "cannot be read" in told[0] and told[1].endswith("again.")


async def test_figures_of_one_version_are_not_those_of_the_next(server: RedisServer) -> None:
    async with scoring(server.url) as live:
        add(server, record(1, wrong_layer=0))
        await live.until(lambda: (live.of_target("rolling_top_k_accuracy_mean") or 1) < 0.8)
        other = TokenModel()
        other.version = "fake-2"
        await live.server.swap(other)
        add(server, record(2))
        await live.until(lambda: live.of_target("rolling_top_k_accuracy_mean") == 1)


async def test_a_task_that_swallows_a_cancellation_ends_all_the_same() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end([task])
    assert task.cancelled() and swallowed == 3
    await end([])


def test_what_orchestrators_sample_is_what_training_reads(server: RedisServer) -> None:
    geometry, metrics = ChainEngine.geometry, StateMetrics(CollectorRegistry())
    store = RedisStore(StoreAddress.parse(server.url), geometry.fingerprint, 1000, metrics)
    harness = Harness("likelihood")
    sampler = RouteSampler(geometry, 1e6, store.append_trace, metrics.sampled_tokens.inc)
    harness.scheduler.on_verified = sampler.observe
    for i in range(4):
        harness.submit(f"r{i}", (3, 4, 5 + i), 30)
    harness.scheduler.start()
    harness.collect(4)
    harness.scheduler.stop()
    sampler.close()
    store.close()
    documents = list(documents_from_stream(server.url, geometry))
    assert len(documents) == 4 and sorted(d.tokens[2] for d in documents) == [5, 6, 7, 8]
    assert {d.domain for d in documents} == {"live"}


def test_the_newest_documents_come_once(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    records = [record(seed) for seed in range(70)]
    add(server, *records[:50], records[49])  # sent twice
    with server.client() as client:
        client.xadd(KEY, {TRACE_FIELD: b"broken"})
    add(server, *records[50:])
    read = lambda limit: [d.document_id for d in documents_from_stream(server.url, GEOMETRY, limit)]
    newest = [r.document_id for r in reversed(records)]
    assert read(None) == newest and read(25) == newest[:25] and read(70) == newest
    assert any("1 entries" in r.getMessage() for r in caplog.records)
    other = dataclasses.replace(GEOMETRY, revision="r2")
    assert list(documents_from_stream(server.url, other)) == []
    server.kill()
    with pytest.raises(StateStoreError, match="cannot be read"):
        read(1)
    with pytest.raises(ValueError, match="redis://"):
        documents_from_stream("http://:hush@x", GEOMETRY)


def model_directory(root: Path, version: str, accuracy: float = 0.9) -> Path:
    directory = root / version
    directory.mkdir()
    training = {"version": version, "held_out_top_k_accuracy": accuracy, "command": "train", "by_layer": [1]}
    config = {"format_version": 1, "target": dataclasses.asdict(GEOMETRY), "training": training}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(version.encode() * 100)
    return directory


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*arguments: str, **variables: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(PREFIX + name, value)
            return Done(main(arguments), *capsys.readouterr())

    return run


def test_publish_versions_and_collect_from_the_command_line(
    server: RedisServer, tmp_path: Path, command: Command
) -> None:
    one, two = (str(model_directory(tmp_path, version)) for version in ("one", "two"))
    assert command("versions", "--state-store", server.url).out == "Nothing is published.\n"
    assert command("publish", "--model-dir", one, "--state-store", server.url).code == 0
    done = command("publish", "--model-dir", two, "--location", "/elsewhere/two", STATE_STORE_URL=server.url)
    assert (done.code, done.err) == (0, "") and "two in /elsewhere/two is now current" in done.out
    lines = command("versions", "--state-store", server.url).out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [GEOMETRY.fingerprint, "current", "two"],
        [GEOMETRY.fingerprint, "before", "one"],
    ]
    assert "held_out_top_k_accuracy 0.9" in lines[0] and one in lines[1]

    add(server, record(1), record(2))
    out = tmp_path / "traces"
    for expected in ("2 new", "0 new"):
        done = command("collect-stream", "--model-dir", one, "--out", str(out), "--state-store", server.url)
        assert done.code == 0 and done.out.startswith(expected), done.err
    assert {d.document_id for d in TraceReader(out, GEOMETRY)} == {record(1).document_id, record(2).document_id}


def test_training_goes_on_from_what_is_live(server: RedisServer, tmp_path: Path, command: Command) -> None:
    with TraceWriter(tmp_path / "traces", GEOMETRY, "test") as writer:
        for seed in range(8):
            writer.add(record(seed))
    add(server, *(record(seed) for seed in range(6, 20)))
    table = torch.randn(GEOMETRY.vocab_size, GEOMETRY.hidden_size).bfloat16()
    save_file({"model.embed_tokens.weight": table}, tmp_path / "embeddings.safetensors")
    config = tmp_path / "predictor.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    options = ("train", str(config), "--from-stream", "--set", "training.epochs=1")
    done = command(*options, STATE_STORE_URL=server.url)
    assert done.code == 0 and done.out.startswith("12 new records of fake"), done
    assert len(TraceReader(tmp_path / "traces", GEOMETRY)) == 20 and (tmp_path / "run/best").is_dir()
    assert "is missing; it is no address" in command(*options).err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("publish", "--model-dir", "{model}"), 2, "is missing; it is no address"),
        (("publish", "--model-dir", "{model}", "--state-store", "redis://:hush@x:hush"), 2, "is a secret"),
        (("publish", "--model-dir", "missing", "--state-store", "{url}"), 1, "config.json"),
        (("versions", "--state-store", "redis://127.0.0.1:1"), 1, "redis://127.0.0.1:1/0 cannot be used"),
        (
            ("collect-stream", "--model-dir", "{model}", "--out", "{out}", "--state-store", "redis://127.0.0.1:1"),
            1,
            "cannot be read",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(
    server: RedisServer, tmp_path: Path, command: Command, arguments: tuple[str, ...], code: int, words: str
) -> None:
    places = {"model": model_directory(tmp_path, "one"), "url": server.url, "out": tmp_path / "out"}
    done = command(*(argument.format(**places) for argument in arguments))
    assert done.code == code and words in done.err, done.err
    assert len(done.err.strip().splitlines()) == 1 and "hush" not in done.err


def test_a_version_keeps_its_files(server: RedisServer, tmp_path: Path) -> None:
    one = model_directory(tmp_path, "one")
    entry = registry.describe(one)
    with server.client() as client:
        registry.publish(client, entry)
        registry.publish(client, registry.describe(model_directory(tmp_path, "two")))
        registry.publish(client, entry)  # back to the one before
        assert [v.version for v in registry.versions(client, GEOMETRY.fingerprint)] == ["one", "two", "one"]
        assert registry.check_files(entry) == one
        (one / "model.safetensors").write_bytes(b"changed")
        with pytest.raises(PredictorError, match="publish it again"):
            registry.check_files(entry)
        with pytest.raises(PredictorError, match="published already"):
            registry.publish(client, registry.describe(one))
        client.xadd(versions_key(GEOMETRY.fingerprint), {VERSION_FIELD: b"{"})
        assert len(registry.versions(client, GEOMETRY.fingerprint)) == 3, "what is broken is passed over"
        for _ in range(registry.KEPT_VERSIONS + 5):
            registry.publish(client, entry)
        assert client.xlen(versions_key(GEOMETRY.fingerprint)) == registry.KEPT_VERSIONS
        with pytest.raises(PredictorError, match="cannot be read"):
            registry.check_files(dataclasses.replace(entry, location=str(tmp_path / "gone")))


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    one = model_directory(tmp_path, "one")
    digests = {registry.digest_of(one)}
    (one / "model.safetensors").rename(one / "renamed")
    digests.add(registry.digest_of(one))
    (one / "renamed").write_bytes(b"x")
    digests.add(registry.digest_of(one))
    (one / "more").touch()
    digests.add(registry.digest_of(one))
    assert len(digests) == 4


async def test_watching_gives_the_current_version_and_then_every_new_one(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def publish(version: str) -> PredictorVersion:
        entry = PredictorVersion(GEOMETRY.fingerprint, version, "/models", "a" * 64, {}, 1.0)
        with server.client() as client:
            registry.publish(client, entry)
        return entry

    expected = [publish("1")]
    watching = registry.watch(server.url, GEOMETRY.fingerprint)
    async with asyncio.timeout(30):
        assert await anext(watching) == expected[0]
        coming = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0.05)
        second = publish("2")
        assert await coming == second
        server.kill()
        coming = asyncio.ensure_future(anext(watching))
        await asyncio.sleep(0.2)  # some tries
        await asyncio.to_thread(server.start)
        third = publish("3")
        assert await coming == third
        await watching.aclose()  # type: ignore[attr-defined]
    assert len([r for r in caplog.records if "registry" in r.getMessage() and r.levelno == logging.WARNING]) == 1


async def test_a_running_predictor_serves_what_is_published(server: RedisServer, tmp_path: Path) -> None:
    one, two, changed = (model_directory(tmp_path, version) for version in ("one", "two", "changed"))

    def publish(entry: PredictorVersion) -> None:
        with server.client() as client:
            registry.publish(client, entry)

    settings = {"state_store_url": server.url, "follow_registry": True, "model_dir": str(one)}
    metrics_port, target = free_port(), f'fingerprint="{GEOMETRY.fingerprint}"'
    with predictor_process(GEOMETRY, **settings, metrics_port=metrics_port) as (_process, port):

        def metric(text: str) -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as answer:
                return text in answer.read().decode()

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as opened:
            stub = predictor_pb2_grpc.ExpertPredictorServiceStub(opened)

            async def serves(version: str) -> None:
                async with asyncio.timeout(20):
                    while (await stub.GetModelInfo(predictor_pb2.GetModelInfoRequest())).model_version != version:
                        await asyncio.sleep(0.02)

            await serves("one")
            await asyncio.to_thread(eventually, lambda: metric(f"held_out_top_k_accuracy{{{target}}} 0.9"))
            add(server, record(1))
            await asyncio.to_thread(eventually, lambda: not metric("ecospec_predictor_scored_tokens_total 0.0"))
            publish(registry.describe(two))
            await serves("two")
            entry = registry.describe(changed)
            (changed / "model.safetensors").write_bytes(b"changed")
            publish(entry)
            await asyncio.to_thread(eventually, lambda: metric('swaps_total{outcome="failed"} 1.0'))
            await serves("two")
            publish(registry.describe(one))
            await serves("one")
            trees = [([1, 2, 3], [4], [-1])]
            check(await stub.Predict(request(trees)), trees)
