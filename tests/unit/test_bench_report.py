"""The benchmark's bookkeeping: what is paired with what, what is resumed, what the report says. Nothing is measured."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ecospec_orchestrator.core import ROOT as TREE_ROOT
from ecospec_orchestrator.core import BytesRead, Decision, DraftTree, StepReport

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("bench", "cases", "families", "harness", "pictures", "records", "report")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench
    import cases
    import families
    import records
    import report

    yield SimpleNamespace(bench=bench, cases=cases, families=families, records=records, report=report)
    for name in MODULES:
        sys.modules.pop(name, None)


def step(emitted: int, seconds: float, **changes: Any) -> StepReport:
    made = StepReport(
        requests=1,
        nodes=4,
        speculated=True,
        accepted=(emitted - 1,),
        sent=(4,),
        emitted=emitted,
        distinct_experts=np.array([4, 6]),
        bytes_read=BytesRead(experts=100, head=20),
        bytes_upper_bound=200,
        bytes_autoregressive=150.0,
        predicted_actual_overlap=None,
        draft_seconds=0.1 * seconds,
        predict_seconds=0.2 * seconds,
        select_seconds=0.05 * seconds,
        verify_seconds=0.65 * seconds,
        step_seconds=seconds,
    )
    return replace(made, **changes)


def header(cells: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    case = {"gamma": 0, "ablation": None, "time_excludes_prediction": False}
    cases = {
        "ar": {**case, "label": "AR", "policy": "none"},
        "ecospec_g2": {**case, "label": "EcoSpec g2", "policy": "ecospec", "gamma": 2},
        "ecospec_g4": {**case, "label": "EcoSpec g4", "policy": "ecospec", "gamma": 4},
        "goodput": {**case, "label": "goodput", "policy": "goodput"},
        "ecospec_g4_oracle": {
            **case,
            "label": "EcoSpec g4",
            "policy": "ecospec",
            "gamma": 4,
            "ablation": "oracle experts",
            "time_excludes_prediction": True,
        },
    }
    known = {"command": "c", "target": "t", "target_revision": "r", "machine": "m", "revision": "v", "tokens": 8}
    return {"hash": "h", "cells": cells, "cases": cases, "sources": {"code": "ours"}, **known, **changes}


def cell(family: str, cases: tuple[str, ...], groups: int = 2, **changes: Any) -> dict[str, Any]:
    runs = [["ar", 0], ["ar", 1], *([case, 0] for case in cases)]
    made = {"family": family, "batch": 1, "temperature": 0.0, "groups": groups, "runs": runs, "ablation": None}
    return {**made, **changes}


def record(sums: Any, at: dict[str, Any], group: int, case: str, repeat: int = 0) -> dict[str, Any]:
    """As it comes out of the file."""
    where = {name: at[name] for name in ("family", "batch", "temperature")}
    return json.loads(json.dumps({**where, "group": group, "case": case, "repeat": repeat, "sums": asdict(sums)}))


def records_of(modules: Any, at: dict[str, Any], speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """speeds: tokens per second by case (of "ar" and "ar 1" for its two runs) and group; every run lasts a second."""
    found = []
    for name, values in speeds.items():
        case, _, repeat = name.partition(" ")
        for group, value in enumerate(values):
            sums = modules.records.RunSums.of([step(int(value), 1.0)])
            found.append(record(sums, at, group, case, int(repeat or 0)))
    return found


def test_sums_of_steps_by_hand(modules: Any) -> None:
    RunSums = modules.records.RunSums
    said = Decision("goodput", None, True, "asked", 2.0, 1.5)
    quiet = Decision("goodput", "drafting_does_not_pay", expected_seconds=0.5)
    none = step(1, 1.0, speculated=False, nodes=0, sent=(0,), accepted=(0,), decision=quiet)
    first = RunSums.of([step(3, 2.0, decision=said, predicted_actual_overlap=(8, 8, 6)), none])
    assert (first.steps, first.requests, first.emitted, first.nodes, first.probes) == (2, 2, 4, 4, 1)
    assert first.speed == pytest.approx(4 / 3)
    assert first.experts == 10.0
    assert first.accepted == [1, 0, 1]
    assert first.not_speculated == {"drafting_does_not_pay": 1}
    assert first.step_time_errors == [-0.25, -0.5]
    assert first.bytes_read["experts"] == 200
    assert RunSums.of([step(3, 2.0)], time_excludes_prediction=True).seconds == pytest.approx(1.6)
    assert RunSums.of([step(3, 2.0)], time_excludes_prediction=True).predict_seconds == 0
    second = RunSums.of([step(4, 1.0, predicted_actual_overlap=(4, 4, 1))])
    both = RunSums.total([first, second])
    assert both.accepted == [1, 0, 1, 1]
    assert both.overlap == [12, 12, 7]
    assert both.seconds == pytest.approx(4.0)
    assert both.bytes_read["head"] == 60
    assert both.step_time_errors == [-0.25, -0.5]


def test_ratios_are_taken_group_by_group(modules: Any) -> None:
    at = cell("code", ("ecospec_g4",), groups=3)
    speeds = {"ar": [10, 20, 30], "ar 1": [10, 24, 27], "ecospec_g4": [15, 22, 57]}
    rows = modules.records.bench_rows(header([at]), records_of(modules, at, speeds))
    by = {(r["family"], r["case"]): r for r in rows}
    # AR's two runs together: 20 tokens in 2 s, 44 in 2 s, 57 in 2 s
    ours = by["code", "ecospec_g4"]
    assert ours["ratio_to_ar"]["median"] == pytest.approx(1.5)
    assert ours["ratio_to_ar"]["low"] == pytest.approx(1.0 + 0.2 * 0.5)
    assert ours["ratio_to_ar"]["high"] == pytest.approx(1.5 + 0.8 * 0.5)
    assert ours["group_tokens_per_second"] == [15, 22, 57]
    assert by["code", "ar"]["ratio_to_ar"] == {"median": 1, "low": 1, "high": 1}
    assert by["code", "ar_again"]["ratio_to_ar"]["median"] == 1.0
    assert by["code", "ar_again"]["ratio_to_ar"]["high"] == pytest.approx(1.0 + 0.8 * 0.2)
    assert by["all", "ecospec_g4"]["ratio_to_ar"] == ours["ratio_to_ar"]


def test_a_group_counts_when_all_of_its_runs_are_there(modules: Any) -> None:
    at = cell("code", ("ecospec_g4",))
    found = records_of(modules, at, {"ar": [10, 20], "ar 1": [10, 20], "ecospec_g4": [15]})
    rows = modules.records.bench_rows(header([at]), found)
    assert {r["groups"] for r in rows} == {1}
    without = [r for r in found if (r["case"], r["repeat"]) != ("ar", 1)]
    assert modules.records.bench_rows(header([at]), without) == []


def test_summary_by_hand(modules: Any) -> None:
    cases = ("ecospec_g2", "ecospec_g4", "goodput")
    code, chat = cell("code", cases), cell("chat", cases)
    hard = cell("random tokens", ("goodput",), ablation="adversarial text")
    found = records_of(
        modules,
        code,
        {"ar": [10, 10], "ar 1": [10, 11], "ecospec_g2": [12, 12], "ecospec_g4": [20, 20], "goodput": [20, 24]},
    )
    found += records_of(
        modules,
        chat,
        {"ar": [10, 10], "ar 1": [10, 10], "ecospec_g2": [10, 10], "ecospec_g4": [8, 8], "goodput": [9, 9]},
    )
    found += records_of(modules, hard, {"ar": [10, 10], "ar 1": [10, 10], "goodput": [9, 10]})
    rows = modules.records.bench_rows(header([code, chat, hard]), found)
    assert not [r for r in rows if r["family"] == "all" and r["ablation"]]
    assert next(r for r in rows if (r["family"], r["case"]) == ("all", "goodput"))["groups"] == 4
    figures = modules.report.summary(rows)
    best = figures["goodput_to_best_ecospec"]
    assert best["worst"] == {"family": "chat", "batch": 1, "temperature": 0.0, "against": "ecospec_g2", "ratio": 0.9}
    assert len(best["below_0.98"]) == 1
    assert best["geometric_mean"] == pytest.approx((0.9 * 1.1) ** 0.5)
    assert figures["goodput_to_ecospec_g4"]["geometric_mean"] == pytest.approx((9 / 8 * 1.1) ** 0.5)
    assert figures["goodput_to_ar"]["worst"]["family"] == "chat"
    assert figures["goodput_to_goodput_no_experts"] is None
    assert figures["ar_again_to_ar"]["max"] == pytest.approx(1.05)
    assert [(h["ablation"], h["ratio_to_ar"]["median"]) for h in figures["hard_conditions"]] == [
        ("adversarial text", pytest.approx(0.95))
    ]


def test_report_and_pictures_render(modules: Any, tmp_path: Path) -> None:
    at = cell("code", ("ecospec_g4", "goodput", "ecospec_g4_oracle"))
    one = {"ar": [10, 10], "ar 1": [10, 11], "ecospec_g4": [14, 16], "goodput": [15, 18], "ecospec_g4_oracle": [20, 20]}
    head = header([at])
    modules.bench.write_report(tmp_path, head, records_of(modules, at, one))
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert "| code | EcoSpec g4 | 15.0 | 1.46 (1.41 - 1.51) | 15.00 | 5.00 | 0 | 0 |" in text
    assert "| 1 | code | EcoSpec g4 | oracle experts | 1.95 (1.91 - 1.99)* | 1.34 |" in text
    assert "goodput / EcoSpec gamma 4: geometric mean 1.098 over 1 cells" in text
    assert "not finished" not in text
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert result["runs"] == result["runs_planned"] == 10
    for name in ("bench-batch.png", "bench-gamma.png", "bench-traffic.png"):
        assert name in text
        assert 0 < (tmp_path / name).stat().st_size < 150_000
    partial = records_of(modules, at, {key: values[:1] for key, values in one.items()})
    modules.bench.write_report(tmp_path, head, partial)
    assert "not finished" in (tmp_path / "bench.md").read_text(encoding="utf-8")


class FakeBoard:
    """Stands for the system: counts runs, and fails before the given one."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.bench, self.ran, self.fail_at = self, 0, fail_at

    def configure(self, case: Any) -> None:
        self.case = case

    def run(self, prompts: list[tuple[int, ...]], tokens: int, temperature: float) -> Any:
        if self.ran == self.fail_at:
            raise KeyboardInterrupt
        self.ran += 1
        return SimpleNamespace(steps=[step(2, 1.0)])


