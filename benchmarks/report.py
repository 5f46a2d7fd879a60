"""Tables and figures from result rows; pure, so that a report can be written again without measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from records import PARTS, spread

LABELS = {"none": "AR", "likelihood": "EAGLE-3", "ecospec": "EcoSpec", "goodput": "goodput"}
COLOURS = {"none": "#8c8c8c", "likelihood": "#d98032", "ecospec": "#2a7f62", "goodput": "#3b5fa8"}
ENOUGH = 0.98  # a ratio below is listed
MAIN = ("ar", "ar_again", "eagle3_g4", "ecospec_g4", "goodput", "goodput_no_experts")
GAMMAS = tuple(f"ecospec_g{g}" for g in range(1, 9))
Row = dict[str, Any]

# EcoSpec (arXiv 2607.12696), 8 x H200, batch 1, gamma 4. DeepSeek-V3.1's baseline is its own MTP chain, not EAGLE-3.
PAPER = """\
| what | Qwen3-235B-A22B | GPT-OSS-120B | DeepSeek-V3.1 |
|---|---|---|---|
| baseline (EAGLE-3; DeepSeek: MTP), speed-up T=0 (T=1) | 1.22 (1.28) | 1.14 (1.18) | 1.10 (1.28) |
| EcoSpec, speed-up T=0 (T=1) | 1.36 (1.38) | 1.31 (1.30) | 1.15 (1.33) |
| EcoSpec, best benchmark | 1.62 (MT-Bench) | 1.45 | not stated |
| experts/layer/step, baseline -> EcoSpec | 23.7 -> 20.5 | 11.6 -> 10.6 | 31.4 -> 31.2 |
| GB per verify step, baseline -> EcoSpec | 99.3 -> 88.1 | 6.0 -> 5.5 | 97.3 -> 96.8 |
| acceptance length, baseline -> EcoSpec | 2.41 -> 2.32 | 1.88 -> 1.86 | not stated |
| static -> marginal cost, GSM8K, speed-up | 1.28 -> 1.39 | 1.06 -> 1.11 | 1.16 -> 1.19 |
| predictor at 50 % accuracy, speed-up | 1.17 | not stated | not stated |
| experts/layer, predicted and oracle | 20.5 and 20.4 | not stated | not stated |
| batch 4, baseline: speed-up at experts/layer | 1.00 at 54.9 | not stated | not stated |
| batch 4, EcoSpec: speed-up at experts/layer | 1.09 at 45.7 | not stated | not stated |
| best of gamma 3, 4, 5, 6 | 4 | not stated | not stated |
"""


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| batch | T | family | policy | tokens/s | ratio to AR (10 % - 90 %) | acceptance length | experts/layer/step | MB/token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda r: (r["temperature"], r["batch"], r["family"] != "all", r["family"])):
        ratio = r["ratio_to_ar"]
        lines.append(
            f"| {r['batch']} | {r['temperature']:g} | {r['family']} | {LABELS[r['policy']]} | {r['tokens_per_second']:.1f} "
            f"| {ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f}) | {r['acceptance_length']:.2f} "
            f"| {r['experts_per_layer_step']:.2f} | {r['bytes_per_token'] / 1e6:.0f} |"
        )
    return "\n".join(lines)


class Rows:
    """Result rows of bench.py, found by cell and case."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._at = {(r["family"], r["batch"], r["temperature"], r["case"]): r for r in self.rows}

    def get(self, family: str, batch: int, temperature: float, case: str) -> Row | None:
        return self._at.get((family, batch, temperature, case))

    @property
    def settings(self) -> list[tuple[int, float]]:
        """(batch, temperature) of the main grid, T=0 first."""
        found = {(r["temperature"], r["batch"]) for r in self.rows if r["family"] == "all"}
        return [(batch, temperature) for temperature, batch in sorted(found)]

    @property
    def cells(self) -> list[tuple[str, int, float]]:
        """(family, batch, temperature) of the main grid, without "all"."""
        found = dict.fromkeys((r["family"], r["batch"], r["temperature"]) for r in self.rows if r["ablation"] is None)
        return [cell for cell in found if cell[0] != "all"]

    def families(self, batch: int, temperature: float) -> list[str]:
        return [*sorted(f for f, b, t in self.cells if (b, t) == (batch, temperature)), "all"]

    def ratio(self, cell: tuple[str, int, float], case: str, to: str) -> float | None:
        """The median over the cell's groups of case's speed over the other's, in the same group; None where one is missing."""
        ours, theirs = self.get(*cell, case), self.get(*cell, to)
        if ours is None or theirs is None:
            return None
        pairs = zip(ours["group_tokens_per_second"], theirs["group_tokens_per_second"], strict=True)
        return float(np.median([a / b for a, b in pairs]))

    def best_gamma(self, cell: tuple[str, int, float]) -> str | None:
        """The case of the EcoSpec gamma that was fastest in the cell, in hindsight."""
        found = [r for case in GAMMAS if (r := self.get(*cell, case)) is not None]
        return max(found, key=lambda r: r["tokens_per_second"])["case"] if found else None


