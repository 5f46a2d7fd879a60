"""`make test-containers`: the images are built, the compose file comes up, answers, and survives the loss of Redis and predictor.

    python tests/containers/try_compose.py [--python-image NAME] [--image SERVICE=NAME] [--skip SERVICE] [--torch-backend cpu] [--keep]

Needs a Docker engine that this user may use, Docker Compose, 15 GB of disk, and the base images or a way to pull them; says what is
missing first. Names of other base images help where the files' own cannot be pulled. Takes minutes, so it is no part of make test.
Exit code 0, 1 when a check fails, 2 when something that it needs is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from composed import (
    BUILT,
    PULLED,
    ROOT,
    CheckError,
    Composed,
    ask,
    dashboards,
    output,
    ready,
    require,
    say,
    scraped,
    served,
    wait,
)

DISK_BYTES = 15 * 10**9
READY_SECONDS = 900
LONG_TOKENS = 200
PLAYGROUND = ROOT / "services/orchestrator/ecospec_orchestrator/api/playground"
CACHE = "/var/cache/ecospec"
EXPORTERS = "from opentelemetry.exporter.otlp.proto.grpc import trace_exporter; from opentelemetry.exporter.otlp.proto.http import trace_exporter"


class MissingError(Exception):
    """Something that this test needs is not there; the text is one sentence."""


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


def check_containers(composed: Composed) -> None:
    for service in BUILT:
        require(composed.inside(service, "id", "-u").stdout.strip() == "65532", f"{service} runs as user 65532")
        touched = composed.inside(service, "touch", "/opt/ecospec/here")
        require("Read-only" in touched.stderr, f"{service} cannot write to its image")
        compilers = composed.inside(service, "sh", "-c", "command -v gcc cc clang; true").stdout.strip()
        require(compilers == "", f"{service} has no compiler")
        traces = composed.inside(service, "python", "-c", EXPORTERS)
        require(traces.returncode == 0, f"{service} can send traces")
        wait(
            f"{service}'s health check", lambda name=service: composed.state(name)["Health"]["Status"] == "healthy", 120
        )


def check_files(composed: Composed) -> None:
    """Kernels that were compiled with the image are enough: nothing was compiled since."""
    for service in BUILT:
        brought, there = (composed.found(service, place, "*.nbc") for place in ("/opt/ecospec/kernels", CACHE))
        more = f", and these more: {set(there) - set(brought)}" if set(there) - set(brought) else ""
        require(brought != [] and there == brought, f"{service} has used the {len(brought)} kernels of its image{more}")
    require(b"<title>" in served("/"), "the playground is at /")
    for path in (*PLAYGROUND.glob("*.js"), *PLAYGROUND.glob("*.css")):
        require(served(f"/playground/{path.name}") == path.read_bytes(), f"its {path.name}, too")


def profiles(composed: Composed) -> list[str]:
    """Name and time of the cost profiles that the orchestrator keeps."""
    return composed.found("orchestrator", CACHE, "profile-*.json", "%p,%T@")


def check_losses(composed: Composed, expected: str) -> None:
    def calls() -> float:
        return composed.metric("ecospec_predictor_call_seconds_count")

    def store_is_up() -> bool:
        return composed.metric("ecospec_state_store_up") == 1

    def used_again() -> bool:  # goodput asks only where it pays
        ask(policy="ecospec")
        return calls() > before

    wait("state store in use", store_is_up, 60)
    unnamed = composed.inside("redis", "env", "-u", "REDISCLI_AUTH", "redis-cli", "ping").stdout
    require(unnamed.startswith("NOAUTH"), "Redis wants its password")
    before = calls()
    composed.run("kill", "redis")
    require(ask() == expected, "without Redis the answer is the same")
    composed.run("kill", "predictor")
    require(ask() == expected, "without the predictor, too")
    composed.run("start", "redis", "predictor")
    wait("predictor used again", used_again, 180)
    wait("state store in use again", store_is_up, 60)


def check_stop(composed: Composed, expected: str) -> None:
    """A request that runs when the orchestrator is told to stop gets its whole answer; a second start measures nothing again."""
    measured = profiles(composed)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, LONG_TOKENS)
        wait("a long request that runs", lambda: composed.metric("ecospec_num_requests_running") > 0, 60)
        composed.run("stop", "orchestrator")
        require(len(answer.result()) > LONG_TOKENS, "a stop waits for the answer that runs")
    state = composed.state("orchestrator")
    require(state["ExitCode"] == 0 and not state["OOMKilled"], "the orchestrator's exit code is 0")
    composed.run("start", "orchestrator")
    wait("orchestrator ready again", ready, READY_SECONDS)
    require(profiles(composed) == measured, "it has used the costs that it measured before")
    require(ask() == expected, "its answer is the same")


def check(composed: Composed, images: Iterable[str]) -> None:
    """Raises CheckError at the first thing that is not so."""
    composed.run("up", "-d", "--build", *composed.services)
    wait("ready orchestrator", ready, READY_SECONDS)
    expected = ask()
    require(bool(expected.strip()), f"a completion through the published port: {expected!r}")
    require(len(profiles(composed)) == 1, "the costs that it measured are kept in its volume")
    require(composed.metric("ecospec_policy_profile_valid") == 1, "goodput decides by them")
    check_containers(composed)
    check_files(composed)
    if "prometheus" in images:
        wait("Prometheus with data of both services and its rules", scraped, 120)
    if "grafana" in images:
        wait("Grafana with all dashboards", dashboards, 120)
    check_losses(composed, expected)
    check_stop(composed, expected)
    sizes = ["--filter", "reference=ecospec-*", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}"]
    print(output("docker", "image", "ls", *sizes), flush=True)


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
        composed = Composed(compose, images, options.torch_backend, Path(folder))
        try:
            check(composed, images)
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
