"""Faults inside a live system and at its edges: an engine that fails, clients that leave, SIGTERM, clocks that jump, policies that change
in the middle. In each, what was promised is kept: answers are the target's own, whoever cannot be answered is told why, and the
metrics and the log say what happened.

Elsewhere: faults of the predictor (test_faults_predictor.py), of Redis and the disk (test_faults_stores.py).
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import assert_error, wait_until
from fake_engine import greedy
from live_system import TOKENS, Live, body
from scheduler_harness import build_policy
from server_process import ServerProcesses, health, read_line

from ecospec_orchestrator.scheduler import Limits
from ecospec_orchestrator.selection.none import NonePolicy


def tokens_of(lines: list[str]) -> list[int]:
    """Of a stream's data lines, without [DONE]."""
    chunks = [json.loads(line[6:]) for line in lines]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


def test_an_engine_that_fails_ends_every_request_with_a_reason_and_readiness(caplog: pytest.LogCaptureFixture) -> None:
    with Live("none", step_seconds=0.05) as live:
        server, prompts = live.server, [live.prompt() for _ in range(5)]
        scheduler, engine = live.harness.scheduler, live.harness.engine
        assert server.client.get("/ready").status_code == server.client.get("/health").status_code == 200
        with ThreadPoolExecutor(6) as pool:
            url, stream = f"{server.url}/v1/completions", body([1, 2], max_tokens=40, stream=True)
            with httpx.stream("POST", url, json=stream, trust_env=False, timeout=30) as answer:
                lines = (line for line in answer.iter_lines() if line)
                got = [next(lines)]
                engine.gate = threading.Event()  # no request ends before all are there
                whole = [pool.submit(live.ask, prompt, max_tokens=40) for prompt in prompts]
                wait_until(lambda: scheduler.running + scheduler.waiting == 6)
                engine.gate.set()
                wait_until(lambda: (scheduler.running, scheduler.waiting) == (4, 2))
                engine.fail = True
                got += lines
            answers = [each.result() for each in whole]
        assert got[-1] == "data: [DONE]" and json.loads(got[-2][6:])["error"]["code"] == "engine_error"
        sent = tokens_of(got[:-2])
        assert 0 < len(sent) < 40 and sent == greedy([1, 2], len(sent)), "what was sent is right"
        for each in answers:
            assert assert_error(each, 500, None)["code"] == "engine_error" and "engine failed" in each.text
            assert "out of memory" not in each.text, "the reason is for the log"
        crash = next(r for r in caplog.records if "step loop crashed" in r.getMessage())
        assert crash.exc_info is not None and "out of memory" in str(crash.exc_info[1])
        for path, said in (("/health", '"dead"'), ("/ready", "engine has stopped")):
            answer = server.client.get(path)
            assert answer.status_code == 503 and said in answer.text
        assert_error(live.ask([1]), 503, None)
        assert live.metric("request_success_total", finished_reason="error") == 6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_one_step(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Live(step_seconds=0.05) as live:
        scheduler, steps = live.harness.scheduler, live.harness.reports
        cancelled: list[int] = []
        cancel = scheduler.cancel

        def noted(request_id: str) -> None:
            cancelled.append(len(steps))
            cancel(request_id)

        scheduler.cancel = noted  # type: ignore[method-assign]
        live.all_is_right(1)  # what is compiled at first use
        with httpx.Client(base_url=live.server.url, trust_env=False, timeout=30 if stream else 0.3) as client:
            request = body([1, 2, 3], max_tokens=50, stream=stream)
            if stream:
                with client.stream("POST", "/v1/completions", json=request) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=request)
        wait_until(lambda: scheduler.running == 0)
        assert len(steps) - cancelled[0] <= 1, "one step may have been on its way"
        assert live.metric("request_success_total", finished_reason="abort") == 1
        assert any("client left" in r.getMessage() for r in caplog.records)
        live.all_is_right(2)
        assert not live.harness.engine.check_idle() and not live.harness.drafter.check_idle()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerProcesses]:
    processes = ServerProcesses(tmp_path)
    yield processes
    processes.close()


def test_sigterm_in_the_middle_of_streams_loses_no_token(start: ServerProcesses) -> None:
    """A process of its own: those that run and those that wait get all of their tokens, then it ends."""
    child, url = start(model="chain", max_running=2, max_context_tokens=64)
    assert "ready" in read_line(child)
    prompts = [[1 + i, 2, 3] for i in range(5)]

    def stream(prompt: list[int]) -> list[str]:
        request = body(prompt, stream=True)
        with httpx.stream("POST", f"{url}/v1/completions", json=request, trust_env=False, timeout=30) as answer:
            assert answer.status_code == 200, answer.read()
            return [line for line in answer.iter_lines() if line]

    with ThreadPoolExecutor(5) as pool:
        streams = [pool.submit(stream, prompt) for prompt in prompts]
        # Both: 3 may also wait while the last one is on its way.
        held = "ecospec_num_requests_running 2.0", "ecospec_num_requests_waiting 3.0"
        wait_until(lambda: all(each in httpx.get(f"{url}/metrics", trust_env=False).text for each in held))
        child.send_signal(signal.SIGTERM)
        wait_until(lambda: health(url) == "draining")
        refused = httpx.post(f"{url}/v1/completions", json=body([1]), trust_env=False)
        assert assert_error(refused, 503, None)["code"] == "shutting_down"
        for prompt, each in zip(prompts, streams, strict=True):
            lines = each.result()
            assert lines[-1] == "data: [DONE]" and tokens_of(lines[:-1]) == greedy(prompt, TOKENS)
    assert child.wait(20) == 0
    assert "Stopping: 5 requests may finish within 3600 s" in start.log.read_text()


def test_clocks_that_jump_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back and forth by days while requests run, wait and have deadlines and quotas."""
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    with Live(max_request_seconds=20, key_tokens_per_minute=10**6, key_requests_per_minute=10**6) as live:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: [live.all_is_right() for _ in range(5)])
            while not done.done():
                jump[0] = float(live.random.uniform(-5, 5)) * 86_400
                time.sleep(0.01)
            done.result()
        jump[0] = -10 * 86_400
        live.all_is_right()
        assert live.server.client.get("/ready").status_code == 200
        assert live.metric("deadlines_exceeded_total") == 0
        for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
            total, count = (live.metric(f"{name}_seconds_{part}") for part in ("sum", "count"))
            assert count > 0 and 0 <= total / count < 60


def test_another_policy_takes_over_in_the_middle_of_an_answer() -> None:
    """As administrators change it; every answer stays the target's own, and every cache is whole."""
    policies = [NonePolicy(keep_drafter=True), *map(build_policy, ("ecospec", "likelihood", "goodput"))]
    with Live("none") as live:
        scheduler = live.harness.scheduler
        scheduler.change(scheduler.limits, policies[0])
        live.all_is_right(1)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: [live.all_is_right(8) for _ in range(8)])
            at = 0
            while not done.done():
                at += 1
                limits = Limits(1 + at % 4, 8 + at % 3, 64, 0.5 + at % 2)
                scheduler.change(limits, policies[at % len(policies)])
                time.sleep(0.003)
            done.result()
        seen: set[Any] = {report.decision.policy for report in live.harness.reports if report.decision}
        assert seen == {"none", "ecospec", "likelihood", "goodput"}
        wait_until(lambda: scheduler.running == 0)
        assert not live.harness.engine.check_idle() and not live.harness.drafter.check_idle()
