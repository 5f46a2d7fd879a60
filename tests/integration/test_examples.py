"""Everything in examples/ runs against a live server, as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import MODEL, Running, serve
from byte_engine import byte_scheduler
from programs import require

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "completions.py": "24 written",
    "chat.py": "drafts were accepted",
    "asynchronous.py": "refused, as it should be: Field 'temperature' is 9",
    "tools.py": "weather({'city': ",
    "json_schema.py": "Review(sentiment=",
    "curl.sh": '{"prompt":',
}


@pytest.fixture(scope="module")
def server(byte_tokenizer: Any) -> Iterator[Running]:
    with serve(byte_tokenizer, byte_scheduler("ecospec"), api_keys="right") as running:
        yield running


def run(name: str, url: str, key: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable] if name.endswith(".py") else []
    outside = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment = {**outside, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    return subprocess.run([*program, str(EXAMPLES / name)], env=environment, capture_output=True, text=True, timeout=60)


def test_none_is_left_out() -> None:
    assert set(SAYS) == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(server: Running, name: str) -> None:
    if name.endswith(".sh"):
        require("curl", "curl")
    done = run(name, server.url, "right")
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS[name] in done.stdout
    if name == "curl.sh":
        assert f'"id":"{MODEL}"' in done.stdout and done.stdout.count("data: ") > 2 and '\\"wet\\":' in done.stdout


def test_an_example_shows_a_refusal(server: Running) -> None:
    done = run("chat.py", server.url, "wrong")
    assert done.returncode != 0 and "AuthenticationError" in done.stderr
