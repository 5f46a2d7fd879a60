"""`make test-containers`: the images are built, the compose file comes up, answers, and survives the loss of Redis and predictor.

    python tests/containers/try_compose.py [--python-image NAME] [--image SERVICE=NAME] [--skip SERVICE] [--torch-backend cpu] [--keep]

Needs a Docker engine that this user may use, Docker Compose, 15 GB of disk, and the base images or a way to pull them; says what is
missing first. Names of other base images help where the files' own cannot be pulled. Takes minutes, so it is no part of make test.
Exit code 0, 1 when a check fails, 2 when something that it needs is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "ecospec-try"
BUILT = ("predictor", "orchestrator")
PULLED = ("redis", "prometheus", "grafana")
DISK_BYTES = 15 * 10**9
READY_SECONDS = 900
LONG_TOKENS = 200
QUESTION = {"messages": [{"role": "user", "content": "What is gravity?"}], "temperature": 0, "ignore_eos": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


PORT, PROMETHEUS_PORT, GRAFANA_PORT = free_port(), free_port(), free_port()


class MissingError(Exception):
    """Something that this test needs is not there; the text is one sentence."""


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


def compose_command() -> list[str]:
    """Raises MissingError."""
    if shutil.which("docker") is None:
        raise MissingError("docker is not installed; install Docker's engine and its command.")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        raise MissingError("The Docker engine does not answer; start it, or run this as a user who may use it.")
    beside = Path(sys.executable).parent / "docker-compose"
    for words in (["docker", "compose"], [str(beside)], ["docker-compose"]):
        if shutil.which(words[0]) and not subprocess.run([*words, "version"], capture_output=True).returncode:
            return words
    raise MissingError(
        "Docker Compose is not installed; install its plug-in, or run make check-deploy, which installs one."
    )


def base_images(options: argparse.Namespace) -> dict[str, str]:
    """By service, and "python" of those that are built; the files' own names where the options have no other."""
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    dockerfile = (ROOT / "docker/orchestrator.Dockerfile").read_text(encoding="utf-8")
    own = re.search(r"^ARG PYTHON_IMAGE=(\S+)", dockerfile, re.MULTILINE)
    assert own is not None
    images = {"python": options.python_image or own[1]}
    images |= {name: composed[name]["image"] for name in PULLED} | dict(options.image)
    return {name: image for name, image in images.items() if name not in options.skip}


def require_disk() -> None:
    """Raises MissingError."""
    place = Path(output("docker", "info", "--format", "{{.DockerRootDir}}").strip())
    if not place.exists():  # the engine is on another machine
        return
    free = shutil.disk_usage(place).free
    if free < DISK_BYTES:
        raise MissingError(
            f"{place} has {free / 1e9:.0f} GB free, and the images need {DISK_BYTES / 1e9:.0f} GB; make room there."
        )


def require_images(names: Iterable[str]) -> None:
    """Raises MissingError for a base image that is neither here nor can be pulled."""
    for name in names:
        if subprocess.run(["docker", "image", "inspect", name], capture_output=True).returncode:
            say(f"pulling {name}")
            if subprocess.run(["docker", "pull", "--quiet", name], capture_output=True).returncode:
                raise MissingError(
                    f"The base image {name} is not here and cannot be pulled; name another one, see --help."
                )


class Try:
    """The composed services of one run."""

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

    def metric(self, service: str, url: str, name: str) -> float:
        """The sum of a metric's series, as the service itself tells it."""
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=10).read().decode())"
        text = self.inside(service, "python", "-c", code).stdout
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        )

    def predictor_calls(self) -> float:
        return self.metric("orchestrator", "http://127.0.0.1:8000/metrics", "ecospec_predictor_call_seconds_count")

    def is_running(self) -> bool:
        return self.metric("orchestrator", "http://127.0.0.1:8000/metrics", "ecospec_num_requests_running") > 0

    def store_is_up(self) -> bool:
        return self.metric("orchestrator", "http://127.0.0.1:8000/metrics", "ecospec_state_store_up") == 1

    def state(self, service: str) -> dict[str, Any]:
        container = output(*self._compose, "ps", "-aq", service).strip()
        return json.loads(output("docker", "inspect", container))[0]["State"]


def ask(max_tokens: int = 24) -> str:
    """The answer through the published port. Raises CheckError."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(QUESTION | {"max_tokens": max_tokens}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckError(f"No completion came: {error}") from error


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


def ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=15) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def fetched(url: str) -> Any:
    """The JSON there; None when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def scraped() -> bool:
    """Whether Prometheus reaches both services and its rules have made something of it."""

    def value(query: str) -> str:
        found = fetched(f"http://127.0.0.1:{PROMETHEUS_PORT}/api/v1/query?{urlencode({'query': query})}")
        result = found["data"]["result"] if found else []
        return str(result[0]["value"][1]) if result else ""

    return value('sum(up{job=~"ecospec-.*"})') == "2" and value('count({__name__=~"ecospec:.*"})') != ""


