"""The comparison that is made for H200s, run against the demo on the embedded engine: the same API and the same metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_comparison_runs_against_the_demo(tmp_path: Path) -> None:
    sizes = ["--batches", "1,2", "--prompts", "2", "--tokens", "12"]
    run = subprocess.run(
        [
            sys.executable,
            "tests/h200/compare.py",
            str(tmp_path),
            *sizes,
            "--",
            "--model",
            "demo",
            "--footprints",
            "oracle",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    report = json.loads((tmp_path / "report.json").read_text()) if (tmp_path / "report.json").exists() else {}
    verdicts = {verdict["name"]: verdict["ok"] for verdict in report.get("verdicts", [])}
    assert verdicts.get("losslessness of EcoSpec") and verdicts["losslessness of EAGLE-3"], run.stdout + run.stderr
    assert len(report["figures"]) == 6 and all(row["ms_per_token"] > 0 for row in report["figures"])
    assert all(row["experts_per_layer_step"] >= 4 for row in report["figures"])