def test_resume_goes_on_without_duplicates(modules: Any, tmp_path: Path) -> None:
    path, said = tmp_path / "runs.jsonl", []
    cells = [modules.bench.Cell("code", 1, 0.0, 2, (("ar", 0), ("ar", 1), ("ecospec_g4", 0)))]
    prompts = {"code": [(1,), (2,)]}
    start = lambda head: modules.records.RunFile(path, head, said.append)
    with pytest.raises(KeyboardInterrupt):
        modules.bench.measure(FakeBoard(fail_at=4), cells, prompts, start({"hash": "a"}), 8, None)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"family": "code", "bat')  # the kill came in the middle of a line
    board = FakeBoard()
    assert modules.bench.measure(board, cells, prompts, start({"hash": "a"}), 8, None)
    assert board.ran == 2
    assert said == [f"going on after 4 runs in {path}"]
    head, records = modules.records.read_runs(path)
    keys = [modules.records.key_of(r) for r in records]
    assert head == {"hash": "a"}
    assert len(keys) == len(set(keys)) == 6
    assert {r["place"] for r in records} == {0, 1, 2}
    again = FakeBoard()
    assert modules.bench.measure(again, cells, prompts, start({"hash": "a"}), 8, None)
    assert again.ran == 0
    assert start({"hash": "b"}).records == []
    assert "starting afresh" in said[-1]
    assert len(modules.records.read_runs(tmp_path / "runs.jsonl.old")[1]) == 6


