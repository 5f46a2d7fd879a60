"""A small run of the losslessness check; `make losslessness` runs all of it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_policy_and_batch_gives_the_dense_models_text() -> None:
    run = subprocess.run(
        [sys.executable, "benchmarks/losslessness.py", "--prompts", "4", "--tokens", "24"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line for line in run.stdout.splitlines() if "equal" in line]
    assert len(lines) == 28 and all("0 different" in line for line in lines)