def _compared(rows: Rows, case: str, to: Callable[[tuple[str, int, float]], str | None]) -> dict[str, Any] | None:
    """case over another one, cell by cell: geometric mean, worst cell, cells below ENOUGH."""
    found = []
    for cell in rows.cells:
        other = to(cell)
        ratio = rows.ratio(cell, case, other) if other is not None else None
        if ratio is not None:
            found.append(
                {"family": cell[0], "batch": cell[1], "temperature": cell[2], "against": other, "ratio": ratio}
            )
    if not found:
        return None
    found.sort(key=lambda item: item["ratio"])
    return {
        "cells": len(found),
        "geometric_mean": float(np.exp(np.mean(np.log([item["ratio"] for item in found])))),
        "worst": found[0],
        f"below_{ENOUGH}": [item for item in found if item["ratio"] < ENOUGH],
    }


def summary(result_rows: Sequence[Row]) -> dict[str, Any]:
    """What is asked of the goodput policy, computed from the rows; None for what was not measured."""
    rows = Rows(result_rows)
    noise = [r["ratio_to_ar"]["median"] for cell in rows.cells if (r := rows.get(*cell, "ar_again")) is not None]
    every = [(b, t, r) for b, t in rows.settings if (r := rows.get("all", b, t, "goodput")) is not None]
    return {
        "ar_again_to_ar": {**spread(noise), "min": min(noise), "max": max(noise), "cells": len(noise)}
        if noise
        else None,
        "goodput_to_ar": _compared(rows, "goodput", lambda cell: "ar"),
        "goodput_to_best_ecospec": _compared(rows, "goodput", rows.best_gamma),
        "goodput_to_ecospec_g4": _compared(rows, "goodput", lambda cell: "ecospec_g4"),
        "goodput_to_goodput_no_experts": _compared(rows, "goodput", lambda cell: "goodput_no_experts"),
        "hard_conditions": [
            {k: r[k] for k in ("family", "batch", "temperature", "label", "ablation", "ratio_to_ar")}
            for r in result_rows
            if r["ablation"] in ("bad drafter", "adversarial text") and r["policy"] != "none"
        ],
        "step_time_error": [
            {"batch": b, "temperature": t, "median": r["step_time_error"], "steps": r["steps_with_estimate"]}
            for b, t, r in every
            if r["step_time_error"] is not None
        ],
        "decision_share": [
            {"batch": b, "temperature": t, "share": r["share_of_time"]["select"]} for b, t, r in every if b in (1, 8)
        ],
    }


def _lines(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    found = ["| " + " | ".join(cells) + " |" for cells in body]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *found]) if found else "Not measured."


def _ratio(row: Row) -> str:
    ratio = row["ratio_to_ar"]
    star = "*" if row["time_excludes_prediction"] else ""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f}){star}"


def _main_table(rows: Rows, temperature: float) -> str:
    head = (
        "family",
        "policy",
        "tokens/s",
        "speed-up (10 % - 90 %)",
        "acceptance length",
        "experts/layer/step",
        "MB/step",
        "MB/token",
    )
    found = [
        (family, r)
        for family in rows.families(1, temperature)
        for case in MAIN
        if (r := rows.get(family, 1, temperature, case)) is not None
    ]
    return _lines(
        head,
        (
            (
                family,
                r["label"],
                f"{r['tokens_per_second']:.1f}",
                _ratio(r),
                f"{r['acceptance_length']:.2f}",
                f"{r['experts_per_layer_step']:.2f}",
                f"{sum(r['bytes_per_step'].values()) / 1e6:.0f}",
                f"{r['bytes_per_token'] / 1e6:.0f}",
            )
            for family, r in found
        ),
    )


