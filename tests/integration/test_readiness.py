"""/ready: a token is really generated, or others are seen to get theirs; it never waits behind them, and notices what hangs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from api_server import assert_error, wait_until
from live_system import Live

from ecospec_orchestrator.api import service

LONG = {"max_tokens": 25}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READY_CACHE_SECONDS", 0.3)
    monkeypatch.setattr(service, "READY_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(service, "READY_POLL_SECONDS", 0.02)


def test_a_full_server_that_generates_is_ready_and_is_asked_for_nothing() -> None:
    """Every place is taken and the queue is full, so a test token would have to wait, or would be refused."""
    with Live("none", step_seconds=0.05, max_waiting=8) as live, ThreadPoolExecutor(12) as pool:
        scheduler, submitted = live.harness.scheduler, []
        submit = scheduler.submit
        scheduler.submit = lambda request, on_event: (submitted.append(request.request_id), submit(request, on_event))[
            1
        ]
        answers = [pool.submit(live.ask, live.prompt(), **LONG) for _ in range(12)]
        wait_until(lambda: (scheduler.running, scheduler.waiting) == (4, 8))
        wait_until(lambda: len(live.harness.reports) > 1)  # the first tokens are there
        for _ in range(5):
            assert live.server.client.get("/ready").status_code == 200
            time.sleep(0.1)
        assert not any(request_id.startswith("ready-") for request_id in submitted)
        assert [each.result().status_code for each in answers] == [200] * 12


def test_a_probe_that_waits_goes_by_the_tokens_of_others() -> None:
    """Nothing was generated lately, as during a long prompt; then those in front of the probe get tokens."""
    with Live("none", step_seconds=0.05) as live, ThreadPoolExecutor(13) as pool:
        scheduler, engine = live.harness.scheduler, live.harness.engine
        engine.gate = gate = threading.Event()
        answers = [pool.submit(live.ask, live.prompt(), **LONG) for _ in range(12)]
        wait_until(lambda: scheduler.running + scheduler.waiting == 12)
        time.sleep(0.4)
        ready = pool.submit(live.server.client.get, "/ready")
        time.sleep(0.2)
        assert not ready.done()
        gate.set()
        assert ready.result().status_code == 200
        assert scheduler.waiting > 0, "it has not waited for its turn"
        assert [each.result().status_code for each in answers] == [200] * 12


def test_an_engine_that_hangs_with_running_requests_is_not_ready() -> None:
    with Live("none", step_seconds=0.02) as live, ThreadPoolExecutor(1) as pool:
        engine = live.harness.engine
        answer = pool.submit(live.ask, [1, 2], **LONG)
        wait_until(lambda: len(live.harness.reports) > 3)
        assert live.server.client.get("/ready").status_code == 200
        engine.gate = gate = threading.Event()
        time.sleep(0.7)
        assert "none came within" in assert_error(live.server.client.get("/ready"), 503, None)["message"]
        gate.set()
        assert answer.result().status_code == 200
        time.sleep(0.4)
        assert live.server.client.get("/ready").status_code == 200