def dashboards() -> bool:
    """Whether Grafana has found all of them."""
    found = fetched(f"http://127.0.0.1:{GRAFANA_PORT}/api/search?type=dash-db")
    return len(found or []) == len(list((ROOT / "deploy/grafana/dashboards").glob("*.json")))


def require(condition: bool, text: str) -> None:
    if not condition:
        raise CheckError(text)
    say(f"ok: {text}")


def check_containers(composed: Try) -> None:
    for service in BUILT:
        require(composed.inside(service, "id", "-u").stdout.strip() == "65532", f"{service} runs as user 65532")
        touched = composed.inside(service, "touch", "/opt/ecospec/here")
        require("Read-only" in touched.stderr, f"{service} cannot write to its image")
        compilers = composed.inside(service, "sh", "-c", "command -v gcc cc clang; true").stdout.strip()
        require(compilers == "", f"{service} has no compiler")
        wait(
            f"{service}'s health check", lambda name=service: composed.state(name)["Health"]["Status"] == "healthy", 120
        )


def check_kernels(composed: Try) -> None:
    """Those that were compiled with the image are enough: nothing was compiled since."""
    for service in BUILT:
        brought, there = (
            set(composed.inside(service, "find", place, "-name", "*.nbc", "-printf", "%P\n").stdout.split())
            for place in ("/opt/ecospec/kernels", "/var/cache/ecospec")
        )
        require(bool(brought) and there == brought, f"{service} has used the {len(brought)} kernels of its image")


def check_losses(composed: Try, expected: str) -> None:
    wait("state store in use", composed.store_is_up, 60)
    calls = composed.predictor_calls()
    composed.run("kill", "redis")
    require(ask() == expected, "without Redis the answer is the same")
    composed.run("kill", "predictor")
    require(ask() == expected, "without the predictor, too")
    composed.run("start", "redis", "predictor")

    def used_again() -> bool:
        ask()
        return composed.predictor_calls() > calls

    wait("predictor used again", used_again, 180)
    wait("state store in use again", composed.store_is_up, 60)


def check_stop(composed: Try) -> None:
    """A request that runs when the orchestrator is told to stop gets its whole answer."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, LONG_TOKENS)
        wait("a long request that runs", composed.is_running, 60)
        composed.run("stop", "orchestrator")
        require(len(answer.result()) > LONG_TOKENS, "a stop waits for the answer that runs")
    state = composed.state("orchestrator")
    require(state["ExitCode"] == 0 and not state["OOMKilled"], "the orchestrator's exit code is 0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-image", default="", help="base image instead of the Dockerfiles' own")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        type=lambda text: tuple(text.split("=", 1)),
        help="SERVICE=NAME, an image instead of the compose file's own; several times",
    )
    parser.add_argument("--skip", action="append", default=[], choices=PULLED[1:], help="a service to leave out")
    parser.add_argument(
        "--torch-backend", default="cpu", help="build of torch; empty: what the package index offers first"
    )
    parser.add_argument("--keep", action="store_true", help="leave containers and volumes there")
    options = parser.parse_args()
    try:
        compose = compose_command()
        require_disk()
        images = base_images(options)
        require_images(images.values())
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        composed = Try(compose, images, options.torch_backend, Path(folder))
        try:
            composed.run("up", "-d", "--build", *composed.services)
            wait("ready orchestrator", ready, READY_SECONDS)
            expected = ask()
            require(bool(expected.strip()), f"a completion through the published port: {expected!r}")
            check_containers(composed)
            check_kernels(composed)
            if "prometheus" in images:
                wait("Prometheus with data of both services and its rules", scraped, 120)
            if "grafana" in images:
                wait("Grafana with all dashboards", dashboards, 120)
            check_losses(composed, expected)
            check_stop(composed)
            print(
                output(
                    "docker",
                    "image",
                    "ls",
                    "--filter",
                    "reference=ecospec-*",
                    "--format",
                    "{{.Repository}}:{{.Tag}} {{.Size}}",
                )
            )
        except CheckError as error:
            print(error, file=sys.stderr)
            composed.run("logs", "--tail", "30")
            return 1
        finally:
            if not options.keep:
                composed.run("down", "--volumes", "--timeout", "20")
    return 0


if __name__ == "__main__":
    sys.exit(main())