def _batch_table(rows: Rows) -> str:
    body = (
        (
            f"{temperature:g}",
            str(batch),
            r["label"],
            f"{r['tokens_per_second']:.1f}",
            _ratio(r),
            f"{r['acceptance_length']:.2f}",
            f"{r['experts_per_layer_step']:.2f}",
            f"{r['bytes_per_token'] / 1e6:.0f}",
            *(f"{100 * r['share_of_time'][part]:.1f}" for part in PARTS),
        )
        for batch, temperature in rows.settings
        for case in MAIN
        if (r := rows.get("all", batch, temperature, case)) is not None
    )
    shares = [f"{part} %" for part in PARTS]
    head = (
        "T",
        "batch",
        "policy",
        "tokens/s",
        "speed-up (10 % - 90 %)",
        "acceptance length",
        "experts/layer/step",
        "MB/token",
        *shares,
    )
    return _lines(head, body)


def _gamma_table(rows: Rows) -> str:
    body = []
    for family, batch, temperature in sorted(rows.cells, key=lambda c: (c[2], c[1], c[0])):
        cell = (family, batch, temperature)
        best = rows.best_gamma(cell)
        if best is None:
            continue
        fixed = [rows.ratio(cell, case, "ar") for case in GAMMAS]
        goodput = rows.ratio(cell, "goodput", "ar")
        figures = ["-" if v is None else f"{v:.2f}" for v in (*fixed, goodput)]
        body.append((f"{temperature:g}", str(batch), family, *figures[:8], best.removeprefix("ecospec_g"), figures[8]))
    return _lines(("T", "batch", "family", *(f"g{g}" for g in range(1, 9)), "best gamma", "goodput"), body)


def _ablation_table(rows: Rows) -> str:
    """Families one by one: an ablation's groups and its baseline's are the same."""
    body = []
    for r in rows.rows:
        if r["ablation"] is None or r["case"].startswith("ar"):
            continue
        cell = (r["family"], r["batch"], r["temperature"])
        plain = rows.get(*cell, "goodput" if r["policy"] == "goodput" else "ecospec_g4")
        recall = r["prediction_recall"]
        against = rows.ratio(cell, r["case"], plain["case"]) if plain is not None and plain is not r else None
        body.append(
            (
                str(r["batch"]),
                r["family"],
                r["label"],
                r["ablation"],
                _ratio(r),
                "-" if against is None else f"{against:.2f}",
                f"{r['acceptance_length']:.2f}",
                f"{r['experts_per_layer_step']:.2f}",
                f"{r['bytes_per_token'] / 1e6:.0f}",
                "-" if recall is None else f"{recall:.2f}",
            )
        )
    body.sort(key=lambda line: (line[0], line[1] != "all", line[1]))
    head = (
        "batch",
        "family",
        "policy",
        "ablation",
        "speed-up (10 % - 90 %)",
        "against the same without it",
        "acceptance length",
        "experts/layer/step",
        "MB/token",
        "experts found",
    )
    return _lines(head, body)


def _bytes_table(rows: Rows) -> str:
    found = [
        (b, t, r)
        for b, t in rows.settings
        for case in MAIN
        if case != "ar_again" and (r := rows.get("all", b, t, case))
    ]
    parts = list(found[0][2]["bytes_per_step"]) if found else []
    body = (
        (
            f"{t:g}",
            str(b),
            r["label"],
            *(f"{r['bytes_per_step'][part] / 1e6:.1f}" for part in parts),
            f"{sum(r['bytes_per_step'].values()) / 1e6:.0f}",
        )
        for b, t, r in found
    )
    return _lines(("T", "batch", "policy", *parts, "all"), body)


def _cell_name(item: dict[str, Any]) -> str:
    return f"{item['family']}, batch {item['batch']}, T={item['temperature']:g}"


def _verdict(name: str, found: dict[str, Any] | None, listed: bool) -> str:
    if found is None:
        return f"- {name}: not measured."
    worst, below = found["worst"], found[f"below_{ENOUGH}"]
    text = (
        f"- {name}: geometric mean {found['geometric_mean']:.3f} over {found['cells']} cells, "
        f"worst {worst['ratio']:.3f} ({_cell_name(worst)}, against {worst['against']})"
    )
    if not listed:
        return text + "."
    return (
        text + f"; below {ENOUGH}: " + ("; ".join(f"{i['ratio']:.3f} {_cell_name(i)}" for i in below) or "none") + "."
    )


