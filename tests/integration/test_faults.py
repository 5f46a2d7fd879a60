"""Faults of a live system: real HTTP in front of the real scheduler, a real predictor, real Redis. In each, what was promised is kept:
answers are the target's own, whoever cannot be answered is told why, and the metrics and the log say what happened.

Elsewhere: a predictor that is killed over and over under load (test_predictor_lost.py), a new version in place of a running one
(test_predictor_swap.py), SIGTERM in mid-stream (test_server_process.py), Redis that is killed, full or hung under quotas
(test_shared_quotas.py) and under traces (test_state_store.py).
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import predictor_stub
import pytest
from api_server import Running, assert_error, metric, serve, wait_until
from fake_engine import VOCABULARY, ChainEngine, greedy
from predictor_server import predictor_process
from redis_server import RedisServer
from scheduler_harness import Harness, build_policy
from server_process import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_orchestrator.scheduler import Limits
from ecospec_orchestrator.selection.none import NonePolicy
from ecospec_orchestrator.settings import load_settings
from ecospec_orchestrator.state import redis as redis_store
from ecospec_orchestrator.state.sharing import open_sharing
from ecospec_proto.traces import TraceReader

GEOMETRY = ChainEngine.geometry
DEADLINE = 0.1
TOKENS = 30


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One word per token of the chain; every other word is token 0."""
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")


