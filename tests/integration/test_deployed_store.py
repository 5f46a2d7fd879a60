"""The Redis of deploy/k8s, with the arguments and probes of its manifest, over TLS and with a password, and that of the compose file."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme
import yaml
from kustomize import build
from ports import free_port
from redis_server import require_redis

from ecospec_proto.shared_state import StoreAddress, connect

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "deploy/k8s/overlays/h200"
FILES = "/etc/ecospec/redis"
PASSWORD = "hush"


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Every variable of the manifest comes from the Secret with the password."""
    return {item["name"]: PASSWORD for item in container["env"]}


def test_the_deployed_redis_wants_tls_and_the_password_and_its_probe_passes(tmp_path: Path) -> None:
    require_redis()
    (store,) = (made for made in build(OVERLAY) if made["kind"] == "StatefulSet")
    (container,) = store["spec"]["template"]["spec"]["containers"]
    authority, port = trustme.CA(), str(free_port())
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "tls.key"))

    def here(words: list[str]) -> list[str]:
        """With this machine's files and port, and variables filled in as the kubelet does."""
        return [
            word.replace(FILES, str(tmp_path)).replace("6379", port).replace("$(REDIS_PASSWORD)", PASSWORD)
            for word in words
        ]

    server = subprocess.Popen(
        [*here(container["args"]), "--bind", "127.0.0.1"], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    try:
        address = StoreAddress.parse(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.crt'}", PASSWORD)
        client = connect(address, 2.0)
        answers(client)
        client.close()
        for url, password, problem in (
            (f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={tmp_path / 'ca.crt'}", "", redis.AuthenticationError),
            (f"redis://127.0.0.1:{port}/0", PASSWORD, redis.ConnectionError),
        ):
            refused = connect(StoreAddress.parse(url, password), 2.0)
            with pytest.raises(problem):
                refused.ping()
            refused.close()
        probe = here(container["readinessProbe"]["exec"]["command"])
        assert shutil.which(probe[0])
        done = subprocess.run(
            [probe[0], "-p", port, *probe[1:]],
            env={**os.environ, **environment(container)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and done.stdout.strip() == "PONG", done.stderr
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("password", [PASSWORD, ""])
def test_the_composed_redis_takes_its_password_from_the_environment(tmp_path: Path, password: str) -> None:
    require_redis()
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["redis"]
    port = str(free_port())
    here = f"redis-server --port {port} --bind 127.0.0.1"
    server = subprocess.Popen(
        [word.replace("$$", "$").replace("redis-server", here) for word in service["command"]],
        cwd=tmp_path,
        env={**os.environ, **dict.fromkeys(service["environment"], password)},
        stdout=subprocess.DEVNULL,
    )
    try:
        for used in (password, "wrong"):
            client = connect(StoreAddress.parse(f"redis://127.0.0.1:{port}/0", used), 2.0)
            if used == password:
                answers(client)
            else:
                with pytest.raises(redis.AuthenticationError):
                    client.ping()
            client.close()
    finally:
        server.kill()
        server.wait()


def answers(client: redis.Redis, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert client.ping()
            return
        except redis.ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
