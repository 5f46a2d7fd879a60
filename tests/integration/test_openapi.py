"""schemathesis over the OpenAPI document: no failure of the server, and no answer that the document does not describe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from api_server import EchoScheduler, serve

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.fixture
def examples(request: pytest.FixtureRequest) -> int:
    """A hundredth of --fuzz-inputs: each of these is an HTTP request."""
    return max(5, request.config.getoption("--fuzz-inputs") // 100)


def test_every_answer_is_documented(byte_tokenizer: Any, tmp_path: Path, examples: int) -> None:
    with serve(byte_tokenizer, EchoScheduler(step_seconds=0.0), max_context_tokens=64) as server:
        command = [
            str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json", "--checks", CHECKS,
            "--max-examples", str(examples), "--seed", "1", "--no-color", "--phases", "examples,coverage,fuzzing",
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
