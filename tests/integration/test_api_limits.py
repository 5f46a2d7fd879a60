"""What one key may use, over real HTTP: requests and tokens per time, requests at a time, prompts, time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import ASKED, EchoScheduler, Running, ask, assert_error, metric, serve, wait_until

from ecospec_orchestrator.keys import add_key

CHAT = "/v1/chat/completions"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_over_its_rate_is_told_when_to_come_back_and_others_are_not_held_up(
    byte_tokenizer: Any, path: Path
) -> None:
    alice, bob = add_key(path, "alice", {"requests_per_minute": 2}), add_key(path, "bob", {})
    with serve(byte_tokenizer, api_keys_file=path) as server:
        assert [ask(server, alice).status_code for _ in range(3)] == [200, 200, 429]
        answer = ask(server, alice)
        error = assert_error(answer, 429, None)
        assert error["code"] == "rate_limit_exceeded" and "'alice' may send 2 requests per minute" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert [ask(server, bob).status_code for _ in range(5)] == [200] * 5
        assert metric(server, "ecospec_key_requests_total", key="alice", outcome="rate") == 2
        assert metric(server, "ecospec_requests_refused_total", status="429") == 2
        assert server.client.get("/v1/models", headers={"Authorization": f"Bearer {alice}"}).status_code == 200


def test_tokens_are_reserved_and_what_was_not_used_is_given_back(byte_tokenizer: Any, path: Path) -> None:
    key = add_key(path, "alice", {"tokens_per_day": 100})
    with serve(byte_tokenizer, api_keys_file=path) as server:
        # 3 of the prompt and up to 90 more; the end comes after 10.
        assert ask(server, key, max_tokens=90, prompt="abc", stop="abcabcabca").status_code == 200
        used = sum(metric(server, "ecospec_key_tokens_total", key="alice", kind=k) for k in ("prompt", "generated"))
        assert used < 20
        assert ask(server, key, max_tokens=70).status_code == 200, "of 100, 13 and then 73 are used"
        error = assert_error(ask(server, key, max_tokens=60), 429, None)
        assert "up to 63" in error["message"] and "100 tokens per day" in error["message"]
        assert metric(server, "ecospec_key_requests_total", key="alice", outcome="quota") == 1
        error = assert_error(ask(server, key, max_tokens=98), 400, "max_tokens")
        assert "101 tokens" in error["message"] and "'alice' may use 100 per day" in error["message"]


def test_a_request_that_never_runs_costs_no_tokens(byte_tokenizer: Any, path: Path) -> None:
    key = add_key(path, "alice", {"tokens_per_day": 100})
    with serve(byte_tokenizer, EchoScheduler(max_running=0, max_waiting=0), api_keys_file=path) as server:
        for _ in range(3):
            assert assert_error(ask(server, key, max_tokens=90), 429, None)["code"] == "queue_full"


def test_requests_at_a_time(byte_tokenizer: Any, path: Path) -> None:
    key = add_key(path, "alice", {"max_concurrent": 2})
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02), api_keys_file=path) as server:
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(ask, server, key, max_tokens=100) for _ in range(2)]
            wait_until(lambda: server.scheduler.running == 2)
            with httpx.Client(base_url=server.url, trust_env=False) as third:
                answer = third.post("/v1/completions", json=ASKED, headers={"Authorization": f"Bearer {key}"})
            assert "2 of key 'alice'" in assert_error(answer, 429, None)["message"]
            assert [each.result().status_code for each in running] == [200, 200]
        assert ask(server, key).status_code == 200
        assert metric(server, "ecospec_key_requests_total", key="alice", outcome="concurrency") == 1


def test_the_settings_limit_keys_without_limits_of_their_own_and_an_open_server(
    byte_tokenizer: Any, path: Path
) -> None:
    mine = add_key(path, "mine", {"requests_per_minute": 100})
    yours = add_key(path, "yours", {})
    with serve(byte_tokenizer, api_keys_file=path, key_requests_per_minute=1) as server:
        assert [ask(server, mine).status_code for _ in range(2)] == [200, 200]
        assert [ask(server, yours).status_code for _ in range(2)] == [200, 429]
    with serve(byte_tokenizer, key_requests_per_minute=1) as server:
        assert ask(server, None).status_code == 200
        assert "all callers may send 1" in assert_error(ask(server, None), 429, None)["message"]


def test_a_prompt_that_is_too_long_for_this_server(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, max_prompt_tokens=5) as server:
        assert ask(server, None, prompt="abcde").status_code == 200
        assert "6 tokens; at most 5" in ask(server, None, prompt=["a", "abcdef"]).json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_cancels_the_request_and_says_so(byte_tokenizer: Any, stream: bool) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02)) as server:
        headers = {"X-Request-Timeout-Seconds": "0.3"}
        body = ASKED | {"max_tokens": 1900, "stream": stream}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        if stream:
            lines = [line for line in answer.text.splitlines() if line]
            assert lines[-1] == "data: [DONE]" and '"deadline_exceeded"' in lines[-2] and len(lines) > 2
        else:
            error = assert_error(answer, 504, None)
            assert error["code"] == "deadline_exceeded" and "0.3 seconds" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
        wait_until(lambda: server.scheduler.running == 0 and len(server.scheduler.cancelled) == 1)
        assert metric(server, "ecospec_deadlines_exceeded_total") == 1
        assert server.client.post("/v1/completions", json=ASKED, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "86401", "", "1e999"])
def test_a_deadline_that_is_none_is_refused(byte_tokenizer: Any, value: str) -> None:
    with serve(byte_tokenizer) as server:
        answer = server.client.post("/v1/completions", json=ASKED, headers={"X-Request-Timeout-Seconds": value})
        assert "X-Request-Timeout-Seconds" in assert_error(answer, 400, None)["message"]


def test_the_settings_deadline_is_the_longest(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02), max_request_seconds=0.3) as server:
        body = ASKED | {"max_tokens": 1900}
        answer = server.client.post("/v1/completions", json=body, headers={"X-Request-Timeout-Seconds": "100"})
        assert answer.status_code == 504


def used(server: Running) -> list[float]:
    return [metric(server, "ecospec_key_tokens_total", key="alice", kind=kind) for kind in ("prompt", "generated")]


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "abc"}),
    "stream": ("/v1/completions", {"prompt": "abc", "stream": True}),
    "several": ("/v1/completions", {"prompt": ["abc", "defg"], "n": 2}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "abc"}]}),
    "chat stream": (CHAT, {"messages": [{"role": "user", "content": "abc"}], "stream": True}),
}


@pytest.mark.parametrize(("where", "body"), SHAPES.values(), ids=SHAPES)
def test_every_way_of_asking_is_charged_for_exactly_what_it_used(
    byte_tokenizer: Any, path: Path, where: str, body: dict[str, Any]
) -> None:
    key = add_key(path, "alice", {"tokens_per_day": 10_000})
    with serve(byte_tokenizer, api_keys_file=path) as server:
        headers = {"Authorization": f"Bearer {key}"}
        request = body | {"max_tokens": 500, "stop": ["c", "g"]}  # far less is used than was reserved
        with httpx.Client(base_url=server.url, trust_env=False, timeout=20, headers=headers) as client:
            answer = client.post(where, json=request)
            assert answer.status_code == 200, answer.text
        # A stream's last bytes may be read before its handler has ended.
        wait_until(lambda: "ecospec_key_tokens_total{" in server.client.get("/metrics").text)
        prompt, generated = used(server)
        assert 3 <= prompt < 100 and 0 < generated < 500
        bucket = server.app.state.service.quotas._buckets._buckets["tokens_per_day:alice"]
        assert bucket.capacity - bucket.filled == pytest.approx(prompt + generated, abs=1)


def test_a_client_that_leaves_is_charged_for_what_was_generated_until_then(byte_tokenizer: Any, path: Path) -> None:
    key = add_key(path, "alice", {"tokens_per_day": 2000})
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02), api_keys_file=path) as server:
        body, headers = ASKED | {"max_tokens": 1900, "stream": True}, {"Authorization": f"Bearer {key}"}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            next(answer.iter_lines())
        wait_until(lambda: "ecospec_key_tokens_total{" in server.client.get("/metrics").text)
        assert 3 < sum(used(server)) < 200
        assert ask(server, key, max_tokens=1500, stop="bc").status_code == 200
