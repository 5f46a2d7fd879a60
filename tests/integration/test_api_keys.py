"""Keys over real HTTP: wrong, revoked, over their limits, header tricks. Nothing gets in, and no key gets out."""

from __future__ import annotations

import hmac
import json
import logging
import os
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import ASKED, EchoScheduler, Running, ask, assert_error, metric, serve

from ecospec_orchestrator.api.auth import KeyRing
from ecospec_orchestrator.api.errors import AuthenticationError
from ecospec_orchestrator.api.limits import OPEN_PATHS
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.keys import add_key, remove_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


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
    with serve(byte_tokenizer, api_keys_file=path, api_keys="own-key", log_level="debug") as server:
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
        logged = "\n".join(r.getMessage() for r in caplog.records)
        assert "POST /v1/completions" in logged, "the log of requests is on"
        seen = server.client.get("/metrics").text + logged
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
        body = ASKED | {"max_tokens": 40, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            remove_key(path, "alice")
            with httpx.Client(base_url=server.url, trust_env=False) as other:
                refused = other.post("/v1/completions", json=ASKED, headers=headers)
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
        "/openapi.json",
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


def test_what_is_open_is_for_probes_scrapers_and_the_page_that_asks_for_the_key(byte_tokenizer: Any) -> None:
    """Of every route of the application: it is one of the open ones, or it needs a key."""
    files = {path for path in OPEN_PATHS if path == "/" or Path(path).suffix in (".js", ".css", ".svg")}
    assert OPEN_PATHS - files == {"/health", "/ready", "/metrics"}
    with serve(byte_tokenizer, api_keys="a-key") as server:
        routes = [(method, route.path) for route in server.app.routes for method in route.methods]  # type: ignore[attr-defined]
        assert {path for _, path in routes} >= {"/v1/completions", "/v1/models", "/metrics", "/openapi.json"}
        for method, where in routes:
            answer = server.client.request(method, where)
            assert (answer.status_code == 401) == (where not in OPEN_PATHS), (method, where)
        assert all(each.request_id.startswith("ready-") for each in server.scheduler.seen)


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
    "the digest": [f"Authorization: Bearer {sha256(b'a-key').hexdigest()}"],
    "a huge key": [f"Authorization: Bearer {'a-key' * 10_000}"],
    "a key with a tail": ["Authorization: Bearer a-key x"],
    "other letters that look the same": ["Authorization: Bearer \xc3\xa0-key"],
    "another space": ["Authorization: Bearer\xa0a-key"],
}


@pytest.mark.parametrize("headers", TRICKS.values(), ids=TRICKS)
def test_header_tricks_do_not_open(byte_tokenizer: Any, headers: list[str]) -> None:
    body = json.dumps(ASKED).encode()
    with serve(byte_tokenizer, api_keys="a-key") as server:
        answer = raw(server, head(*headers, size=len(body)), body)
        assert answer.startswith(b"HTTP/1.1 401") and b"a-key" not in answer
        assert not server.scheduler.seen


def test_whoever_sends_the_header_twice_or_breaks_http_is_refused(byte_tokenizer: Any) -> None:
    body = json.dumps(ASKED).encode()
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
