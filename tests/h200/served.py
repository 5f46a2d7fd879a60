"""A server of ours in a process of its own, asked over HTTP. The standard library alone, as the image has it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVE = (sys.executable, "-m", "ecospec_orchestrator.cli", "serve")
LOAD_SECONDS = 3600.0  # hundreds of gigabytes of weights, and graphs to capture
ANSWER_SECONDS = 1800.0
DRAIN_SECONDS = 120.0
SETTLE_SECONDS = 3.0  # until the engine's statistics have arrived
SAMPLE = re.compile(r"^([a-z_]+)(?:\{[^}]*\})? ([0-9.eE+-]+|NaN)$")


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, seconds: float = 30.0) -> str:
        with urllib.request.urlopen(self.url + path, timeout=seconds) as answer:
            return str(answer.read().decode())

    def complete(self, **body: Any) -> dict[str, Any]:
        """Greedy and of fixed length unless told otherwise. Raises RuntimeError with the server's words."""
        body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True} | body
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{error.code}: {error.read().decode()[:500]}") from None

    def together(self, prompts: Sequence[str], tokens: int) -> list[dict[str, Any]]:
        """All prompts at the same time, so that they share every step."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt=prompt, max_tokens=tokens), prompts))

    def metrics(self) -> dict[str, float]:
        """Of all labels together, without the prefix; after what was going on has been counted."""
        time.sleep(SETTLE_SECONDS)
        totals: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if match := SAMPLE.match(line):
                name = match[1].removeprefix("ecospec_")
                totals[name] = totals.get(name, 0.0) + float(match[2])
        return totals


@contextmanager
def serving(options: Sequence[str], log: Path) -> Iterator[Server]:
    """Raises RuntimeError when it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("wb") as output:
        child = subprocess.Popen([*SERVE, *options, "--port", str(port)], stdout=output, stderr=subprocess.STDOUT)
        try:
            server = Server(f"http://127.0.0.1:{port}")
            _wait(server, child, log)
            yield server
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(DRAIN_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _wait(server: Server, child: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + float(os.environ.get("LOAD_SECONDS", LOAD_SECONDS))
    while time.monotonic() < end:
        if child.poll() is not None:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
            raise RuntimeError(f"the server ended with {child.returncode}; {log} ends with: {' | '.join(tail)}")
        try:
            server.get("/ready")
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server was not ready in time; see {log}")
