"""The HTTP API over TensorRT-LLM's backend and a stand-in executor in another process: the tests of the API that no engine matters to,
and what is this engine's own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import test_api
from api_server import (
    Running,
    assert_death_is_told,
    assert_error,
    complete,
    events,
    leave_early,
    metric,
    serve,
    wait_until,
)
from routers_only import save_routers_only
from stand_in_llm import SamplingParams, StandInLlm
from test_api import (  # noqa: F401  run here again, with the fixture `server` of this file
    test_a_chat_stream,
    test_a_completion_has_the_openai_shape,
    test_a_stream_joins_to_the_whole_answer,
    test_all_prompt_forms_agree,
    test_chat_uses_the_template,
    test_chat_without_a_limit_gets_the_rest_of_the_context,
    test_continuous_usage_counts_up,
    test_defaults_are_the_documented_ones,
    test_held_back_text_is_sent_at_the_end,
    test_models_and_version,
    test_n_and_several_prompts_are_ordered_by_prompt,
    test_n_choices_have_derived_seeds,
    test_sampling_reaches_the_scheduler,
    test_several_choices_in_one_stream,
    test_stop_strings_over_token_borders,
    test_stop_token_ids,
    test_the_end_token_stops_unless_ignored,
    test_token_ids_on_request,
)
from test_api_bad_input import (  # noqa: F401  as these
    test_a_prompt_beyond_the_context_names_both_lengths,
    test_an_unknown_model,
    test_bad_chats_are_refused_by_name,
    test_bad_completions_are_refused_by_name,
    test_broken_bodies,
    test_true_is_not_a_neutral_one,
    test_unknown_routes_and_methods_have_the_same_error_shape,
    test_unsupported_fields_are_refused_by_name_unless_neutral,
)
from test_openai_client import (  # noqa: F401  and these, with the fixture `client`
    connect,
    test_chat_stream_helper,
    test_completion_stream,
    test_models,
)

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, ShuttingDownError, TokenEvent
from ecospec_orchestrator.engine.tensorrt_llm import backend as backend_module
from ecospec_orchestrator.engine.tensorrt_llm.backend import BackendLimits, TensorRtBackend

NODES = 4  # as the stand-in's executor reports
FAILS, DEAF = 13, 17  # values of top_k that the executor knows
ROOT = Path(__file__).resolve().parents[2]


class Recording(TensorRtBackend):
    """Keeps what the API submitted and cancelled."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[Request] = []
        self.cancelled: list[tuple[str, float]] = []

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        super().submit(request, on_event)
        self.seen.append(request)

    def cancel(self, request_id: str) -> None:
        super().cancel(request_id)
        self.cancelled.append((request_id, time.monotonic()))


@contextlib.contextmanager
def serving(
    tokenizer: Any, nodes: int = NODES, step_seconds: float = 0.002, batch: int = 8, waiting: int = 64
) -> Iterator[tuple[Running, StandInLlm]]:
    llm, ledger = StandInLlm(batch, step_seconds), Ledger()
    backend = Recording(llm, SamplingParams, BackendLimits(batch, waiting, 2048, len(tokenizer), nodes), ledger)
    with serve(tokenizer, backend) as running:  # type: ignore[arg-type]  # what serve() asks of a scheduler it has
        running.app.state.service.ledger = ledger
        ledger.bind(lambda: backend.running, lambda: backend.waiting)
        yield running, llm
    assert llm.shut_down


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serving(byte_tokenizer) as (running, _):
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connect(server) as connected:
        yield connected


def test_logprobs_without_speculation(byte_tokenizer: Any) -> None:
    with serving(byte_tokenizer, nodes=0) as (server, _):
        test_api.test_logprobs_of_completions(server)
        test_api.test_chat_logprobs(server)
        ours = complete(server, prompt="abcd", max_tokens=6)["metrics"]["ecospec"]
        assert (ours["steps"], ours["steps_not_speculated"]) == (2, 2)


def test_what_the_engine_cannot_honour_is_refused_by_name(server: Running) -> None:
    for field, value in (("logprobs", 1), ("return_routed_experts", True)):
        answer = server.client.post("/v1/completions", json={"prompt": "abc", field: value})
        assert "not supported" in assert_error(answer, 400, field)["message"]
    assert server.scheduler.running == 0


def test_the_answer_tells_what_the_engine_measured(server: Running) -> None:
    body = complete(server, prompt="abcd", max_tokens=6)  # the prompt's own token, then steps of 2 and 3
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 3 / 8,
        "acceptance_histogram": [0, 1, 1],
        "acceptance_histogram_by_draft_length": {"4": [0, 1, 1]},
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 8,
    }
    assert (body["metrics"]["ecospec"]["steps"], body["metrics"]["ecospec"]["steps_not_speculated"]) == (2, 0)


