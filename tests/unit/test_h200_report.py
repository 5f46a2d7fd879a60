"""What the comparison on H200s makes of its figures, and how it reads the profiler's file."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "h200"))

import compare  # noqa: E402
import dram  # noqa: E402
from compare import Answer, Difference, Figures, differ, judge, load_prompts  # noqa: E402

INFO = {"none": {}, "likelihood": {}, "ecospec": {}}
GOOD = {
    ("none", 1): Figures(80, 12, None, None, None),
    ("likelihood", 1): Figures(100, 10, 2.5, 30.0, None),
    ("ecospec", 1): Figures(120, 8, 2.4, 25.0, None),
}


def words(figures: dict[Any, Figures], differences: list[Difference], infos: Any = INFO) -> dict[str, bool | None]:
    return {v.name: v.ok for v in judge(infos, figures, differences, 0.25, "nsys is not installed")}


def test_a_good_run_passes_and_says_what_was_not_measured() -> None:
    found = words(GOOD, [Difference("ecospec", 1, 3, 50, 0.1)])
    assert found.pop("bytes by profiler") is None
    assert all(found.values()) and "losslessness of EcoSpec" in found


@pytest.mark.parametrize(
    ("figures", "differences", "wrong"),
    [
        (GOOD, [Difference("ecospec", 1, 3, 50, 0.3)], "losslessness of EcoSpec"),
        (GOOD, [Difference("likelihood", 1, 3, 50, None)], "losslessness of EAGLE-3"),
        (GOOD | {("ecospec", 1): Figures(1, 1, 2.4, 31.0, None)}, [], "distinct experts"),
        (GOOD | {("ecospec", 1): Figures(1, 1, 2.4, None, None)}, [], "distinct experts"),
        (GOOD | {("ecospec", 1): Figures(1, 1, 1.0, 25.0, None)}, [], "acceptance length of EcoSpec"),
        (GOOD | {("likelihood", 1): Figures(1, 1, None, 30.0, None)}, [], "acceptance length of EAGLE-3"),
    ],
)
def test_each_fault_is_named(figures: dict[Any, Figures], differences: list[Difference], wrong: str) -> None:
    assert [name for name, ok in words(figures, differences).items() if ok is False] == [wrong]


def test_an_engine_that_serves_without_the_plug_in_is_wrong() -> None:
    modes = {"none": None, "likelihood": "stock", "ecospec": "graph"}
    infos = {name: {"engine": "tensorrt-llm", "selection": mode} for name, mode in modes.items()}
    assert words(GOOD, [], infos)["node selection"] is True
    infos["ecospec"]["selection"] = "stock"
    assert words(GOOD, [], infos)["node selection"] is False


def test_the_first_other_token_is_looked_up_in_plain_decoding() -> None:
    asked = []

    def complete(**body: Any) -> dict[str, Any]:
        asked.append(body["prompt"])
        shown = [(7, -0.7), (9, -0.9), (7, -0.7)]
        return {"choices": [{"token_ids": [t], "logprobs": {"token_logprobs": [n]}} for t, n in shown]}

    plain: Any = SimpleNamespace(complete=complete)
    theirs = Answer((1, 2), (5, 7, 8))
    answers = {
        ("none", 1): [theirs] * 3,
        ("ecospec", 1): [theirs, Answer((1, 2), (5, 9, 8)), Answer((1, 2), (5, 3, 8))],
    }
    found = differ(plain, "ecospec", 1, answers)
    assert [(d.prompt, d.position) for d in found] == [(1, 1), (2, 1)]
    assert found[0].gap == pytest.approx(0.2) and found[1].gap is None
    assert asked[0] == [1, 2, 5]


def test_the_report_has_every_policy_and_batch(tmp_path: Path) -> None:
    verdicts = judge(INFO, GOOD, [], 0.25, "nsys is not installed")
    compare.write(tmp_path, INFO, GOOD, [], verdicts)
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | EcoSpec | 120.00 | 8.00 | 1.50 | 2.40 | 25.00 | - |" in text
    assert "not measured: bytes by profiler: nsys is not installed" in text
    assert len(json.loads((tmp_path / "report.json").read_text())["figures"]) == 3


def test_prompts_come_from_all_families_in_turn() -> None:
    prompts = load_prompts(30)
    assert len(prompts) == 30 and len(set(prompts[:8])) == 8


def test_bytes_are_the_mean_share_of_the_peak_over_the_time(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE GPU_METRICS (timestamp INT, typeId INT, metricId INT, value INT);"
            "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INT, metricId INT, metricName TEXT);"
            "CREATE TABLE TARGET_INFO_GPU (memoryBandwidth INT);"
            "INSERT INTO TARGET_INFO_GPU VALUES (4000000000000);"
        )
        for gpu in (10, 11):
            connection.execute(
                "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, 1, 'DRAM Read Bandwidth [Throughput %]')", (gpu,)
            )
            connection.execute(
                "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (?, 2, 'DRAM Write Bandwidth [Throughput %]')", (gpu,)
            )
            for at, share in ((0, 40), (10**9, 60), (2 * 10**9, 50)):
                connection.execute("INSERT INTO GPU_METRICS VALUES (?, ?, 1, ?)", (at, gpu, share))
                connection.execute("INSERT INTO GPU_METRICS VALUES (?, ?, 2, 99)", (at, gpu))
    connection.close()
    assert dram.bytes_read(path) == pytest.approx(2 * 2 * 0.5 * 4e12)


def test_without_a_profiler_the_work_is_done_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram.shutil, "which", lambda _: None)
    sampler = dram.Sampler(tmp_path)
    assert sampler.during(lambda: 5, "x") == (5, None) and sampler.problem == "nsys is not installed"


RUN = Path(__file__).resolve().parents[1] / "h200" / "run.sh"


@pytest.mark.parametrize(
    ("doctor", "code", "last"),
    [
        ("ok      GPUs: 8", 0, "compare.py OUT --tokens 8 -- --engine tensorrt-llm --model M"),
        ("FAILED  GPUs: 0", 1, "FAIL"),
    ],
)
def test_the_one_command_asks_the_doctor_first(tmp_path: Path, doctor: str, code: int, last: str) -> None:
    """With a stand-in for Python that says what it was called with."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(f'#!/bin/sh\ncase "$*" in *doctor*) echo "{doctor}";; *) echo "$@";; esac\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "COMPARE": "--tokens 8"}
    run = subprocess.run(["sh", RUN, out, "--model", "M"], env=environment, capture_output=True, text=True)
    assert run.returncode == code and last.replace("OUT", str(out)) in run.stdout.splitlines()[-1]
    assert (out / "doctor.txt").read_text().strip() == doctor
    usage = subprocess.run(["sh", RUN], capture_output=True, text=True)
    assert usage.returncode == 2 and usage.stderr.startswith("usage: tests/h200/run.sh OUT --model MODEL")
