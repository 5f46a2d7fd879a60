"""Writes what the documents quote from benchmarks/results: python docs/write_figures.py

A block `<!-- NAME: written by make docs -->` to `<!-- /NAME -->` of a Markdown file holds what FIGURES[NAME] makes of the committed
results, so that no figure of the documents is typed by hand.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 138
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"<!-- (\w+): written by make docs -->\n.*?<!-- /\1 -->", re.DOTALL)


def summary() -> str:
    """What a reader should expect, in three sentences."""
    figures, headline = _result("bench.json"), _result("bench.json")["summary"]
    to_ar, to_fixed = headline["goodput_to_ar"], headline["goodput_to_ecospec_g4"]
    plain, tree = _row(figures, "ar"), _row(figures, "eagle3_g4")
    hindsight = _over_cells("hindsight")
    return (
        f"On the bundled demo target and {figures['machine'].rpartition(', ')[2]}, `goodput`, the default, decodes at "
        f"**{to_ar['geometric_mean']:.2f} times the speed of plain decoding** (geometric mean of {to_ar['cells']} cells of prompt "
        f"family, batch size and temperature; worst {to_ar['worst']['ratio']:.2f}), and at {to_fixed['geometric_mean']:.2f} times that of "
        f"always verifying four drafts, as EcoSpec's paper does.\n\nNo more than plain, because here drafts do not pay: verifying EAGLE-3's "
        f"four nodes reads {_mb(tree) / _mb(plain):.1f} times the bytes of a plain step ({_mb(tree):.0f} against {_mb(plain):.0f} MB) and "
        f"brings {tree['acceptance_length']:.2f} tokens, from a small head that was trained for minutes on a CPU. The policy's gain on this "
        "machine is that it notices. Even a policy that knew in advance which drafts will be accepted would reach about "
        f"{hindsight:.2f} times plain decoding, by the cost model."
    )


def why() -> str:
    """Tokens that the nodes bring against bytes that they read."""
    figures = _result("bench.json")
    plain = _row(figures, "ar")
    lines = [
        "| verified | experts/layer/step | MB/step, of plain | tokens/step | speed, of plain |",
        "|---|---|---|---|---|",
    ]
    for case, name in (
        ("ar", "no draft"),
        ("eagle3_g4", "EAGLE-3's four likeliest nodes"),
        ("ecospec_g4", "EcoSpec's four nodes"),
        ("goodput", "what goodput chooses"),
    ):
        row = _row(figures, case)
        lines.append(
            f"| {name} | {row['experts_per_layer_step']:.2f} | {_mb(row) / _mb(plain):.2f} | {row['acceptance_length']:.2f} "
            f"| {row['ratio_to_ar']['median']:.2f} |"
        )
    return "\n".join(lines)


def node_price() -> str:
    """What a draft node costs by the recorded cost model."""
    cost = _result("bounds.json")["cost_seconds"]
    return (
        f"The cost profile that the bounds were computed with says, for one request: {cost['fixed'] * 1e3:.1f} ms a step, "
        f"{cost['per_token'] * 1e3:.2f} ms a token, {cost['per_pair'] * 1e6:.0f} microseconds for every (layer, expert) pair that is read, "
        f"{(cost['draft_level'] + cost['draft_level_request']) * 1e3:.2f} ms a draft level and "
        f"{(cost['predict'] + cost['predict_request']) * 1e3:.1f} ms for asking the predictor without anything to overlap it with."
    )


def engine_share() -> str:
    found = _result("engine.json")
    return (
        f"A plain step of the demo takes {found['plain_ms']:.1f} ms and reads {found['plain_bytes'] / 1e6:.0f} MB: "
        f"{found['share_of_bandwidth']:.0%} of what a plain parallel read of memory reaches there, and {found['times_transformers']:.1f} "
        f"times the speed of transformers' own generation ({found['transformers']})."
    )


def demo_predictor() -> str:
    folder = ROOT / "models" / "demo" / "predictor"
    report = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    training = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
    ours, table = (report["predictors"][name] for name in ("predictor", "token_table"))
    return (
        f"The demo's predictor learned from {training['training_tokens']:,} tokens, seen {training['epochs']:g} times, and names "
        f"{ours['accuracy']:.1%} of the experts of {report['tokens']:,} held-out ones ({ours['union_recall']:.1%} of a tree's union); a "
        f"table by token names {table['accuracy']:.1%}."
    )


def quick() -> str:
    return _report().table([row for row in _result("quick.json")["rows"] if row["family"] == "all"])


def headline() -> str:
    return _report().headline(_result("bench.json")["summary"])


def paper() -> str:
    return _report().PAPER.strip()


FIGURES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "why": why,
    "node_price": node_price,
    "engine_share": engine_share,
    "demo_predictor": demo_predictor,
    "quick": quick,
    "headline": headline,
    "paper": paper,
    "bounds": lambda: _table_of("bounds.md"),
    "engine": lambda: _table_of("engine.md"),
    "http_load": lambda: _table_of("http_load.md"),
    "predictor_load": lambda: _table_of("predictor_load.md"),
    "long_prompt": lambda: _table_of("long_prompt.md"),
}


def filled(text: str) -> str:
    """text with every block as the results have it now. Raises ValueError for a block that no function makes."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in FIGURES:
            raise ValueError(f"A block is named {name!r}; allowed: {', '.join(FIGURES)}.")
        return f"<!-- {name}: written by make docs -->\n{_wrapped(FIGURES[name]())}\n<!-- /{name} -->"

    return BLOCK.sub(block, text)


def _wrapped(text: str) -> str:
    if text.startswith("|"):
        return text
    return "\n\n".join(
        textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)
        for paragraph in text.split("\n\n")
    )


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _report() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    return report


def _row(figures: Any, case: str) -> Any:
    """Of all families together, batch 1, T=0."""
    at = ("all", 1, 0.0, case)
    return next(r for r in figures["rows"] if (r["family"], r["batch"], r["temperature"], r["case"]) == at)


def _mb(row: Any) -> float:
    return sum(row["bytes_per_step"].values()) / 1e6


def _over_cells(rule: str) -> float:
    """Geometric mean over all cells of the speed that a rule would have, of plain decoding's."""
    ratios = [cell["ratio_to_ar"][rule] for cell in _result("bounds.json")["cells"]]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _table_of(name: str) -> str:
    """The first table of a report."""
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|"))
    rest = lines[first:]
    return "\n".join(rest[: next((at for at, line in enumerate(rest) if not line.startswith("|")), len(rest))])


def main() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            path.write_text(filled(text), encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
