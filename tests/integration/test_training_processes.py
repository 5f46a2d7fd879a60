"""Training by several processes under torchrun equals training by one with all their windows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tiny_traces import write_run_inputs

from ecospec_predictor.training.config import load_config
from ecospec_predictor.training.loop import train

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def two_processes(config: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ecospec_predictor.cli", "train", str(config), *arguments]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("held out: ") == 1  # one process speaks


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return torch.load(directory / "checkpoint.pt", weights_only=True)["weights"]


def test_a_run_that_two_processes_resume_equals_that_of_one(tmp_path: Path) -> None:
    config = write_run_inputs(tmp_path, drafts=True)
    train(load_config(config, ("training.batch_windows=16", "training.epochs=1")), "c")
    shutil.copytree(tmp_path / "run", tmp_path / "one")
    both = ("training.epochs=2", "training.evaluate_every_steps=8")
    train(load_config(config, (f"out={tmp_path}/one", "training.batch_windows=16", *both)), "c", resume=True)
    two_processes(config, "--resume", *(word for override in both for word in ("--set", override)))
    one, two = weights(tmp_path / "one"), weights(tmp_path / "run")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)
    assert (tmp_path / "one/best/model.safetensors").stat().st_size == (
        tmp_path / "run/best/model.safetensors"
    ).stat().st_size
    lines = [(tmp_path / name / "progress.jsonl").read_text().splitlines()[-1] for name in ("one", "run")]
    first, second = (json.loads(line)["held_out_top_k_accuracy"] for line in lines)
    assert abs(first - second) < 0.01