def test_process_metrics_come_from_the_engines_iterations(byte_tokenizer: Any) -> None:
    with serving(byte_tokenizer) as (server, _):
        complete(server, prompt="abcd", max_tokens=6)
        wait_until(lambda: metric(server, "ecospec_spec_decode_num_draft_tokens_total") == 8)
        assert metric(server, "ecospec_spec_decode_num_drafts_total") == 2
        assert metric(server, "ecospec_spec_decode_num_accepted_tokens_total") == 3
        per_position = [
            metric(server, "ecospec_spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in (0, 1)
        ]
        assert per_position == [2, 1]
        assert metric(server, "ecospec_steps_total", speculated="true") == 2
        assert metric(server, "ecospec_prefill_tokens_total") == 4
        assert metric(server, "ecospec_kv_cache_capacity_pages") == 100
        assert metric(server, "ecospec_request_queue_time_seconds_count") == 1
        assert metric(server, "ecospec_generation_tokens_total") == 6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engines_slot(byte_tokenizer: Any, stream: bool) -> None:
    with serving(byte_tokenizer, step_seconds=0.02) as (server, llm):
        left = leave_early(server, stream)
        wait_until(lambda: len(llm.aborted) == 2)
        assert all(when - left < 5 for _, when in llm.aborted)  # the answer would take 20 s
        wait_until(lambda: server.scheduler.running == 0)
        wait_until(lambda: metric(server, "ecospec_request_success_total", finished_reason="abort") == 2)


def test_a_full_queue_is_429(byte_tokenizer: Any) -> None:
    with serving(byte_tokenizer, step_seconds=0.05, batch=1, waiting=1) as (server, _):
        answer = server.client.post("/v1/completions", json={"prompt": "abc", "n": 3, "max_tokens": 50})
        assert_error(answer, 429, None)
        assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: server.scheduler.running == 0 and server.scheduler.waiting == 0)
        complete(server, prompt="a", max_tokens=1)


def test_a_request_that_fails_takes_no_other_with_it(server: Running) -> None:
    streamed = events(server, prompt="abc", max_tokens=50, top_k=FAILS)
    assert "The stand-in broke." in streamed[-1]["error"]["message"]
    answer = server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 50, "top_k": FAILS})
    assert assert_error(answer, 500, None)["code"] == "engine_error"
    assert server.client.get("/health").json() == {"status": "ok"}
    assert complete(server, prompt="abcde", max_tokens=7)["choices"][0]["text"] == "abcdeab"


def test_an_executor_that_dies_fails_requests_and_health(byte_tokenizer: Any) -> None:
    with serving(byte_tokenizer, step_seconds=0.05) as (server, llm):
        assert server.client.get("/ready").status_code == 200
        assert_death_is_told(server, llm.crash)


def test_an_abort_that_the_engine_never_confirms_is_given_up(
    byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "ABORT_SECONDS", 0.2)
    with serving(byte_tokenizer) as (server, llm), caplog.at_level(logging.WARNING):
        with server.client.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True, "top_k": DEAF}):
            wait_until(lambda: len(llm.submitted) == 1)
        wait_until(lambda: server.scheduler.running == 0)
        assert "did not confirm within 0.2 s" in caplog.text
        complete(server, prompt="abc", max_tokens=1)


def test_what_runs_at_the_end_is_aborted_and_nothing_new_is_taken(byte_tokenizer: Any) -> None:
    llm = StandInLlm(4, 0.05)
    backend = TensorRtBackend(llm, SamplingParams, BackendLimits(4, 4, 2048, 258, NODES), Ledger())
    found: queue.Queue[TokenEvent] = queue.Queue()
    with pytest.raises(ShuttingDownError):
        backend.submit(Request("early", (1, 2), 4), found.put)
    assert not backend.alive
    backend.start()
    backend.submit(Request("long", (1, 2), 2000), found.put)
    assert found.get(timeout=10).tokens == (1,)
    backend.stop()
    event = found.get(timeout=10)
    while event.finish_reason is None:
        event = found.get(timeout=10)
    assert (event.finish_reason, event.stats is not None, found.empty()) == ("abort", True, True)
    assert not backend.alive and llm.shut_down
    with pytest.raises(ShuttingDownError):
        backend.submit(Request("late", (1, 2), 4), found.put)
    backend.cancel("long")  # unknown by now
    backend.stop()


def test_a_request_cancelled_before_the_engine_has_it_never_reaches_it() -> None:
    llm = StandInLlm(4, 0.002)
    backend = TensorRtBackend(llm, SamplingParams, BackendLimits(4, 4, 2048, 258, NODES), Ledger())
    found: queue.Queue[TokenEvent] = queue.Queue()
    backend.start()
    try:
        for number in range(20):
            backend.submit(Request(f"r{number}", (1, 2), 2000), found.put)
            backend.cancel(f"r{number}")
            event = found.get(timeout=10)
            while event.finish_reason is None:
                event = found.get(timeout=10)
            assert (event.request_id, event.finish_reason) == (f"r{number}", "abort")
            wait_until(lambda: backend.running == 0)
    finally:
        backend.stop()
    assert found.empty()


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer: Any) -> Path:
    """The directory of a tiny model: configuration, tokenizer and routers."""
    return save_routers_only(tmp_path / "tiny-moe", byte_tokenizer, layers=2, experts=8, hidden=4)


def test_the_command_serves_and_drains(model: Path) -> None:
    """`ecospec-orchestrator serve --engine tensorrt-llm`, with a package tensorrt_llm that stands in for NVIDIA's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    support = ROOT / "tests" / "support"
    path = os.pathsep.join([str(support / "packages"), str(support), *sys.path])
    command = [sys.executable, "-m", "ecospec_orchestrator.cli", "serve", "--engine", "tensorrt-llm"]
    child = subprocess.Popen(
        [*command, "--model", str(model), "--policy", "none", "--port", str(port)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        assert child.stdout is not None
        assert "ready" in child.stdout.readline()
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
            info = client.get("/version").json()["info"]
            assert (info["engine"], info["target"], info["experts"]) == ("tensorrt-llm", "tiny-moe", 8)
            assert info["target_revision"] != "unknown"
            body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hello"
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 60, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                child.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