def test_time_limit_stops_and_can_go_on(modules: Any, tmp_path: Path) -> None:
    cells = [modules.bench.Cell("code", 1, 0.0, 1, (("ar", 0), ("ar", 1)))]
    file = modules.records.RunFile(tmp_path / "runs.jsonl", {"hash": "a"})
    assert not modules.bench.measure(FakeBoard(), cells, {"code": [(1,)]}, file, 8, 0.0)
    assert file.records == []
    assert modules.bench.measure(FakeBoard(), cells, {"code": [(1,)]}, file, 8, None)


def test_plan(modules: Any) -> None:
    every = list(modules.cases.ALL_CASES)
    args = argparse.Namespace(batches=[1, 8], temperatures=[0.0, 1.0], prompts_per_cell=2, cases=every)
    said: list[str] = []
    cells = modules.bench.plan(args, {"code": 8, "rag": 3, modules.families.ADVERSARIAL: 8}, said.append)
    assert [(c.family, c.batch, c.temperature, c.groups) for c in cells] == [
        ("code", 1, 0.0, 3),
        ("code", 1, 1.0, 3),
        ("code", 8, 0.0, 1),
        ("code", 8, 1.0, 1),
        ("rag", 1, 0.0, 3),
        ("rag", 1, 1.0, 3),
        (modules.families.ADVERSARIAL, 1, 0.0, 3),
    ]
    assert len(said) == 2
    names = [case for case, _ in cells[0].runs]
    assert names.count("ar") == names.count("goodput") == names.count("goodput_no_experts") == 3
    assert len(names) == len(every) + 6
    order = modules.bench.shuffled(cells[0].runs, random.Random(1))
    assert sorted(order) == sorted(cells[0].runs) and order != list(cells[0].runs)
    places = {run: at for at, run in enumerate(order)}
    for repeat in range(3):
        beside = [places[case, repeat] for case in ("ar", "goodput", "goodput_no_experts")]
        assert max(beside) - min(beside) == 2
    assert "ecospec_g4_oracle" not in [case for case, _ in cells[1].runs]
    assert cells[-1].ablation == "adversarial text"


