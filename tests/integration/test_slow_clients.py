"""Clients that dribble, stop, or do not read: each loses its connection, and nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from api_server import EchoScheduler, Running, complete, metric, serve, wait_until

LARGE = {"prompt": ["abc"] * 4, "n": 16, "max_tokens": 1500, "logprobs": 5, "stream": True}  # megabytes


def connect(server: Running, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:  # before connecting, or the window is larger already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return connection


def everything(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def request(body: dict[str, Any], missing: int = 0) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return (head + data)[: -missing or None]


def slow(server: Running, phase: str) -> float:
    return metric(server, "ecospec_slow_clients_total", phase=phase)


@pytest.mark.parametrize(
    ("sent", "phase"),
    [
        (b"POST /v1/comp", "headers"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ", "headers"),
        (request({"prompt": "abc"}, missing=1), "body"),
        (b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"pro', "body"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n", "body"),
    ],
)
def test_a_request_that_does_not_arrive_is_ended(byte_tokenizer: Any, sent: bytes, phase: str) -> None:
    with serve(byte_tokenizer, client_read_seconds=0.3) as server, connect(server) as connection:
        connection.sendall(sent)
        answer = everything(connection)
        if sent.startswith(b"POST"):
            assert answer.startswith(b"HTTP/1.1 408") and b'"request_too_slow"' in answer
        else:  # it was answered before its body was due
            assert answer.startswith(b"HTTP/1.1 200")
        assert slow(server, phase) == 1 and not server.scheduler.seen
        complete(server, **{"prompt": "abc", "max_tokens": 1})
        assert metric(server, "ecospec_requests_refused_total", status="500") == 0


def test_dribbling_does_not_buy_time(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, client_read_seconds=0.5) as server, connect(server) as connection:
        began = time.monotonic()
        answer = b""
        connection.settimeout(0.02)
        for byte in request({"prompt": "abc" * 1000}):
            try:
                connection.sendall(bytes([byte]))
                answer += connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            if not answer or answer.endswith(b"}}"):
                break
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 10  # at this pace all of it would take a minute
        assert not server.scheduler.seen


def test_a_connection_that_says_nothing_is_closed_without_a_word(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, client_read_seconds=0.2) as server, connect(server) as connection:
        assert everything(connection) == b""
        assert slow(server, "headers") == 0


def test_a_second_request_on_a_connection_is_watched_too(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, client_read_seconds=0.5) as server, connect(server) as connection:
        first = request({"prompt": "abc", "max_tokens": 1})
        connection.sendall(first + request({"prompt": "abc"}, missing=3))  # the second one with the first one's end
        answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer
        assert slow(server, "body") == 1 and len(server.scheduler.seen) == 1


@pytest.mark.parametrize("reads_first", [0, 200_000])
def test_whoever_does_not_read_loses_the_slot(byte_tokenizer: Any, reads_first: int) -> None:
    scheduler = EchoScheduler(max_running=64)
    with serve(byte_tokenizer, scheduler, client_write_seconds=0.3) as server, connect(server, 4096) as connection:
        connection.sendall(request(LARGE))
        while reads_first > 0:
            reads_first -= len(connection.recv(65536))
        wait_until(lambda: len(scheduler.cancelled) == 64 or slow(server, "response") == 1)
        wait_until(lambda: scheduler.running == 0)
        assert slow(server, "response") == 1
        wait_until(lambda: metric(server, "ecospec_request_success_total", finished_reason="abort") > 0)
        assert b"[DONE]" not in everything(connection)
        complete(server, prompt="abc", max_tokens=1)


def test_whoever_reads_slowly_but_reads_gets_all(byte_tokenizer: Any) -> None:
    scheduler = EchoScheduler(max_running=64)
    with serve(byte_tokenizer, scheduler, client_write_seconds=2) as server, connect(server) as connection:
        connection.sendall(request(LARGE | {"max_tokens": 100}))
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            time.sleep(0.005)
            part = connection.recv(16384)
            assert part, "cut off"
            answer += part
        assert answer.count(b"[DONE]") == 1 and slow(server, "response") == 0


def test_an_answer_whose_end_is_not_read_does_not_stay(byte_tokenizer: Any) -> None:
    """The request has ended and its last bytes wait in this process's buffer: no time-out of a handler sees that."""
    with serve(byte_tokenizer, EchoScheduler(max_running=64), client_write_seconds=0.3) as server:
        with connect(server, 4096) as connection:
            body = LARGE | {"stream": False, "max_tokens": 300}
            connection.sendall(request(body).replace(b"Host: x", b"Host: x\r\nConnection: close"))
            wait_until(lambda: len(server.scheduler.seen) == 64 and server.scheduler.running == 0)
            connection.recv(1)
            time.sleep(1.5)
            assert not everything(connection).endswith(b"}")


def test_too_many_connections(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, max_connections=5) as server:
        assert server.client.get("/health").status_code == 200  # keeps one
        held = [connect(server) for _ in range(4)]
        time.sleep(0.2)
        with connect(server) as connection:
            assert everything(connection) == b""
        assert server.client.get("/health").status_code == 200
        for each in held:
            each.close()
        wait_until(lambda: slow(server, "connections") >= 1)

        def again() -> bool:
            with connect(server) as one:
                one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return everything(one).startswith(b"HTTP/1.1 200")

        wait_until(again)


def test_many_slow_clients_do_not_hold_up_a_fast_one(byte_tokenizer: Any) -> None:
    with serve(byte_tokenizer, client_read_seconds=5) as server:
        held = [connect(server) for _ in range(100)]
        for each in held:
            each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        done: list[int] = []
        thread = threading.Thread(
            target=lambda: done.extend(complete(server, prompt="abc", max_tokens=5)["usage"].values())
        )
        thread.start()
        thread.join(4)  # long before the first of them is ended
        assert done
        for each in held:
            each.close()
