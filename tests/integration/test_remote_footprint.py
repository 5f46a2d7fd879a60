"""The client of the predictor against real services on real ports, healthy and faulty."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from ports import free_port
from predictor_stub import GEOMETRY, Stub, experts_of, serve

from ecospec_orchestrator.core import DraftTree
from ecospec_orchestrator.footprint import remote
from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource

DEADLINE = 5.0  # only what is meant to be missed comes later, however busy the machine is
SHORT = 0.2  # for those who wait until it is over


def tree_of(*tokens: int) -> DraftTree:
    n = len(tokens)
    parents = np.arange(-1, n - 1, dtype=np.int32)
    return DraftTree(np.array(tokens, np.int32), parents, np.ones(n, np.float32), np.arange(1, n + 1, dtype=np.int32))


TREES = [
    TreeContext([1, 2, 3, 4, 5, 6], tree_of(10, 11, 12)),
    TreeContext([9], DraftTree.empty()),
    TreeContext((7, 8), tree_of(13)),
]


def check(result: list, trees: list[TreeContext]) -> None:
    """Bit by bit against the service's rule."""
    assert len(result) == len(trees)
    for footprints, item in zip(result, trees, strict=True):
        tokens = [item.context_tokens[-1], *item.tree.tokens.tolist()]
        assert footprints.known.tolist() == [True] * len(tokens)
        assert footprints.experts.dtype == np.uint64
        assert footprints.experts.shape == (len(tokens), GEOMETRY.moe_layers, GEOMETRY.words)
        for row, token in enumerate(tokens):
            for layer, wanted in enumerate(experts_of(token, GEOMETRY)):
                words = footprints.experts[row, layer]
                found = {e for e in range(64 * GEOMETRY.words) if int(words[e // 64]) >> (e % 64) & 1}
                assert found == set(wanted.tolist())


def problem_of(source: RemoteFootprintSource, trees: list[TreeContext] = TREES) -> FootprintUnavailableError:
    with pytest.raises(FootprintUnavailableError) as caught:
        source.begin(trees)()
    return caught.value


def reason_of(source: RemoteFootprintSource, trees: list[TreeContext] = TREES) -> str:
    return problem_of(source, trees).reason


def wait_until_answered(source: RemoteFootprintSource, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            return check(source.begin(TREES)(), TREES)
        except FootprintUnavailableError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def wait_for_reason(source: RemoteFootprintSource, reason: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while reason_of(source) != reason:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def stub() -> Stub:
    return Stub()


@pytest.fixture
def port(stub: Stub) -> Iterator[int]:
    server, port = serve(stub)
    yield port
    stub.stopped.set()
    server.stop(0).wait()


@pytest.fixture
def source(port: int) -> Iterator[RemoteFootprintSource]:
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE)
    wait_until_answered(source)  # the first time the kernel is compiled
    yield source
    source.close()


def test_answers_and_what_is_asked(stub: Stub, port: int) -> None:
    seconds: list[float] = []
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE, seconds.append)
    try:
        wait_until_answered(source)
        seconds.clear()
        for _ in range(20):
            check(source.begin(TREES)(), TREES)
        assert source.begin([])() == []
    finally:
        source.close()
    assert len(seconds) == 20 and all(0 < s < DEADLINE for s in seconds)
    last = stub.requests[-1]
    assert 0 < last.timeout_microseconds <= int(DEADLINE * 1e6)  # what is left when it is sent
    assert last.request.target_fingerprint == GEOMETRY.fingerprint
    assert np.frombuffer(last.request.trees[0].context_tokens, "<i4").tolist() == [
        3,
        4,
        5,
        6,
    ]  # max_context_tokens is 4
    assert np.frombuffer(last.request.trees[0].parents, "<i4").tolist() == [-1, 0, 1]
    assert len({m.request_id for m in stub.requests}) == len(stub.requests)


def test_another_version_is_told_once(stub: Stub, port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ecospec_orchestrator.footprint")
    versions: list[str] = []
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE, on_version=versions.append)
    try:
        wait_until_answered(source)
        for version in ("v", "w", "w", "", "v"):
            stub.version = version
            source.begin(TREES)()
    finally:
        source.close()
    assert versions == ["v", "w", "v"]
    assert [r.getMessage().split("with ")[1] for r in caplog.records if "instead of" in r.getMessage()] == [
        "model w instead of v.",
        "model v instead of w.",
    ]


def test_down_killed_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ecospec_orchestrator.footprint")
    port = free_port()

    def start() -> subprocess.Popen[str]:
        script = Path(__file__).with_name("predictor_stub.py")
        process = subprocess.Popen([sys.executable, str(script), str(port)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip() == str(port)
        return process

    begin = time.monotonic()
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE)
    assert reason_of(source) == "unavailable"
    assert time.monotonic() - begin < 2  # neither waits for a connection
    process = start()
    try:
        wait_until_answered(source)
        process.kill()
        process.communicate()
        wait_for_reason(source, "unavailable", 10)
        begin = time.monotonic()
        for _ in range(50):
            assert reason_of(source) == "unavailable"
        assert time.monotonic() - begin < DEADLINE  # 50 refusals cost less than one deadline
        time.sleep(0.5)
        caplog.clear()
        process = start()
        wait_until_answered(source)
        assert [r.levelname for r in caplog.records] == ["INFO"]  # back, said once
    finally:
        source.close()
        process.kill()
        process.communicate()
    assert reason_of(source) == "unavailable"


def test_lost_is_logged_once(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    server, port = serve(stub)
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE)
    try:
        wait_until_answered(source)
        caplog.clear()
        server.stop(0).wait()
        wait_for_reason(source, "unavailable")
        time.sleep(0.5)
        assert [r.levelname for r in caplog.records if "footprint" in r.name] == ["WARNING"]
        assert str(port) in caplog.text
    finally:
        source.close()


def test_slow_service_costs_a_bounded_time_and_recovers(stub: Stub, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, now = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, SHORT), [time.monotonic()]

    def asked(calls: int) -> int:
        """How many of so many calls waited for an answer, in vain; the others were refused at once."""
        problems = [problem_of(source) for _ in range(calls)]
        assert {problem.reason for problem in problems} == {"deadline"}
        return sum("pause after" not in str(problem) for problem in problems)

    try:
        wait_until_answered(source)
        stub.delay = 2.0
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0]))  # pauses end when it is moved on
        assert asked(50) == 3
        now[0] += 0.11
        assert asked(50) == 1
        now[0] += 0.11
        assert asked(50) == 0  # the pause is longer now
        now[0] += 0.1
        assert asked(50) == 1
        stub.delay = 0.0
        monkeypatch.undo()
        wait_until_answered(source)
    finally:
        source.close()


def test_late_answers_are_never_taken_for_the_next(stub: Stub, source: RemoteFootprintSource) -> None:
    stub.delay, source._deadline = 1.0, SHORT
    asked = [TreeContext([1], tree_of(100)), TreeContext([2], tree_of(200))]
    assert reason_of(source, [asked[0]]) == "deadline"
    stub.delay, source._deadline = 0.0, DEADLINE
    # The answer to the first question arrives while the second one waits.
    check(source.begin([asked[1]])(), [asked[1]])
    for at in range(10):
        trees = [TreeContext([at], tree_of(300 + at))]
        check(source.begin(trees)(), trees)


@pytest.mark.parametrize("fault", ["length", "trees", "dtype", "range"])
def test_malformed_answers(stub: Stub, source: RemoteFootprintSource, fault: str) -> None:
    stub.fault = fault
    for _ in range(5):
        assert reason_of(source) == "error"
    stub.fault = ""
    check(source.begin(TREES)(), TREES)


@pytest.mark.parametrize(
    "code, reason",
    [
        (grpc.StatusCode.INTERNAL, "error"),
        (grpc.StatusCode.INVALID_ARGUMENT, "error"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline"),
        (grpc.StatusCode.UNAVAILABLE, "unavailable"),
    ],
)
def test_refusals(stub: Stub, source: RemoteFootprintSource, code: grpc.StatusCode, reason: str) -> None:
    stub.refuse_code = code.value[0]
    assert reason_of(source) == reason
    stub.refuse_code = 0
    check(source.begin(TREES)(), TREES)


def test_a_context_that_is_always_lost_is_sent_again_once(stub: Stub, source: RemoteFootprintSource) -> None:
    trees = [TreeContext([1, 2, 3, 4, 5, 6], tree_of(10), None, "r")]
    check(source.begin(trees)(), trees)
    trees = [TreeContext([1, 2, 3, 4, 5, 6, 7], tree_of(10), None, "r")]
    stub.requests.clear()
    stub.refuse_code = grpc.StatusCode.NOT_FOUND.value[0]
    assert reason_of(source, trees) == "error"
    stub.refuse_code = 0
    first, second = (m.request.trees[0] for m in stub.requests)
    assert first.session_id == second.session_id != 0 and (first.context_start, second.context_start) == (4, 0)
    assert [np.frombuffer(t.context_tokens, "<i4").tolist() for t in (first, second)] == [[7], [4, 5, 6, 7]]
    assert source.contexts_resent == 1
    check(source.begin(trees)(), trees)


def test_tokens_beyond_int32(source: RemoteFootprintSource) -> None:
    assert reason_of(source, [TreeContext([2**31], tree_of(1))]) == "error"
    check(source.begin(TREES)(), TREES)


def test_wrong_target_is_named_once_and_corrected(caplog: pytest.LogCaptureFixture) -> None:
    other = Stub(dataclasses.replace(GEOMETRY, name="another", revision="r9"))
    server, port = serve(other)
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, DEADLINE)
    try:
        wait_for_reason(source, "mismatch", 20)
        time.sleep(2.3)  # it looks again meanwhile
        assert reason_of(source) == "mismatch"
        (record,) = [r for r in caplog.records if r.levelname == "WARNING" and "footprint" in r.name]
        assert "another revision r9" in record.getMessage() and "stub revision 1" in record.getMessage()
        assert not other.requests
        other.geometry = GEOMETRY
        wait_until_answered(source)
    finally:
        source.close()
        server.stop(0).wait()


def test_target_changed_behind_an_open_stream(stub: Stub, source: RemoteFootprintSource) -> None:
    stub.refuse_code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert reason_of(source) == "mismatch"
    asked = len(stub.requests)
    time.sleep(0.05)
    assert reason_of(source) == "mismatch"
    assert len(stub.requests) == asked  # refused here until it is looked at again
    stub.refuse_code = 0
    wait_until_answered(source)


def test_close_while_a_call_waits(stub: Stub, port: int) -> None:
    source = RemoteFootprintSource(f"127.0.0.1:{port}", GEOMETRY, 20.0)
    wait_until_answered(source)
    stub.delay = 30.0
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(reason_of(source)))
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    source.close()
    source.close()
    thread.join(5)
    assert time.monotonic() - begin < 2
    assert reasons == ["unavailable"]
    assert reason_of(source) == "unavailable"


def test_close_at_once() -> None:
    before = threading.active_count()
    for _ in range(3):
        RemoteFootprintSource(f"127.0.0.1:{free_port()}", GEOMETRY, DEADLINE).close()
    assert threading.active_count() <= before + 1  # gRPC keeps a poller
