"""The doctor: its reading of nvidia-smi, its verdicts, and a whole run where nothing is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published_configs import QWEN3_235B

from ecospec_orchestrator import cli
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.tensorrt_llm import doctor
from ecospec_orchestrator.engine.tensorrt_llm.doctor import (
    Gpu,
    gpu_check,
    memory_check,
    parse_gpus,
    tree_check,
    visible,
)
from ecospec_orchestrator.engine.tensorrt_llm.facts import facts_of
from ecospec_orchestrator.engine.tensorrt_llm.launcher import plan_launch
from ecospec_orchestrator.engine.tensorrt_llm.plugin import signatures
from ecospec_orchestrator.engine.tensorrt_llm.plugin.signatures import UnsupportedVersionError
from ecospec_orchestrator.settings import load_settings

SMI = "0, NVIDIA H200, 143771, 143100, 9.0\n1, NVIDIA H200, 143771, 143100, 9.0\n"
H200 = Gpu(0, "NVIDIA H200", 143_771 << 20, 143_100 << 20, 9.0)


def test_what_nvidia_smi_says() -> None:
    assert parse_gpus(SMI) == [H200, replace(H200, index=1)]
    assert parse_gpus("\n") == []
    with pytest.raises(SettingsError, match=r"'0, NVIDIA H200, \[N/A\]"):
        parse_gpus("0, NVIDIA H200, [N/A], 1, 9.0")


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "7"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, [0, 1]),
    ],
)
def test_visible_gpus(environment: dict[str, str], indices: list[int]) -> None:
    assert [gpu.index for gpu in visible([replace(H200, index=i) for i in range(3)], environment)] == indices


def test_gpus_must_be_enough_and_alike() -> None:
    assert gpu_check([H200] * 8, 8).verdict == "ok"
    assert gpu_check([H200] * 7, 8).verdict == "FAILED"
    assert gpu_check([H200] * 8, 16, other_nodes=True).verdict == "warning"
    assert gpu_check([H200] * 16, 16, other_nodes=True).verdict == "ok"
    assert gpu_check([], 16, other_nodes=True).verdict == "FAILED"
    assert gpu_check([H200, replace(H200, name="NVIDIA H100")], 2).verdict == "warning"
    assert gpu_check([H200, replace(H200, name="NVIDIA H100")], 1).verdict == "ok"


@pytest.mark.parametrize(
    ("weights", "gpu", "context", "verdict", "says"),
    [
        (470_000_000_000, H200, 32768, "ok", "58.8 GB of weights"),
        (470_000_000_000, H200, 1_000_000, "warning", "fewer will run"),
        (2_000_000_000_000, H200, 2048, "FAILED", "needs 258"),
        (470_000_000_000, replace(H200, free_bytes=20 << 30), 2048, "FAILED", "end what else runs"),
        (0, H200, 2048, "warning", "not known"),
    ],
)
def test_memory(weights: int, gpu: Gpu, context: int, verdict: str, says: str) -> None:
    settings = load_settings(
        {"engine": "tensorrt-llm", "model": "m", "policy": "none", "max_context_tokens": context}, {}
    )
    longer = {**QWEN3_235B, "max_position_embeddings": 2_000_000}  # one case asks for a million
    facts = facts_of(longer, "qwen3", weights)
    check = memory_check(settings, facts, plan_launch(settings, facts), [gpu] * 8)
    assert check.verdict == verdict and says in check.detail, check


def test_blackwell_has_no_trees() -> None:
    assert tree_check([H200]).verdict == "ok"
    assert tree_check([replace(H200, capability=10.0)]).verdict == "FAILED"


def test_a_run_where_nothing_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_235B))
    monkeypatch.setattr(doctor, "NVIDIA_SMI", ("no-such-program",))
    assert cli.main(["doctor", "--engine", "tensorrt-llm", "--model", str(tmp_path)]) == 1
    lines = {line[8:].split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["python"].startswith("ok") and "no tensorrt-llm" in lines["python"]
    assert lines["TensorRT-LLM"].startswith("FAILED")
    assert "128 experts" in lines["model and settings"]
    assert lines["GPUs"].startswith("FAILED") and "nvidia-smi is not there" in lines["GPUs"]
    assert "memory" not in lines, "without GPUs there is nothing to compare with"


def test_all_is_well_on_eight_h200s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_235B))
    (tmp_path / "head").mkdir()
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 470_000_000_000}, "weight_map": {"a": "model-1.safetensors"}})
    )
    smi = "".join(f"{i}, NVIDIA H200, 143771, 143100, 9.0\n" for i in range(8))
    monkeypatch.setattr(doctor, "_ask_gpus", lambda: smi)
    monkeypatch.setattr(doctor, "_installed", lambda: doctor.Check("TensorRT-LLM", "ok", "there"))
    monkeypatch.setattr(doctor, "_signatures", lambda: doctor.Check("signatures", "ok", "as they should be"))
    monkeypatch.setattr(doctor, "_shared_memory", lambda: doctor.Check("shared memory", "ok", "enough"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"--model": tmp_path, "--drafter": tmp_path / "head", "--predictor-address": "127.0.0.1:9"}
    arguments = [str(part) for pair in options.items() for part in pair]
    assert cli.main(["doctor", "--engine", "tensorrt-llm", *arguments]) == 1
    assert "FAILED  token table: Setting token_table is missing" in capsys.readouterr().out
    arguments += ["--cuda-graphs", "false"]
    assert cli.main(["doctor", "--engine", "tensorrt-llm", *arguments]) == 0
    lines = {line[8:].split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["memory"].startswith("ok") and lines["draft trees"].startswith("ok")
    assert lines["predictor"].startswith("warning"), "nobody listens, and drafts go on without it"


def test_signatures_that_differ_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "TensorRT-LLM is not installed" in doctor._signatures().detail

    def differ() -> str:
        raise UnsupportedVersionError("It differs: a and 1 more.", ["a.", "b."])

    monkeypatch.setattr(signatures, "require_supported", differ)
    assert doctor._signatures() == doctor.Check("signatures", "FAILED", "It differs: a and 1 more. b.")
    monkeypatch.setattr(signatures, "require_supported", lambda: "1.2.3")
    assert doctor._signatures().verdict == "ok"


def test_ray_is_looked_for_where_it_is_to_run_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_SMI", ("no-such-program",))
    for executor in ("mpi", "ray"):
        arguments = ["--engine", "tensorrt-llm", "--model", str(tmp_path), "--distributed-executor", executor]
        assert cli.main(["doctor", *arguments]) == 1
        assert ("FAILED  Ray: it is not installed" in capsys.readouterr().out) == (executor == "ray")


def test_the_embedded_engine_needs_no_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 2
    assert "--engine tensorrt-llm" in capsys.readouterr().err
    for command in ("demo", "profile"):
        assert cli.main([command, "--engine", "tensorrt-llm"]) == 2
        assert f"command {command} is for engine torch only" in capsys.readouterr().err
