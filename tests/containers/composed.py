"""The composed services of one try: started by Compose, asked through their published ports and from inside."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "ecospec-try"
BUILT = ("predictor", "orchestrator")
PULLED = ("redis", "prometheus", "grafana")
QUESTION = {"messages": [{"role": "user", "content": "What is gravity?"}], "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


PORT, PROMETHEUS_PORT, GRAFANA_PORT = free_port(), free_port(), free_port()


class CheckError(Exception):
    """A check failed; the text is one sentence."""


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def output(*words: str) -> str:
    """Standard output of a command that must succeed. Raises CheckError."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{' '.join(words)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def require(condition: bool, text: str) -> None:
    """Raises CheckError."""
    if not condition:
        raise CheckError(f"Not so: {text}.")
    say(f"ok: {text}")


def wait(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Raises CheckError."""
    began = shown = time.monotonic()
    while not done():
        now = time.monotonic()
        if now - began > seconds:
            raise CheckError(f"{what} did not come within {seconds:.0f} s.")
        if now - shown > 15:
            shown = now
            say(f"waiting for {what}, {now - began:.0f} s")
        time.sleep(1)
    say(f"{what}: after {time.monotonic() - began:.0f} s")


class Composed:
    """images: of the services by name, and "python" of those that are built. folder: for a file of its own."""

    def __init__(self, compose: list[str], images: dict[str, str], torch_backend: str, folder: Path) -> None:
        override = folder / "override.json"  # YAML holds JSON
        services: dict[str, Any] = {name: {"image": image} for name, image in images.items() if name in PULLED}
        services |= {name: {"build": {"args": {"PYTHON_IMAGE": images["python"]}}} for name in BUILT}
        override.write_text(json.dumps({"services": services}))
        self.services = list(services)
        files = ["-f", str(ROOT / "docker-compose.yml"), "-f", str(override), "--project-directory", str(ROOT)]
        self._compose = [*compose, "-p", PROJECT, *files]
        os.environ |= {
            "TORCH_BACKEND": torch_backend,
            "ECOSPEC_PUBLISHED_PORT": str(PORT),
            "PROMETHEUS_PUBLISHED_PORT": str(PROMETHEUS_PORT),
            "GRAFANA_PUBLISHED_PORT": str(GRAFANA_PORT),
            "ECOSPEC_STATE_STORE_PASSWORD": secrets.token_hex(16),
        }

    def run(self, *words: str) -> None:
        """With its output shown. Raises CheckError."""
        say(f"compose {' '.join(words)}")
        if subprocess.run([*self._compose, *words], cwd=ROOT).returncode:
            raise CheckError(f"compose {' '.join(words)} failed, see above.")

    def inside(self, service: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._compose, "exec", "-T", service, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    def found(self, service: str, place: str, pattern: str, shown: str = "%P") -> list[str]:
        """Files below a folder of a container, sorted; shown: a format of find."""
        return sorted(self.inside(service, "find", place, "-name", pattern, "-printf", f"{shown}\n").stdout.split())

    def metric(self, name: str) -> float:
        """The sum of the series of one of the orchestrator's metrics, as it tells itself."""
        code = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics', timeout=10).read().decode())"
        )
        text = self.inside("orchestrator", "python", "-c", code).stdout
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )

    def state(self, service: str) -> dict[str, Any]:
        container = output(*self._compose, "ps", "-aq", service).strip()
        return json.loads(output("docker", "inspect", container))[0]["State"]


def ask(max_tokens: int = 24, policy: str = "goodput") -> str:
    """The answer through the published port. Raises CheckError."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(QUESTION | {"max_tokens": max_tokens, "ecospec": {"policy": policy}}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckError(f"No completion came: {error}") from error


def ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=15) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def served(path: str) -> bytes:
    """What the orchestrator has there. Raises CheckError."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=15) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise CheckError(f"{path} is not served: {error}") from error


def scraped() -> bool:
    """Whether Prometheus reaches both services and its rules have made something of it."""

    def value(query: str) -> str:
        found = _json(f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?{urlencode({'query': query})}")
        result = found["data"]["result"] if found else []
        return str(result[0]["value"][1]) if result else ""

    return value('sum(up{job=~"ecospec-.*"})') == "2" and value('count({__name__=~"ecospec:.*"})') != ""


def dashboards() -> bool:
    """Whether Grafana has found all of them."""
    found = _json(f"http://127.0.0.1:{GRAFANA_PORT}/api/search?type=dash-db")
    return len(found or []) == len(list((ROOT / "deploy/grafana/dashboards").glob("*.json")))


def _json(url: str) -> Any:
    """None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None
