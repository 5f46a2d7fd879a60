"""What must hold in every Dockerfile and in the compose files."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from deployed_settings import orchestrator_settings, predictor_settings, start_seconds

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EVERY_DOCKERFILE = [pytest.param(path, id=path.stem) for path in DOCKERFILES]
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*)|:\?[^}]*)?\}")
END_SECONDS = 10  # of a server after its drain


def instructions(path: Path) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest), comments left out and continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def environment_of(path: Path) -> dict[str, str]:
    """All ENV variables of a file, of every stage."""
    text = " ".join(rest for word, rest in instructions(path) if word == "ENV")
    return dict(part.split("=", 1) for part in text.split())


def test_the_three_images_are_there() -> None:
    assert [path.stem for path in DOCKERFILES] == ["orchestrator-tensorrt-llm", "orchestrator", "predictor"]


@pytest.mark.parametrize("path", EVERY_DOCKERFILE)
def test_images_are_pinned_staged_and_labelled(path: Path) -> None:
    found = instructions(path)
    bases = dict(
        rest.split("=", 1) for word, rest in found[: [word for word, _ in found].index("FROM")] if word == "ARG"
    )
    assert all(":" in image and not image.endswith(":latest") for image in bases.values())
    assert "@sha256:" in bases["PYTHON_IMAGE"]
    stages = [rest.split(" AS ") for word, rest in found if word == "FROM"]
    assert len(stages) > 1 and stages[-1][1] == "runtime"
    earlier: set[str] = set()
    for source, name in stages:
        assert source in earlier or source.strip("${}") in bases, source
        earlier.add(name)
    labels = " ".join(rest for word, rest in found if word == "LABEL")
    for name in ("title", "description", "licenses", "version", "revision", "base.name"):
        assert f"org.opencontainers.image.{name}=" in labels


@pytest.mark.parametrize("path", EVERY_DOCKERFILE)
def test_images_run_as_nobody_and_write_to_one_folder(path: Path) -> None:
    found = instructions(path)
    users = [rest for word, rest in found if word == "USER"]
    assert users[0] == users[-1] == "65532:65532" and set(users[1:-1]) <= {"0:0"}  # root only to install
    assert [rest for word, rest in found if word == "VOLUME"] == ['["/var/cache/ecospec"]']
    environment = environment_of(path)
    assert environment["HOME"] == environment["XDG_CACHE_HOME"] == "/var/cache/ecospec"
    for word in ("ENTRYPOINT", "CMD"):
        assert all(rest.startswith("[") for name, rest in found if name == word)  # a shell would not pass SIGTERM on


@pytest.mark.parametrize("path", EVERY_DOCKERFILE)
def test_health_checks_need_no_curl_and_compilers_are_in_the_cuda_stage_only(path: Path) -> None:
    found = instructions(path)
    (health,) = (rest for word, rest in found if word == "HEALTHCHECK")
    assert "CMD [" in health and "curl" not in health
    stage = ""
    for word, rest in found:
        stage = rest.split(" AS ")[1] if word == "FROM" else stage
        if word == "RUN" and "apt-get install" in rest:
            assert stage == "cuda"
            assert all("=" in name for name in rest.split("--no-install-recommends")[1].split("&&")[0].split())


@pytest.mark.parametrize("path", EVERY_DOCKERFILE)
def test_what_images_copy_is_in_the_context(path: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for word, rest in instructions(path):
        if word == "COPY" and not rest.startswith("--from="):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(source == place or source.startswith(place + "/") for place in allowed), source


@pytest.mark.parametrize("path", EVERY_DOCKERFILE)
def test_images_start_with_settings_that_exist_on_the_ports_that_they_expose(path: Path) -> None:
    ours = {name: value for name, value in environment_of(path).items() if name.startswith("ECOSPEC_")}
    (exposed,) = (rest for word, rest in instructions(path) if word == "EXPOSE")
    if path.stem == "predictor":
        predictor = predictor_settings(ours)
        assert exposed == f"{predictor.port} {predictor.metrics_port}"
        assert predictor.host == predictor.metrics_host == "0.0.0.0"
    else:
        orchestrator = orchestrator_settings(ours)
        assert exposed == str(orchestrator.port) and orchestrator.host == "0.0.0.0"
        (health,) = (rest for word, rest in instructions(path) if word == "HEALTHCHECK")
        minutes = int(health.split("--start-period=")[1].split("m ")[0])
        assert 60 * minutes >= start_seconds(orchestrator)


def filled(value: Any) -> Any:
    """A compose file with the defaults of its variables; a variable without one becomes 'given'."""
    if isinstance(value, dict):
        return {key: filled(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    return (
        VARIABLE.sub(lambda found: "given" if found[2] is None else found[2], value)
        if isinstance(value, str)
        else value
    )


def compose(name: str) -> dict[str, Any]:
    return filled(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))


SERVICES = compose("docker-compose.yml")["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_composed_services_are_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "cap_add" not in service and "network_mode" not in service
    image = service["image"].split("@")[0].rpartition(":")[2]
    assert image != "latest" and any(letter.isdigit() for letter in image)
    assert "mem_limit" in service and "networks" in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert not any("docker.sock" in volume for volume in service.get("volumes", []))


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_composed_settings_exist_and_ports_match_them() -> None:
    orchestrator = orchestrator_settings(SERVICES["orchestrator"]["environment"])
    assert SERVICES["orchestrator"]["ports"] == [f"127.0.0.1:8000:{orchestrator.port}"]
    assert seconds(SERVICES["orchestrator"]["stop_grace_period"]) >= orchestrator.drain_limit_seconds + END_SECONDS
    assert orchestrator.max_request_seconds > 0  # so that a stop has an end
    predictor = predictor_settings(SERVICES["predictor"]["environment"])
    assert orchestrator.predictor_address == f"predictor:{predictor.port}"
    assert predictor.allow_plaintext and predictor.host == "0.0.0.0"
    assert seconds(SERVICES["predictor"]["stop_grace_period"]) >= predictor.grace_seconds + END_SECONDS
    for settings in (orchestrator, predictor):
        assert settings.state_store_url.get_secret_value() == "redis://redis:6379/0"


def test_the_composed_store_and_its_clients_get_one_password() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    passwords = [
        value
        for service in services.values()
        for name, value in service.get("environment", {}).items()
        if name.endswith("STATE_STORE_PASSWORD") or name == "REDISCLI_AUTH"
    ]
    assert passwords == ["${ECOSPEC_STATE_STORE_PASSWORD:-}"] * 3
    assert not VARIABLE.search(
        str(services["redis"]["command"])
    )  # a command line is visible to everybody on the machine


def test_only_published_services_reach_the_outside_and_only_orchestrators_the_predictor() -> None:
    networks = compose("docker-compose.yml")["networks"]
    assert {name for name, options in networks.items() if not options.get("internal")} == {"outside"}
    for name, service in SERVICES.items():
        assert ("outside" in service["networks"]) == ("ports" in service), name
    assert {name for name, service in SERVICES.items() if "predictions" in service["networks"]} == {
        "orchestrator",
        "predictor",
    }


def test_prometheus_scrapes_what_is_composed_and_grafana_finds_its_files() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = {
        target for job in config["scrape_configs"] for part in job["static_configs"] for target in part["targets"]
    }
    predictor = predictor_settings(SERVICES["predictor"]["environment"])
    assert {"orchestrator:8000", f"predictor:{predictor.metrics_port}"} <= targets
    for name in ("orchestrator", "predictor", "prometheus"):
        assert "metrics" in SERVICES[name]["networks"]
    provisioning = ROOT / "deploy/grafana/provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/ecospec.yml").read_text(encoding="utf-8"))["providers"]
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"] if volume.startswith("./"))
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert all((ROOT / place).is_dir() for place in mounts)


def test_the_gpu_files_settings_exist() -> None:
    services = compose("docker-compose.gpu.yml")["services"]
    assert set(services) <= set(SERVICES)
    for service in services.values():
        settings = orchestrator_settings(SERVICES["orchestrator"]["environment"] | service["environment"])
        assert (settings.device, settings.footprints) == ("cuda", "none")
        assert service["build"]["target"] == "cuda"


@contextmanager
def answering(status: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def health(port: int, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docker/http_health.py")]
    return subprocess.run(
        command, env={"ECOSPEC_PORT": str(port), **variables}, capture_output=True, text=True, timeout=30
    )


def test_the_orchestrators_health_check_says_what_the_server_says() -> None:
    with answering(200) as port:
        assert health(port).returncode == 0
    with answering(503) as port:
        loading = health(port)
    assert loading.returncode == 1 and "503" in loading.stderr
    gone = health(port)
    assert gone.returncode == 1 and "cannot be asked" in gone.stderr and "Traceback" not in gone.stderr


def test_the_health_check_follows_the_server_to_tls() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("orchestrator").configure_cert(context)
    with answering(200, context) as port:
        assert health(port, ECOSPEC_TLS_CERTIFICATE="/somewhere").returncode == 0
        assert health(port).returncode == 1
