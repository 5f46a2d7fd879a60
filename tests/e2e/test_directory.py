"""A model of one's own, from a directory, as a user serves it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_checkpoints import save_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Any) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe"
    save_tiny("qwen3_moe", directory, vocab_size=258)
    byte_tokenizer.save_pretrained(directory)
    return directory


def command(model: Path, *options: str) -> list[str]:
    start = [sys.executable, "-m", "ecospec_orchestrator.cli", "serve", "--model", str(model), "--footprints", "none"]
    return [*start, "--max-context-tokens", "256", *options]


def refusal(*arguments: str) -> str:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_directory_is_served_with_what_it_costs(model: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command(model, "--port", str(port), "--profile-seconds", "2"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        told = (tmp_path / "log").read_text()
        assert "EcoSpec is ready" in line, told
        assert "3 MoE layers of 8 experts, top-2" in told and "NgramDrafter" in told
        assert "device: c" in told and "100% of" in told  # weights are read with a bar
        assert "ecospec-orchestrator profile" in told  # there is no cost profile yet, and what to do
        assert "measuring for 2 s" in told and "profiling: " in told  # which is done before it is ready
        assert len(list(tmp_path.glob("ecospec/profile-*.json"))) == 1
        url = f"http://127.0.0.1:{port}/v1"
        assert httpx.get(f"{url}/models").json()["data"][0]["id"] == "tiny-qwen3-moe"
        body = {"prompt": "abcabcabcabc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()
        log.close()


def test_what_cannot_be_served_is_refused_in_one_sentence(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        cut = len(content) // 2 if file.name == "model-00002-of-00002.safetensors" else len(content)
        (broken / file.name).write_bytes(content[:cut])
    message = refusal(*command(broken))
    assert "model-00002-of-00002.safetensors is truncated: tensor" in message and message.count("\n") <= 3
    assert "Setting device is 'cuda:99', but torch" in refusal(*command(model, "--device", "cuda:99"))
    assert "is not a directory" in refusal(*command(tmp_path / "nowhere"))
    assert "needs" in refusal(*command(model, "--max-context-tokens", "4096", "--kv-cache-mib", "1"))
    assert "MTP drafting is there for 'deepseek_v3'" in refusal(*command(model, "--drafter", "mtp"))
