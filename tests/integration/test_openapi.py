"""schemathesis over the OpenAPI documents: no failure of the server, and no answer that the documents do not describe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_server import EchoScheduler, serve
from ports import free_port
from server_process import ServerProcesses, read_line

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
ADMIN_KEY = "an-administrators-long-key"


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """A hundredth of --fuzz-inputs: each of these is an HTTP request."""
    return max(5, request.config.getoption("--fuzz-inputs") // 100)


def check(document: str, folder: Path, examples: int, *options: str) -> None:
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", document, "--checks", CHECKS,
        "--max-examples", str(examples), "--seed", "1", "--no-color", "--phases", "examples,coverage,fuzzing", *options,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_answer_is_documented(byte_tokenizer: Any, tmp_path: Path, examples: int) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.0), max_context_tokens=64) as server:
        check(f"{server.url}/openapi.json", tmp_path, examples)
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_every_answer_to_administrators_is_documented(tmp_path: Path, examples: int) -> None:
    processes, port = ServerProcesses(tmp_path), free_port()
    try:
        child, _ = processes(admin_port=port, admin_key=ADMIN_KEY)
        read_line(child)
        url = f"http://127.0.0.1:{port}/admin/openapi.json"
        check(url, tmp_path, examples, "-H", f"Authorization: Bearer {ADMIN_KEY}")
        assert child.poll() is None
    finally:
        processes.close()
