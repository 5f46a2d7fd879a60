"""A full queue, clients that leave, an engine that fails, loading, draining, readiness."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_server import (
    MODEL,
    EchoScheduler,
    assert_death_is_told,
    assert_error,
    complete,
    events,
    leave_early,
    metric,
    serve,
    wait_until,
)


def test_a_full_queue_is_429_with_retry_after_and_leaves_nothing_behind(byte_tokenizer: Any) -> None:
    scheduler = EchoScheduler(step_seconds=0.05, max_running=1, max_waiting=1)
    with serve(byte_tokenizer, scheduler) as server:
        answer = server.client.post("/v1/completions", json={"prompt": "abc", "n": 3, "max_tokens": 50})
        assert_error(answer, 429, None)
        assert answer.headers["retry-after"] == "3"
        assert scheduler.running == 0 and scheduler.waiting == 0
        complete(server, prompt="a", max_tokens=1)
        assert metric(server, "ecospec_prompt_tokens_total") == 1


def test_no_more_are_prepared_than_may_run_and_wait(byte_tokenizer: Any) -> None:
    """Tokenizing takes its time, too, and whoever waits for it holds a body."""
    busy, go = threading.Semaphore(0), threading.Event()
    with serve(byte_tokenizer, max_running=1, max_waiting=1) as server, ThreadPoolExecutor(2) as clients:
        service = server.app.state.service
        service._tokenizing.submit(lambda: (busy.release(), go.wait(20)))
        assert busy.acquire(timeout=20)
        post = lambda: httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc"}, trust_env=False, timeout=30)
        try:
            waiting = [clients.submit(post) for _ in range(2)]
            wait_until(lambda: service._preparing.total() == 2)
            for path in ("/v1/completions", "/tokenize"):
                answer = server.client.post(path, json={"prompt": "abc"})
                assert assert_error(answer, 429, None)["code"] == "queue_full" and answer.headers["retry-after"]
        finally:
            go.set()
        assert [each.result().status_code for each in waiting] == [200, 200]
        assert service._preparing.total() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_at_once(byte_tokenizer: Any, stream: bool) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02)) as server:
        left = leave_early(server, stream)
        wait_until(lambda: len(server.scheduler.cancelled) == 2)
        assert all(when - left < 5 for _, when in server.scheduler.cancelled)  # the answer would take 40 s
        assert server.scheduler.running == 0
        wait_until(lambda: metric(server, "ecospec_request_success_total", finished_reason="abort") == 2)


def test_a_waiting_stream_notices_that_the_client_left(byte_tokenizer: Any) -> None:
    """No token is ever sent, so only the disconnect itself can tell."""
    with serve(byte_tokenizer, EchoScheduler(max_running=0)) as server:
        with server.client.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}):
            assert server.scheduler.waiting == 1
        wait_until(lambda: len(server.scheduler.cancelled) == 1)


def test_a_failure_in_mid_stream_is_one_error_then_done(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(fail_after=2)) as server:
        streamed = events(server, prompt="abc", max_tokens=50)
        assert [list(event) == ["error"] for event in streamed] == [False, False, True]
        assert streamed[-1]["error"]["message"] == "The fake engine broke."
        error = assert_error(server.client.post("/v1/completions", json={"prompt": "abc"}), 500, None)
        assert error["code"] == "engine_error"
        assert metric(server, "ecospec_request_success_total", finished_reason="error") == 2


def test_a_dead_step_loop_fails_requests_and_health(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.1)) as server:
        assert server.client.get("/health").json() == {"status": "ok"}
        assert_death_is_told(server, lambda: setattr(server.scheduler, "crash", True))
        assert_error(server.client.get("/ready"), 503, None)


def test_loading_then_draining(byte_tokenizer: Any) -> None:
    from ecospec_orchestrator.api.app import attach

    with serve(byte_tokenizer, loading=True) as server:
        answer = server.client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading"})
        assert_error(server.client.post("/v1/completions", json={"prompt": "abc"}), 503, None)
        assert server.client.get("/metrics").status_code == 200
        attach(server.app, server.scheduler, byte_tokenizer, MODEL, {})
        assert server.client.get("/health").status_code == 200
        complete(server, prompt="abc", max_tokens=1)
        server.app.state.service.draining = True
        answer = server.client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
        error = assert_error(server.client.post("/v1/completions", json={"prompt": "abc"}), 503, None)
        assert error["code"] == "shutting_down"


def test_readiness_really_generates_a_token_and_is_cached(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer) as server:
        for _ in range(5):
            assert server.client.get("/ready").status_code == 200
        assert len(server.scheduler.seen) == 1 and server.scheduler.seen[0].max_tokens == 1
    with serve(byte_tokenizer, EchoScheduler(fail_after=0)) as server:
        error = assert_error(server.client.get("/ready"), 503, None)
        assert "The fake engine broke." in error["message"]


def test_request_ids(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02)) as server:
        assert complete(server, prompt="abc", max_tokens=1, request_id="mine-1")["id"] == "cmpl-mine-1"
        assert complete(server, prompt="abc", max_tokens=1, request_id="mine-1")["id"] == "cmpl-mine-1"
        body = {"prompt": "abc", "max_tokens": 900, "request_id": "mine-1"}
        with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            assert_error(httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False), 400, "request_id")
