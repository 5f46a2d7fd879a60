"""The server as a process: the address, loading, the ready line, draining on SIGTERM, a predictor that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import wait_until
from server_process import ServerProcesses, health, post, read_line

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.predictor_process import PredictorProcess, predictor_command
from ecospec_orchestrator.settings import load_settings


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerProcesses]:
    processes = ServerProcesses(tmp_path)
    yield processes
    processes.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_loads_says_it_is_ready_and_drains(start: Any, number: signal.Signals) -> None:
    child, url = start(drain_seconds=10)
    assert health(url) == "loading"
    line = read_line(child)
    assert "ready" in line and f"curl -N {url}/v1/chat/completions" in line
    assert health(url) == "ok"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, url, prompt="abc", max_tokens=100)
        while httpx.get(f"{url}/metrics", trust_env=False).text.find("ecospec_num_requests_running 1.0") < 0:
            time.sleep(0.01)
        child.send_signal(number)
        wait_until(lambda: health(url) == "draining")
        assert post(url, prompt="abc").status_code == 503
        answer = running.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 100
    assert child.wait(10) == 0
    assert read_line(child) == "closed\n"


def test_a_drain_that_takes_too_long_cancels_what_is_left(start: Any) -> None:
    child, url = start(drain_seconds=0.3)
    read_line(child)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2000, "stream": True}, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"abort"' in rest[-2]
    assert child.wait(10) == 0


def test_a_drain_waits_for_the_longest_request_that_is_allowed_and_for_no_longer_one(start: Any) -> None:
    """Without drain_seconds nothing that may run is cut off, and what may not run on ends by its own deadline."""
    child, url = start(max_request_seconds=4)
    read_line(child)
    with ThreadPoolExecutor(3) as pool:
        longest = pool.submit(post, url, prompt="abc", max_tokens=2000)
        own = httpx.Client(headers={"X-Request-Timeout-Seconds": "1"}, trust_env=False, timeout=20)
        shorter = pool.submit(own.post, f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2000})
        short = pool.submit(post, url, prompt="abc", max_tokens=200)
        while httpx.get(f"{url}/metrics", trust_env=False).text.find("ecospec_num_requests_running 3.0") < 0:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        assert [each.result().status_code for each in (longest, shorter, short)] == [504, 504, 200]
        own.close()
    assert short.result().json()["usage"]["completion_tokens"] == 200
    assert "within its 4 seconds" in longest.result().text and "within its 1 seconds" in shorter.result().text
    assert child.wait(10) == 0


def test_a_request_that_has_not_begun_is_not_cut_off_by_sigterm(start: Any) -> None:
    """What was sent before the signal is answered, if only by a refusal, also when its body arrives later."""
    child, url = start()
    read_line(child)
    body = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as connection:
        connection.sendall(head + body[:10])
        time.sleep(0.2)
        child.send_signal(signal.SIGTERM)
        while health(url) != "draining":
            time.sleep(0.01)
        connection.sendall(body[10:])
        answer = b""
        while part := connection.recv(65536):  # the server ends the connection
            answer += part
    assert answer.startswith(b"HTTP/1.1 503") and b"shutting_down" in answer
    assert child.wait(10) == 0


def test_an_engine_that_hangs_does_not_keep_the_process(start: Any) -> None:
    child, _ = start(model="stuck")
    assert "ready" in read_line(child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads_ends_it_at_once(start: Any, number: signal.Signals) -> None:
    child, url = start(model="slow")
    assert health(url) == "loading"
    child.send_signal(number)
    assert child.wait(15) == 0, "the end waits for the model, which takes a minute"
    assert read_line(child) == "let go\n"
    assert start.log.read_text().count("Stopping") == 1


@pytest.mark.parametrize("option", ["--port", "--predictor-address"])
def test_a_taken_address_is_one_sentence(option: str, tmp_path: Path) -> None:
    (tmp_path / "predictor").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = str(port) if option == "--port" else f"127.0.0.1:{port}"
        free = [] if option == "--port" else ["--port", "0"]
        command = [sys.executable, "-m", "ecospec_orchestrator.cli", "demo", "--demo-dir", str(tmp_path), option, value]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([*command, *free], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and str(port) in done.stderr


def test_a_predictor_that_dies_is_started_again_and_stopped_in_the_end() -> None:
    child = PredictorProcess([sys.executable, "-c", "import time; time.sleep(600)"], first_backoff_seconds=0.05)
    child.start()
    try:
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: child.starts == 2 and child.pid is not None)
        second = child.pid
        assert second != first
    finally:
        child.stop()
    assert child.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_the_predictor_gets_its_files_and_address(tmp_path: Path) -> None:
    settings = load_settings({"demo_dir": tmp_path, "predictor_address": "127.0.0.1:6000"}, {})
    with pytest.raises(SettingsError, match="demo_dir"):
        predictor_command(settings, Path("weights.gguf"))
    (tmp_path / "predictor").mkdir()
    command = predictor_command(settings, Path("weights.gguf"))
    assert command[:4] == [sys.executable, "-m", "ecospec_predictor.cli", "serve"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--model-dir": str(tmp_path / "predictor"),
        "--embeddings": "weights.gguf",
        "--host": "127.0.0.1",
        "--port": "6000",
    }


def test_restarts_back_off() -> None:
    child = PredictorProcess([sys.executable, "-c", ""], first_backoff_seconds=0.2, longest_backoff_seconds=0.4)
    began = time.monotonic()
    child.start()
    try:
        while child.starts < 4:
            assert time.monotonic() - began < 60
            time.sleep(0.01)
        assert time.monotonic() - began > 0.2 + 0.4 + 0.4
    finally:
        child.stop()


def test_a_predictor_that_does_not_follow_is_killed(tmp_path: Path) -> None:
    deaf = tmp_path / "deaf"
    program = (
        f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(deaf)!r}, 'w'); time.sleep(600)"
    )
    child = PredictorProcess([sys.executable, "-c", program])
    child.start()
    number = child.pid
    wait_until(deaf.exists)
    child.stop(0.1)
    assert number is not None and child.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
