"""`ecospec-predictor collect --from ecospec` against a real HTTP server around the real scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from api_server import Running, serve
from fake_engine import ChainEngine, experts_of, greedy
from scheduler_harness import POLICIES, Harness

from ecospec_predictor.cli import main
from ecospec_proto.traces import TraceReader

GEOMETRY = ChainEngine.geometry


@pytest.fixture
def make(byte_tokenizer: Any) -> Iterator[Any]:
    open_servers: list[Any] = []

    def start(policy: str = "likelihood", geometry: bool = True, **options: Any) -> Running:
        harness = Harness(policy, **{"max_context_tokens": 64, **options})
        scheduler: Any = harness.scheduler
        keys = {"api_keys": "secret"} if options.get("max_running") == 1 else {}
        context = serve(byte_tokenizer, scheduler, max_context_tokens=64, **keys)
        running = context.__enter__()
        open_servers.append(context)
        if geometry:
            told = {"geometry": asdict(GEOMETRY), "fingerprint": GEOMETRY.fingerprint}
            running.app.state.service.info |= told
        return running

    yield start
    for context in open_servers:
        context.__exit__(None, None, None)


def prompt(number: int) -> list[int]:
    return [1 + number % 20, number // 20 + 1]


def write_prompts(path: Path, count: int) -> Path:
    lines = [{"prompt": prompt(i), "domain": "code"} if i % 2 else {"prompt": prompt(i)} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(server: Running, prompts: Path, out: Path, *more: str) -> list[str]:
    return ["collect", "--from", "ecospec", "--url", server.url, "--prompts", str(prompts), "--out", str(out), *more]


@pytest.mark.parametrize("policy", [name for name in POLICIES if "," not in name])
def test_prompts_become_a_trace_with_rejected_drafts(make: Any, tmp_path: Path, policy: str) -> None:
    server = make(policy)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 9)
    more = ("--max-tokens", "12", "--temperature", "0", "--domain", "chat", "--concurrency", "3")
    assert main(arguments(server, prompts, tmp_path / "out", *more)) == 0
    reader = TraceReader(tmp_path / "out", GEOMETRY)
    assert reader.sources == ("ecospec",) and len(reader) == 9
    found = {tuple(d.tokens[d.accepted].tolist()): d for d in reader}
    for i in range(9):
        document = found[(*prompt(i), *greedy(prompt(i), 12))]
        assert document.domain == ("code" if i % 2 else "chat")
        for token, routes in zip(document.tokens[:-1].tolist(), document.routes, strict=False):
            assert (routes == experts_of(token)).all()
    assert any(not d.accepted.all() for d in found.values()) == (policy != "none")


def test_a_busy_server_with_a_key_is_waited_for_and_a_second_run_asks_for_nothing(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make(max_running=1, max_waiting=1)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    command = arguments(server, prompts, tmp_path / "out", "--max-tokens", "20", "--concurrency", "4")
    assert main(command) == 1
    assert "401" in capsys.readouterr().err
    monkeypatch.setenv("ECOSPEC_API_KEY", "secret")
    assert main([*command, "--limit", "5"]) == 0
    assert main(command) == 0
    assert "3 texts" in (said := capsys.readouterr().out) and "5 were there already" in said
    steps = server.scheduler.ledger.registry.get_sample_value("ecospec_steps_total")
    assert main(command) == 0
    assert "0 texts" in capsys.readouterr().out
    assert server.scheduler.ledger.registry.get_sample_value("ecospec_steps_total") == steps
    assert len(TraceReader(tmp_path / "out")) == 8


def test_a_collection_that_was_terminated_goes_on(make: Any, tmp_path: Path) -> None:
    server, out = make(), tmp_path / "out"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 80)
    command = arguments(server, prompts, out, "--max-tokens", "30", "--max-shard-tokens", "100", "--concurrency", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "ecospec_predictor.cli", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while not list(out.glob("shard-*.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130 and b"run the same command again" in told and b"Traceback" not in told
    before = len(TraceReader(out))
    assert 0 < before < 80
    assert main(command) == 0
    assert len(TraceReader(out, GEOMETRY)) == 80


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": [3]}\n{"text": "x"}\n', "line 2 is no prompt: it has the fields text"),
        ('{"prompt": [3], "messages": []}\n', "line 1 is no prompt"),
        ("3\n", "line 1 is no prompt"),
        ('{"prompt"\n', "line 1 is no prompt"),
    ],
)
def test_a_broken_prompt_file_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    command = ["collect", "--from", "ecospec", "--url", "http://127.0.0.1:9", "--prompts", str(path)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err


def test_servers_that_cannot_be_used_are_named(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    server = make(geometry=False)
    assert main(arguments(server, prompts, tmp_path / "out")) == 1
    assert "does not tell its target's geometry" in capsys.readouterr().err
    server.app.state.service.info |= {"geometry": asdict(GEOMETRY), "fingerprint": "0" * 32}
    assert main(arguments(server, prompts, tmp_path / "out")) == 1
    assert "fingerprint is not that of its geometry" in capsys.readouterr().err
    server.app.state.service.info["fingerprint"] = GEOMETRY.fingerprint
    assert main(arguments(server, prompts, tmp_path / "out", "--max-tokens", "5000")) == 1
    assert "400" in (told := capsys.readouterr().err) and "context" in told
    monkeypatch.setattr("ecospec_predictor.collect.live.TRIES", 2)
    command = arguments(server, prompts, tmp_path / "out")
    command[command.index(server.url)] = "http://127.0.0.1:9"
    assert main(command) == 1
    assert "GET http://127.0.0.1:9/v1/models failed: ConnectError" in capsys.readouterr().err
    command[command.index("http://127.0.0.1:9")] = "localhost:8000"
    assert main(command) == 2
    assert "--url is 'localhost:8000'" in capsys.readouterr().err


def test_an_answer_too_large_is_refused(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecospec_predictor.collect.live.MAX_ANSWER_BYTES", 1500)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    assert main(arguments(make(), prompts, tmp_path / "out", "--max-tokens", "60")) == 1
    assert "more than 1500 bytes" in capsys.readouterr().err
