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
