"""Keys over real HTTP: wrong, revoked, over their limits, header tricks. Nothing gets in, and no key gets out."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import EchoScheduler, Running, assert_error, metric, serve, wait_until

from ecospec_orchestrator.api.auth import KeyRing
from ecospec_orchestrator.api.errors import AuthenticationError
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.keys import add_key, remove_key

BODY = {"prompt": "abc", "max_tokens": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def ask(server: Running, key: str | None, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.client.post(path, json=BODY | body, headers=headers)


def raw(server: Running, head: str, body: bytes = b"") -> bytes:
    """The whole answer to exactly these bytes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(head.encode("latin-1") + body)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def head(*headers: str, path: str = "/v1/completions", size: int = 0) -> str:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {size}", *headers]
    return "\r\n".join([*lines, "", ""])


def test_each_key_is_let_in_and_counted_by_its_name(
    byte_tokenizer: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    alice, bob = add_key(path, "alice", {}), add_key(path, "bob", {})
    with serve(byte_tokenizer, api_keys_file=path, api_keys="own-key") as server:
        for key, times in ((alice, 1), (bob, 2), ("own-key", 1)):
            for _ in range(times):
                assert ask(server, key).status_code == 200
        assert ask(server, alice[:-1]).status_code == 401
        assert metric(server, "ecospec_key_requests_total", key="alice", outcome="admitted") == 1
        assert metric(server, "ecospec_key_requests_total", key="bob", outcome="admitted") == 2
        assert metric(server, "ecospec_key_requests_total", key="settings:1", outcome="admitted") == 1
        assert metric(server, "ecospec_key_tokens_total", key="bob", kind="prompt") == 6
        assert metric(server, "ecospec_key_tokens_total", key="bob", kind="generated") == 2
        assert metric(server, "ecospec_auth_failures_total") == 1
        seen = server.client.get("/metrics").text + "\n".join(r.getMessage() for r in caplog.records)
    for secret in (
        alice,
        bob,
        alice[:-1],
        "own-key",
        *(json.loads(path.read_text())[n]["sha256"] for n in ("alice", "bob")),
    ):
        assert secret not in seen


def test_a_revoked_key_is_out_at_the_next_request_and_its_answer_in_progress_is_finished(
    byte_tokenizer: Any, path: Path
) -> None:
    alice, bob = add_key(path, "alice", {}), add_key(path, "bob", {})
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02), api_keys_file=path) as server:
        headers = {"Authorization": f"Bearer {alice}"}
        body = BODY | {"max_tokens": 40, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            remove_key(path, "alice")
            with httpx.Client(base_url=server.url, trust_env=False) as other:
                refused = other.post("/v1/completions", json=BODY, headers=headers)
            assert assert_error(refused, 401, None)["code"] == "invalid_api_key"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert ask(server, bob).status_code == 200
        carol = add_key(path, "carol", {})
        assert ask(server, carol).status_code == 200


def test_a_file_that_breaks_changes_nothing_and_an_empty_one_lets_nobody_in(
    byte_tokenizer: Any, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alice = add_key(path, "alice", {})
    good = path.read_text()
    with serve(byte_tokenizer, api_keys_file=path) as server:
        path.write_text("{")
        assert [ask(server, alice).status_code for _ in range(3)] == [200] * 3
        path.unlink()
        assert ask(server, alice).status_code == 200
        assert ask(server, None).status_code == 401
        told = [r.getMessage() for r in caplog.records if "stay valid" in r.getMessage()]
        assert len(told) == 2, "each change is told once"
        path.write_text("{}")
        assert ask(server, alice).status_code == ask(server, None).status_code == 401
        fresh = path.with_suffix(".new")
        fresh.write_text(good)
        os.replace(fresh, path)
        assert ask(server, alice).status_code == 200
    with serve(byte_tokenizer, api_keys_file=path) as server:
        assert ask(server, None).status_code == 401
    path.unlink()
    with pytest.raises(SettingsError, match="cannot be read"), serve(byte_tokenizer, api_keys_file=path):
        pass


@pytest.mark.parametrize("kind", ["GET", "POST"])
@pytest.mark.parametrize(
    "where",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/version",
        "/nowhere",
        "/metrics/",
        "//metrics",
        "/v1/../metrics",
    ],
)
def test_nothing_but_the_open_paths_answers_without_a_key(byte_tokenizer: Any, kind: str, where: str) -> None:
    with serve(byte_tokenizer, api_keys="a-key") as server:
        answer = raw(server, head(path=where).replace("POST", kind))
        assert answer.startswith(b"HTTP/1.1 401") and b"www-authenticate: Bearer" in answer
        assert server.client.get("/health").status_code == server.client.get("/metrics").status_code == 200


GOOD = "Authorization: Bearer a-key"
TRICKS = {
    "no header": [],
    "an empty key": ["Authorization: Bearer "],
    "another scheme": ["Authorization: Basic a-key"],
    "no scheme": ["Authorization: a-key"],
    "two keys in one": ["Authorization: Bearer a-key, Bearer x"],
    "a longer key": ["Authorization: Bearer a-keyx"],
    "a shorter key": ["Authorization: Bearer a-ke"],
    "another case": ["Authorization: Bearer A-KEY"],
    "a key of other bytes": ["Authorization: Bearer a-k\xe9y"],
    "another header": ["X-Authorization: Bearer a-key", "Proxy-Authorization: Bearer a-key", "X-API-Key: a-key"],
    "a cookie": ["Cookie: Authorization=Bearer a-key"],
    "forwarded": ["X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1"],
    "another path in a header": ["X-Original-URL: /metrics", "X-Rewrite-URL: /metrics"],
    "the digest": [f"Authorization: Bearer {'0' * 64}"],
}


@pytest.mark.parametrize("headers", TRICKS.values(), ids=TRICKS)
def test_header_tricks_do_not_open(byte_tokenizer: Any, headers: list[str]) -> None:
    body = json.dumps(BODY).encode()
    with serve(byte_tokenizer, api_keys="a-key") as server:
        answer = raw(server, head(*headers, size=len(body)), body)
        assert answer.startswith(b"HTTP/1.1 401") and b"a-key" not in answer
        assert not server.scheduler.seen


def test_whoever_sends_the_header_twice_or_breaks_http_is_refused(byte_tokenizer: Any) -> None:
    body = json.dumps(BODY).encode()
    with serve(byte_tokenizer, api_keys="a-key") as server:
        for second in (GOOD, "Authorization: Bearer wrong", "authorization: Bearer wrong"):
            answer = raw(server, head(GOOD, second, size=len(body)), body)
            assert answer.startswith(b"HTTP/1.1 400") and b"2 times" in answer
        for broken in (
            head(GOOD, "Transfer-Encoding: chunked, identity"),
            head(GOOD, "Content-Length: 5"),  # two lengths that differ
            head("Authorization : Bearer a-key"),
            head("Authorization: Bearer a-\x00key"),
            head("Authorization: Bearer\r\n a-key", "X: " + "a" * 20_000),
        ):
            assert raw(server, broken, body).startswith(b"HTTP/1.1 4")
        assert not server.scheduler.seen
        assert raw(server, head(GOOD, size=len(body)), body).startswith(b"HTTP/1.1 200")
        assert raw(server, head("authorization: bearer \t a-key ", size=len(body)), body).startswith(b"HTTP/1.1 200")


def test_every_digest_is_compared_whatever_matches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time by construction: the same comparisons for the first key, the last one and none, by a function made for it."""
    keys = [add_key(path, name, {}) for name in "abcd"]
    ring = KeyRing(["own"], path)
    compared: list[int] = []
    real = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        assert len(a) == len(b) == 32, "digests, whose length tells nothing about the key"
        compared[-1] += 1
        return real(a, b)

    monkeypatch.setattr("ecospec_orchestrator.api.auth.hmac.compare_digest", counted)
    for key in ("own", *keys):
        compared.append(0)
        ring.check(f"Bearer {key}")
    for key in ("x", "x" * 10_000, keys[0][:-1]):
        compared.append(0)
        with pytest.raises(AuthenticationError):
            ring.check(f"Bearer {key}")
    assert set(compared) == {5}


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
                answer = third.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
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
        body = BODY | {"max_tokens": 1900, "stream": stream}
        answer = server.client.post("/v1/completions", json=body, headers=headers)
        if stream:
            lines = [line for line in answer.text.splitlines() if line]
            assert lines[-1] == "data: [DONE]" and '"deadline_exceeded"' in lines[-2] and len(lines) > 2
        else:
            error = assert_error(answer, 504, None)
            assert error["code"] == "deadline_exceeded" and "0.3 seconds" in error["message"]
            assert answer.headers["x-should-retry"] == "false"
        assert server.scheduler.running == 0 and len(server.scheduler.cancelled) == 1
        assert metric(server, "ecospec_deadlines_exceeded_total") == 1
        assert server.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "86401", "", "1e999"])
def test_a_deadline_that_is_none_is_refused(byte_tokenizer: Any, value: str) -> None:
    with serve(byte_tokenizer) as server:
        answer = server.client.post("/v1/completions", json=BODY, headers={"X-Request-Timeout-Seconds": value})
        assert "X-Request-Timeout-Seconds" in assert_error(answer, 400, None)["message"]


def test_the_settings_deadline_is_the_longest(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.02), max_request_seconds=0.3) as server:
        body = BODY | {"max_tokens": 1900}
        answer = server.client.post("/v1/completions", json=body, headers={"X-Request-Timeout-Seconds": "100"})
        assert answer.status_code == 504
