"""`python -m ecospec_predictor.cli serve` as a process: wrong settings, a taken port, a clean stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PREFIX = "ECOSPEC_PREDICTOR_SERVICE_"


def serve(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ecospec_predictor.cli", "serve", *options],
        env={**os.environ, **{PREFIX + name: value for name, value in variables.items()}},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "model").mkdir()
    (tmp_path / "table.gguf").write_bytes(b"nothing")
    return "--model-dir", str(tmp_path / "model"), "--embeddings", str(tmp_path / "table.gguf")


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (("--port", "99999"), {}, ("port", "'99999'", "1 to 65535")),
        ((), {"MAX_TREES": "many"}, ("max_trees", "'many'", "1 to 4096")),
        ((), {"MAX_TRES": "3"}, ("MAX_TRES", "'3'", "max_trees")),
        (("--address", "nowhere"), {}, ("address", "'nowhere'", "host:port")),
        (("--grace-seconds", "nan"), {}, ("grace_seconds", "'nan'", "0 to 3600")),
        (("--model-dir", "missing"), {}, ("model_dir", "'missing'", "directory")),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_exit_code_2(
    files: tuple[str, ...], options: tuple[str, ...], variables: dict[str, str], words: tuple[str, ...]
) -> None:
    ended = serve(*files, *options, **variables)
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def test_options_win_over_the_environment_and_a_taken_port_is_one_sentence(files: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve(*files, "--port", port, PORT="1")
        assert ended.returncode == 1 and f"127.0.0.1:{port}" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        ended = serve(*files, "--address", f"127.0.0.1:{port}")
        assert ended.returncode == 1 and f"127.0.0.1:{port}" in ended.stderr


def test_a_directory_without_a_model_is_one_sentence(files: tuple[str, ...]) -> None:
    ended = serve(*files, "--port", "0", "--metrics-port", "0")
    assert ended.returncode == 1 and ended.stdout == ""
    assert "config.json" in ended.stderr and len(ended.stderr.splitlines()) == 1, ended.stderr


SERVER = """
import sys
sys.path[:0] = [{support!r}]
from ecospec_predictor.server import run
from ecospec_predictor.settings import Settings
from fake_expert_model import FakeExpertModel
run(Settings(model_dir=".", port=0, metrics_port=0), lambda *_: FakeExpertModel())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_line_when_ready_and_a_clean_stop(number: signal.Signals) -> None:
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", SERVER.format(support=support)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "ready on 127.0.0.1:" in line
    process.send_signal(number)
    rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest, errors) == (0, "", "")