def test_families(modules: Any, tmp_path: Path) -> None:
    said: list[str] = []
    without = modules.families.load_families(tmp_path / "none.jsonl", said.append)
    assert {"chat", "code", "maths", "rewrite"} <= set(without)
    assert all(len(without[name].prompts) == 8 for name in ("chat", "code", "maths", "rewrite"))
    assert modules.families.default_names(without)[2:] == ["maths", "rewrite"]
    assert any("none.jsonl" in sentence for sentence in said)
    path = tmp_path / "spec.jsonl"
    question = {"question_id": 1, "category": "translation", "turns": ["one", "two"]}
    path.write_text(json.dumps(question) + "\n" + json.dumps({**question, "category": "writing"}), encoding="utf-8")
    found = modules.families.load_families(path, said.append)
    assert found["translation"].prompts == ["one"]
    assert "writing" not in found
    assert modules.families.default_names(found)[3] == "translation"
    encode = lambda text: (0,) * len(text)
    assert modules.families.fitting(encode, ["a" * 401, "a" * 400, "b", "c"], 2) == [(0,) * 400, (0,)]
    assert modules.families.random_prompts(2, 50) == modules.families.random_prompts(2, 50)


def test_shuffled_drafter_keeps_trees_valid(modules: Any) -> None:
    rng = np.random.default_rng(1)
    vocabulary, trees = 40, []
    for size in (0, 1, 6, 10):
        parents = np.array([rng.integers(TREE_ROOT, i) for i in range(size)], np.int32)
        depths = np.zeros(size, np.int32)
        for i, parent in enumerate(parents):
            depths[i] = 1 if parent == TREE_ROOT else depths[parent] + 1
        tokens = rng.permutation(vocabulary)[:size].astype(np.int32)
        trees.append(DraftTree(tokens, parents, np.sort(rng.random(size).astype(np.float32))[::-1], depths))

    class Inner:
        max_levels = 3

        def draft(self, states: Any, another_level: Any = None) -> list[DraftTree]:
            if another_level is not None:
                another_level(trees, 1)
            return trees

    drafter = modules.cases.ShuffledDrafter(Inner(), vocabulary)
    asked: list[Any] = []
    found = drafter.draft([None] * 4, lambda so_far, level: bool(asked.append((so_far, level))))
    assert drafter.max_levels == 3
    assert asked[0][1] == 1
    for before, after, seen in zip(trees, found, asked[0][0], strict=True):
        assert after.tokens.dtype == np.int32
        assert not (after.tokens == before.tokens).all() or not len(before)
        assert ((after.tokens >= 0) & (after.tokens < vocabulary)).all()
        siblings = list(zip(after.parents.tolist(), after.tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)
        assert (seen.tokens == after.tokens).all()
        for name in ("parents", "probabilities", "depths"):
            assert (getattr(before, name) == getattr(after, name)).all()
    assert [t.tokens.tolist() for t in drafter.draft([None] * 4)] == [t.tokens.tolist() for t in found]
