"""The demo as a user starts it: both processes, real weights, real HTTP and gRPC."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Demo:
    process: subprocess.Popen[str]
    url: str
    ready_line: str

    def metric(self, name: str, labels: str = "") -> float:
        """The value of one sample, 0 when it is not there."""
        found = re.search(rf"^{re.escape(name + labels)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    def complete(self, prompt: str, tokens: int = 24, **fields: object) -> dict:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            timeout=120,
            json={"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0, **fields},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def predictor_pids(self) -> list[int]:
        found = subprocess.run(
            ["ps", "--ppid", str(self.process.pid), "-o", "pid=,args="], capture_output=True, text=True
        ).stdout
        return [int(line.split()[0]) for line in found.splitlines() if "ecospec_predictor" in line]


def start(cache: Path, *options: str) -> Demo:
    """The demo on free ports, from its first moment; its ready line is empty."""
    port, predictor_port, metrics_port = free_port(), free_port(), free_port()
    address, deadline = f"127.0.0.1:{predictor_port}", "500"
    command = [sys.executable, "-m", "ecospec_orchestrator.cli", "demo", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--predictor-address", address, "--predictor-deadline-ms", deadline, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "ECOSPEC_PREDICTOR_SERVICE_METRICS_PORT": str(metrics_port),
            "XDG_CACHE_HOME": str(cache),  # profiles are kept there
        },
    )
    return Demo(process, f"http://127.0.0.1:{port}", "")


@contextmanager
def running(cache: Path, *options: str) -> Iterator[Demo]:
    """The demo once it says that it is ready; interrupted in the end."""
    demo = start(cache, *options)
    process = demo.process
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and "ready" not in line.lower():
            line = process.stdout.readline()
        assert "curl" in line, f"the demo ended with {process.poll()} before it was ready"
        demo.ready_line = line
        yield demo
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()
