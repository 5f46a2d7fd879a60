"""A real HTTP server around a fake step loop, for the API's tests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.api.app import create_app
from ecospec_orchestrator.core import (
    QueueFullError,
    Request,
    RequestStats,
    ShuttingDownError,
    TokenEvent,
    TokenLogprob,
)
from ecospec_orchestrator.server import bind, http_config
from ecospec_orchestrator.settings import Settings

MODEL = "echo"


@dataclass
class _Job:
    request: Request
    on_event: Callable[[TokenEvent], None]
    stats: RequestStats
    skipped: int
    sent: int = 0


@dataclass
class EchoScheduler:
    """Answers with the prompt's own tokens, over and over; a seed skips that many. Steps bring 1, 2, 3, 1, ... tokens."""

    step_seconds: float = 0.001
    max_running: int = 8
    max_waiting: int = 64
    fail_after: int | None = None  # steps of a request before it fails
    crash: bool = False  # the loop dies at the next step
    seen: list[Request] = field(default_factory=list)
    cancelled: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    @property
    def running(self) -> int:
        return min(len(self._jobs), self.max_running)

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self.max_running)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        for request_id in list(self._jobs):
            self.cancel(request_id)

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        with self._lock:
            if self._stopping:
                raise ShuttingDownError("The scheduler is stopping.")
            if len(self._jobs) >= self.max_running + self.max_waiting:
                raise QueueFullError(f"The queue is full: {self.max_waiting} requests wait; try again later.", 3)
            assert request.request_id not in self._jobs
            self.seen.append(request)
            stats = RequestStats(prompt_tokens=len(request.prompt_tokens), queue_seconds=0.001)
            skipped = (request.sampling.seed or 0) % len(request.prompt_tokens)
            self._jobs[request.request_id] = _Job(request, on_event, stats, skipped)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            job = self._jobs.pop(request_id, None)
        if job is not None:
            self.cancelled.append((request_id, time.monotonic()))
            job.on_event(TokenEvent(request_id, finish_reason="abort", stats=job.stats))

    def _loop(self) -> None:
        while not self._stopping and not self.crash:
            time.sleep(self.step_seconds)
            with self._lock:
                batch = list(self._jobs.values())[: self.max_running]
            for job in batch:
                event = self._step(job)
                with self._lock:
                    if self._jobs.get(job.request.request_id) is not job:
                        continue  # cancelled meanwhile
                    if event.finish_reason is not None:
                        del self._jobs[job.request.request_id]
                    job.on_event(event)

    def _step(self, job: _Job) -> TokenEvent:
        request, stats = job.request, job.stats
        if self.fail_after is not None and stats.steps >= self.fail_after:
            return TokenEvent(request.request_id, finish_reason="error", error="The fake engine broke.", stats=stats)
        if request.prompt_logprobs is not None and stats.steps == 0:
            alternatives = range(request.prompt_logprobs)
            scores = tuple(
                TokenLogprob(token, -0.25, tuple((token + i, -0.25 - i) for i in alternatives))
                for token in request.prompt_tokens[1:]
            )
            job.on_event(TokenEvent(request.request_id, prompt_logprobs=scores))
        count = 1 + stats.steps % 3
        prompt = request.prompt_tokens
        start = job.sent + job.skipped
        tokens = [prompt[(start + i) % len(prompt)] for i in range(min(count, request.max_tokens - job.sent))]
        reason = None
        for at, token in enumerate(tokens):
            if token in request.stop_token_ids:
                tokens, reason = tokens[:at], "stop"
                break
        job.sent += len(tokens)
        if reason is None and job.sent >= request.max_tokens:
            reason = "length"
        stats.steps += 1
        stats.draft_tokens += 4
        stats.accepted_tokens += count - 1
        stats.acceptance_histogram[count - 1] = stats.acceptance_histogram.get(count - 1, 0) + 1
        per_length = stats.acceptance_histogram_by_draft_length.setdefault(4, {})
        per_length[count - 1] = per_length.get(count - 1, 0) + 1
        stats.distinct_experts_sum += 9.0
        stats.bytes_read += 1000.0
        stats.output_tokens = job.sent
        logprobs = ()
        if request.logprobs is not None:
            logprobs = tuple(
                TokenLogprob(token, -0.5, tuple((token + i, -0.5 - i) for i in range(request.logprobs)))
                for token in tokens
            )
        return TokenEvent(request.request_id, tuple(tokens), logprobs, reason, stats if reason else None)


@dataclass
class Running:
    client: httpx.Client
    scheduler: Any
    app: FastAPI
    url: str


@contextlib.contextmanager
def serve(
    tokenizer: Any, scheduler: Any = None, loading: bool = False, ledger: Ledger | None = None, **settings: Any
) -> Iterator[Running]:
    """uvicorn on a free port in a thread; closed and joined at the end."""
    scheduler = scheduler or EchoScheduler()
    scheduler.start()
    chosen = Settings(**settings)
    app = create_app(
        None if loading else scheduler, tokenizer, MODEL, chosen, ledger or Ledger(), {"policy": "ecospec"}
    )
    slow = lambda phase: app.state.service.ledger.guard.slow_clients.labels(phase).inc()
    config = http_config(app, chosen, slow)
    config.timeout_graceful_shutdown = 2
    server, sock = uvicorn.Server(config), bind("127.0.0.1", 0)
    thread = threading.Thread(target=uvloop.run, args=(server.serve([sock]),), daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        port = sock.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
            yield Running(client, scheduler, app, url)
    finally:
        server.should_exit = True
        thread.join(10)
        scheduler.stop()
    assert not thread.is_alive()


ASKED = {"prompt": "abc", "max_tokens": 1}


def ask(server: Running, key: str | None, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    """ASKED with changes, by a key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return server.client.post(path, json=ASKED | body, headers=headers)


def complete(server: Running, expected: int = 200, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = server.client.post(path, json=body)
    assert answer.status_code == expected, answer.text
    return answer.json()


def chat(server: Running, expected: int = 200, text: Any = "hello", **body: Any) -> dict[str, Any]:
    messages = body.pop("messages", [{"role": "user", "content": text}])
    return complete(server, expected, "/v1/chat/completions", messages=messages, **body)


def events(server: Running, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """All data of a stream; checks the framing byte for byte."""
    with server.client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = b"".join(answer.iter_raw()).decode()
    blocks = raw.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks]


def leave_early(server: Running, stream: bool) -> float:
    """A client asks for two long answers and goes as soon as they run; time.monotonic() of when it did."""
    body = {"prompt": "abc", "max_tokens": 2000, "stream": stream, "n": 2}
    if stream:
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            assert server.scheduler.running == 2
            return time.monotonic()
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode() + data)
        wait_until(lambda: server.scheduler.running == 2)
    return time.monotonic()


def assert_death_is_told(server: Running, die: Callable[[], None]) -> None:
    """die: ends the step loop, here under a stream; the stream says so, and so does everything after it."""
    body = {"prompt": "abc", "max_tokens": 900, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        die()
        rest = [line for line in lines if line]
    assert "engine has stopped" in rest[-2] and rest[-1] == "data: [DONE]"
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "dead"})
    assert_error(server.client.post("/v1/completions", json={"prompt": "abc"}), 503, None)


def metric(server: Running, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    raise AssertionError(f"no metric {name} {labels}")


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def assert_error(answer: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    if param is not None:
        assert f"'{param}'" in body["error"]["message"]
    return body["error"]
