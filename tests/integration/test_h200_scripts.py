"""The scripts for H200s against a stand-in executor over HTTP: what they ask, and what they make of the answers."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from api_server import serve
from stand_in_llm import SamplingParams, StandInLlm

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.engine.tensorrt_llm.backend import BackendLimits, TensorRtBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "h200"))

import compare  # noqa: E402
import schedule  # noqa: E402
import served  # noqa: E402

EXPERTS = {"likelihood": 7, "ecospec": 5, "none": 4}
Serving = Callable[[Sequence[str], Path], contextlib.AbstractContextManager[served.Server]]


@pytest.fixture
def serving(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """In the place of a server with the options, one of this process; drafts and experts follow from them."""
    monkeypatch.setattr(served, "SETTLE_SECONDS", 0.3)

    @contextlib.contextmanager
    def in_process(options: Sequence[str], log: Path) -> Iterator[served.Server]:
        chosen = dict(zip(options[::2], options[1::2], strict=True))
        policy = chosen["--policy"]
        nodes = 0 if policy == "none" else int(chosen.get("--gamma", 4))
        ledger = Ledger()
        backend = TensorRtBackend(
            StandInLlm(8, 0.002, nodes),
            SamplingParams,
            BackendLimits(8, 64, 4096, len(byte_tokenizer), nodes),
            ledger,
            lambda: ledger.observe_distinct_experts([EXPERTS[policy]] * 2),
        )
        with serve(byte_tokenizer, backend, ledger=ledger) as running:
            ledger.bind(lambda: backend.running, lambda: backend.waiting)
            yield served.Server(running.url)

    return in_process


def test_the_comparison(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "serving", serving)
    sizes = ["--batches", "1,2", "--prompts", "2", "--tokens", "12"]
    assert compare.main([str(tmp_path), *sizes, "--", "--model", "m"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {v["name"]: v["ok"] for v in report["verdicts"]} == {
        "losslessness of EAGLE-3": True,
        "losslessness of EcoSpec": True,
        "acceptance length of EAGLE-3": True,
        "acceptance length of EcoSpec": True,
        "distinct experts": True,
        "bytes by profiler": None,
    }
    found = {(row["policy"], row["batch"]): row for row in report["figures"]}
    assert len(found) == 6 and all(row["ms_per_token"] > 0 for row in found.values())
    for (policy, _), row in found.items():
        assert row["experts_per_layer_step"] == EXPERTS[policy]
        assert (row["acceptance_length"] is None) == (policy == "none")


def test_the_schedule_of_draft_lengths(serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def lengths(*arguments: Any, **shortest: int) -> list[int]:
        found.append((*arguments, shortest))
        return [2] * arguments[0]

    monkeypatch.setattr(schedule, "serving", serving)
    monkeypatch.setattr(schedule, "best_lengths", lengths)
    out = tmp_path / "lengths.json"
    options = [
        str(out),
        "--longest",
        "2",
        "--batches",
        "2",
        "--tokens",
        "20",
        "--",
        "--model",
        "m",
        "--drafter",
        "mtp",
    ]
    assert schedule.main(options) == 0
    assert json.loads(out.read_text()) == {"2": 2}
    (most, acceptance, cost, longest, shortest) = found[1]
    assert shortest == {"shortest": 1} and found[0][0] == 1
    assert (most, longest) == (2, 2) and all(cost(requests, n) > 0 for requests in (1, 2) for n in range(3))
    assert acceptance == pytest.approx([0.64, 0.55], abs=0.12)  # of drafts 0, 1, 2, 0, ... one or more, and both


def test_a_server_that_does_not_start_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "SERVE", (sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"))
    with pytest.raises(RuntimeError, match="ended with 3; .* ends with: no GPU"), served.serving([], tmp_path / "log"):
        pass