def _acceptance(figures: dict[str, Any]) -> str:
    noise = figures["ar_again_to_ar"]
    lines = []
    if noise is not None:
        lines.append(
            f"- noise, plain decoding against itself: median {noise['median']:.3f}, 10 - 90 % {noise['low']:.3f} - "
            f"{noise['high']:.3f}, all {noise['cells']} cells within {noise['min']:.3f} - {noise['max']:.3f}."
        )
    lines += [
        _verdict("goodput / AR", figures["goodput_to_ar"], True),
        _verdict("goodput / best fixed gamma of EcoSpec", figures["goodput_to_best_ecospec"], True),
        "  The best of eight noisy measurements lies above the truth: judge this one beside the noise.",
        _verdict("goodput / EcoSpec gamma 4", figures["goodput_to_ecospec_g4"], False),
        _verdict("goodput / goodput without experts", figures["goodput_to_goodput_no_experts"], False),
    ]
    for item in figures["hard_conditions"]:
        if item["label"].startswith("goodput"):
            ratio = item["ratio_to_ar"]
            lines.append(
                f"- {item['label']} / AR, {item['ablation']}, {_cell_name(item)}: "
                f"{ratio['median']:.3f} ({ratio['low']:.3f} - {ratio['high']:.3f})."
            )
    for item in figures["step_time_error"]:
        lines.append(
            f"- expected against measured step time, batch {item['batch']}, T={item['temperature']:g}: median absolute error "
            f"{100 * item['median']:.1f} % over {item['steps']} steps."
        )
    for item in figures["decision_share"]:
        lines.append(
            f"- choosing takes {100 * item['share']:.2f} % of the time at batch {item['batch']}, T={item['temperature']:g}."
        )
    return "\n".join(lines)


def headline(figures: dict[str, Any]) -> str:
    """The summary as one table, for the README."""
    names = (
        ("goodput_to_ar", "plain decoding (AR)"),
        ("goodput_to_ecospec_g4", "EcoSpec, gamma 4"),
        ("goodput_to_best_ecospec", "EcoSpec, the best gamma of each cell in hindsight"),
        ("goodput_to_goodput_no_experts", "goodput without knowing experts"),
    )
    return _lines(
        ("goodput's speed over that of", "cells", "geometric mean", "worst cell", f"cells below {ENOUGH}"),
        (
            (
                label,
                str(found["cells"]),
                f"{found['geometric_mean']:.3f}",
                f"{found['worst']['ratio']:.3f} ({_cell_name(found['worst'])})",
                str(len(found[f"below_{ENOUGH}"])),
            )
            for name, label in names
            if (found := figures[name]) is not None
        ),
    )


def markdown(result: dict[str, Any], image_names: Sequence[str]) -> str:
    """The report. result: what bench.json holds."""
    rows = Rows(result["rows"])
    sources = "\n".join(f"- {family}: {source}" for family, source in result["sources"].items())
    complete = (
        "" if result["runs"] == result["runs_planned"] else " The benchmark is not finished: open groups are left out."
    )
    pictures_text = "\n\n".join(f"![{name.removesuffix('.png')}]({name})" for name in image_names)
    return f"""# The paper's tables on the demo target

`make bench`, that is `{result["command"]}`; target {result["target"]} {result["target_revision"]}; {result["machine"]};
revision {result["revision"]}; {result["runs"]} of {result["runs_planned"]} runs, {result["measured_seconds"]} s of decoding.{complete}

Every group of prompts is decoded by all policies one after another in random order; plain decoding (AR), goodput and goodput
without experts three times, side by side. A speed-up is taken within a group, against AR's runs together; shown are the median
and the 10 - 90 % spread over groups. "AR again" is AR's second run against its first: the noise. "all": the groups of all families of the main grid.
A star: the time leaves out the prediction, which for oracle experts is a second forward that no server would run.

{sources}

## Speed, acceptance and traffic at batch 1, T=0

{_main_table(rows, 0.0)}

## The same at T=1

{_main_table(rows, 1.0)}

## The paper's own figures

Its models, eight H200 GPUs, speed-up over plain decoding; ours above are of the demo target on CPU. Compare directions, not sizes.

{PAPER}
## Batches

{_batch_table(rows)}

## Fixed gamma: EcoSpec's speed-up for gamma 1 to 8, the best in hindsight, and goodput

{_gamma_table(rows)}

## Ablations

{_ablation_table(rows)}

## Bytes read per step, by component (MB)

{_bytes_table(rows)}

## Is goodput worth it?

{headline(result["summary"])}

{_acceptance(result["summary"])}

{pictures_text}
"""
