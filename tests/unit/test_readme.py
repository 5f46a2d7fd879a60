"""Figures in the README are those of the committed results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_table_is_the_last_quick_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import quick

    rows = json.loads((ROOT / "benchmarks/results/quick.json").read_text(encoding="utf-8"))["rows"]
    table = quick.table([r for r in rows if r["family"] == "all"])
    assert len(table.splitlines()) == 14
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("quick", "harness"):
        sys.modules.pop(name, None)


def test_the_readmes_headline_is_the_last_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report

    figures = json.loads((ROOT / "benchmarks/results/bench.json").read_text(encoding="utf-8"))["summary"]
    table = report.headline(figures)
    assert len(table.splitlines()) == 6
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("report", "records"):
        sys.modules.pop(name, None)


def test_the_demos_card_names_the_bytes_that_its_steps_read() -> None:
    rows = json.loads((ROOT / "benchmarks/results/bench.json").read_text(encoding="utf-8"))["rows"]
    at = ("all", 1, 0.0, "ar")
    plain = next(r for r in rows if (r["family"], r["batch"], r["temperature"], r["case"]) == at)
    mb = {name: read / 1e6 for name, read in plain["bytes_per_step"].items()}
    total = sum(mb.values()) - mb["kv"]
    said = (
        f"{total:.0f} MB: routed experts {mb['experts']:.0f} MB ({mb['experts'] / total:.0%}), shared {mb['shared']:.0f} MB, "
        f"attention {mb['attention']:.0f} MB, head {mb['head']:.0f} MB (without the KV cache)"
    ).replace("%", " %")
    assert said in (ROOT / "models/demo/README.md").read_text(encoding="utf-8"), said