class Live:
    """A server whose every answer is known. step_seconds: that each verification takes longer."""

    def __init__(self, tokenizer: Any, policy: str = "ecospec", step_seconds: float = 0.0, **settings: Any) -> None:
        self.harness = Harness(policy)
        self.random = np.random.default_rng(7)
        verify = self.harness.engine.verify

        def slower(items: Any) -> Any:
            time.sleep(step_seconds)
            return verify(items)

        if step_seconds:
            self.harness.engine.verify = slower  # type: ignore[method-assign]
        scheduler: Any = self.harness.scheduler
        self._context = serve(tokenizer, scheduler, max_context_tokens=64, **settings)

    def __enter__(self) -> Live:
        self.server: Running = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def prompt(self) -> list[int]:
        return self.random.integers(0, VOCABULARY, int(self.random.integers(1, 20))).tolist()

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **more}

    def ask(self, prompt: list[int], **more: Any) -> httpx.Response:
        return httpx.post(
            f"{self.server.url}/v1/completions", json=self.body(prompt, **more), trust_env=False, timeout=30
        )

    def all_is_right(self, times: int = 4) -> None:
        prompts = [self.prompt() for _ in range(times)]
        with ThreadPoolExecutor(4) as pool:
            for prompt, answer in zip(prompts, pool.map(self.ask, prompts), strict=True):
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == greedy(prompt, TOKENS)

    def right_until(self, enough: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        self.all_is_right()
        while not enough():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.all_is_right()

    def fallbacks(self, reason: str) -> float:
        found = self.harness.ledger.registry.get_sample_value("ecospec_predictor_fallbacks_total", {"reason": reason})
        return found or 0.0

    def predicted(self) -> int:
        return sum(report.predicted_actual_overlap is not None for report in self.harness.reports)

    def see_predictions(self) -> None:
        enough = self.predicted() + 10
        self.right_until(lambda: self.predicted() >= enough)

    def see_fallbacks(self, reason: str) -> None:
        enough = self.fallbacks(reason) + 3
        self.right_until(lambda: self.fallbacks(reason) >= enough)


@pytest.fixture
def live(tokenizer: Any) -> Iterator[Live]:
    with Live(tokenizer) as running:
        yield running


def use_predictor(live: Live, port: int) -> RemoteFootprintSource:
    ledger = live.harness.ledger
    source = RemoteFootprintSource(
        f"127.0.0.1:{port}", GEOMETRY, DEADLINE, on_version=ledger.state.observe_version_in_use
    )
    live.harness.scheduler.footprint_source = source
    return source


def test_a_predictor_that_hangs_dies_and_comes_back_as_another_version(live: Live, tmp_path: Path) -> None:
    port = free_port()
    source = use_predictor(live, port)
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
    live.see_fallbacks("unavailable")
    with predictor_process(GEOMETRY, port=port, model_dir=tmp_path / "v1") as (process, _):
        live.see_predictions()
        process.send_signal(signal.SIGSTOP)
        live.see_fallbacks("deadline")
        process.send_signal(signal.SIGCONT)
        live.see_predictions()
    live.see_fallbacks("unavailable")
    with predictor_process(GEOMETRY, port=port, model_dir=tmp_path / "v2"):
        live.see_predictions()
    value = live.harness.ledger.registry.get_sample_value
    assert value("ecospec_predictor_version_changes_total") == 1
    assert value("ecospec_predictor_version_info", {"version": "v2"}) == 1
    assert metric(live.server, "ecospec_request_success_total", finished_reason="error") == 0
    source.close()


def test_a_predictor_that_is_slow_wrong_or_talks_nonsense(live: Live) -> None:
    stub = predictor_stub.Stub(GEOMETRY)
    server, port = predictor_stub.serve(stub)
    source = use_predictor(live, port)
    try:
        live.see_predictions()  # well-formed, and wrong for this target
        stub.delay = 2 * DEADLINE
        live.see_fallbacks("deadline")
        stub.delay = 0.0
        live.see_predictions()
        for fault in ("length", "trees", "dtype", "range"):
            stub.fault = fault
            live.see_fallbacks("error")
        stub.fault = ""
        live.see_predictions()
    finally:
        stub.stopped.set()
        server.stop(0).wait()
        source.close()


def test_an_engine_that_fails_ends_every_request_with_a_reason_and_readiness(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with Live(tokenizer, step_seconds=0.05) as live:
        server = live.server
        assert server.client.get("/ready").status_code == server.client.get("/health").status_code == 200
        with ThreadPoolExecutor(6) as pool:
            url, body = f"{server.url}/v1/completions", live.body([1, 2], max_tokens=40, stream=True)
            with httpx.stream("POST", url, json=body, trust_env=False, timeout=30) as answer:
                lines = answer.iter_lines()
                next(lines)
                whole = [pool.submit(live.ask, live.prompt(), max_tokens=40) for _ in range(5)]  # four run, two wait
                wait_until(lambda: live.harness.scheduler.running == 4 and live.harness.scheduler.waiting >= 1)
                live.harness.engine.fail = True
                rest = [line for line in lines if line]
            answers = [each.result() for each in whole]
        assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == "engine_error"
        for each in answers:
            assert assert_error(each, 500, None)["code"] == "engine_error" and "engine failed" in each.text
            assert "out of memory" not in each.text, "the reason is for the log"
        assert any("step loop crashed" in r.getMessage() for r in caplog.records)
        time.sleep(1.1)  # the last verdict on readiness is kept for a second
        assert (server.client.get("/health").status_code, server.client.get("/ready").status_code) == (503, 503)
        assert_error(live.ask([1]), 503, None)
        assert metric(server, "ecospec_request_success_total", finished_reason="error") == 6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_one_step(tokenizer: Any, stream: bool) -> None:
    with Live(tokenizer, step_seconds=0.05) as live:
        scheduler, steps = live.harness.scheduler, live.harness.reports
        cancelled: list[int] = []
        cancel = scheduler.cancel

        def noted(request_id: str) -> None:
            cancelled.append(len(steps))
            cancel(request_id)

        scheduler.cancel = noted  # type: ignore[method-assign]
        with httpx.Client(base_url=live.server.url, trust_env=False, timeout=0.3) as client:
            body = live.body([1, 2, 3], max_tokens=50, stream=stream)
            if stream:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=body)
        wait_until(lambda: scheduler.running == 0)
        assert len(steps) - cancelled[0] <= 1, "one step may have been on its way"
        live.all_is_right()
        assert not live.harness.engine.check_idle() and not live.harness.drafter.check_idle()


def test_clocks_that_jump_change_nothing(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back and forth by days while requests run, wait and have deadlines and quotas."""
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    with Live(tokenizer, max_request_seconds=20, key_tokens_per_minute=10**6, key_requests_per_minute=10**6) as live:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(lambda: [live.all_is_right() for _ in range(5)])
            while not done.done():
                jump[0] = float(live.random.uniform(-5, 5)) * 86_400
                time.sleep(0.01)
            done.result()
        jump[0] = -10 * 86_400
        live.all_is_right()
        assert live.server.client.get("/ready").status_code == 200
        assert metric(live.server, "ecospec_deadlines_exceeded_total") == 0
        for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
            mean = metric(live.server, f"ecospec_{name}_seconds_sum") / metric(
                live.server, f"ecospec_{name}_seconds_count"
            )
            assert 0 <= mean < 60


def test_redis_that_dies_fills_up_and_forgets_while_routes_are_sampled(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_store, "BACKOFF_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(redis_store, "LOOK_SECONDS", 0.05)
    ledger = Ledger()
    value = ledger.registry.get_sample_value

    def written() -> float:
        return value("ecospec_trace_records_written_total") or 0.0

    with RedisServer() as redis:
        environment = {"ECOSPEC_STATE_STORE_URL": redis.url, "ECOSPEC_TRACE_RATE_TOKENS_PER_SECOND": "1000000"}
        sharing = open_sharing(load_settings({}, environment), GEOMETRY, ledger.state)
        assert sharing.sampler is not None
        live.harness.scheduler.on_verified = sharing.sampler.observe
        live.right_until(lambda: written() >= 3)
        redis.kill()
        live.right_until(lambda: value("ecospec_state_store_up") == 0)
        redis.start()  # without what it knew
        live.right_until(lambda: value("ecospec_state_store_up") == 1)
        with redis.client() as client:
            client.config_set("maxmemory", "1")
            live.right_until(lambda: value("ecospec_state_store_up") == 0)
            client.config_set("maxmemory", "0")
        enough = written() + 3
        live.right_until(lambda: written() >= enough)
        live.harness.scheduler.on_verified = None
        sharing.close()
    told = [r.getMessage() for r in caplog.records if "state store" in r.getMessage() and r.levelno >= logging.WARNING]
    assert 2 <= len(told) <= 4, told


def test_a_full_disk_while_traces_are_collected_is_one_sentence_and_loses_no_whole_shard(
    live: Live, tmp_path: Path
) -> None:
    told = {"geometry": asdict(GEOMETRY), "fingerprint": GEOMETRY.fingerprint}
    live.server.app.state.service.info |= told
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": [1 + i % 20, i // 20 + 1]}) + "\n" for i in range(40)))
    command = [sys.executable, "-m", "ecospec_predictor.cli", "collect", "--from", "ecospec", "--url", live.server.url]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "30", "--temperature", "0"]

    def collect(file_bytes: int, shard_tokens: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--max-shard-tokens", str(shard_tokens)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
            capture_output=True,
            text=True,
            timeout=100,
        )

    # No file may grow beyond this, which the system says in the middle of a write, as it does for a full disk.
    failed = collect(2000, 10_000)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert str(out) in failed.stderr and "cannot be written" in failed.stderr
    done = collect(10**9, 100)
    assert done.returncode == 0, done.stderr
    reader = TraceReader(out, GEOMETRY)
    assert len(reader) == 40
    for document in reader:
        prompt = document.tokens[document.accepted][:2].tolist()
        assert document.tokens[document.accepted].tolist() == prompt + greedy(prompt, 30)


def test_another_policy_takes_over_in_the_middle_of_an_answer(tokenizer: Any) -> None:
    """As administrators change it; every answer stays the target's own, and every cache is whole."""
    policies = [NonePolicy(keep_drafter=True), *map(build_policy, ("ecospec", "likelihood", "goodput"))]
    with Live(tokenizer, "none") as live:
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
        assert {report.decision.policy for report in live.harness.reports if report.decision} == {
            "none",
            "ecospec",
            "likelihood",
            "goodput",
        }
        wait_until(lambda: scheduler.running == 0)
        assert not live.harness.engine.check_idle() and not live.harness.drafter.check_idle()
