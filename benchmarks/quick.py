"""AR, EAGLE-3 (likelihood, gamma 4) and EcoSpec (gamma 4) on the same prompts, interleaved: a table, a picture, a JSON file.

python benchmarks/quick.py [--tokens 64] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT, Bench, bench_system, load_prompts

from ecospec_orchestrator.core import StepReport

POLICIES = (("none", 0), ("likelihood", 4), ("ecospec", 4))
LABELS = {"none": "AR", "likelihood": "EAGLE-3", "ecospec": "EcoSpec"}
SETTINGS = ((1, 0.0, 8), (4, 0.0, 8), (1, 1.0, 4))  # batch, temperature, prompts per family


def speed(steps: Sequence[StepReport]) -> float:
    return sum(s.emitted for s in steps) / sum(s.step_seconds for s in steps)


def row(
    policy: str,
    gamma: int,
    temperature: float,
    batch: int,
    family: str,
    runs: list[list[StepReport]],
    base: list[list[StepReport]],
) -> dict[str, Any]:
    """runs and base hold the same groups of prompts in the same order; the ratio is taken group by group."""
    steps = [s for run in runs for s in run]
    ratios = [speed(run) / speed(plain) for run, plain in zip(runs, base, strict=True)]
    emitted = sum(s.emitted for s in steps)
    overlap = np.sum([s.predicted_actual_overlap for s in steps if s.predicted_actual_overlap], axis=0)
    total = sum(s.step_seconds for s in steps)
    return {
        "policy": policy,
        "gamma": gamma,
        "temperature": temperature,
        "batch": batch,
        "family": family,
        "tokens_per_second": speed(steps),
        "ratio_to_ar": {
            "median": float(np.median(ratios)),
            "low": float(np.quantile(ratios, 0.1)),
            "high": float(np.quantile(ratios, 0.9)),
        },
        "acceptance_length": emitted / sum(s.requests for s in steps),
        "experts_per_layer_step": float(np.mean([s.distinct_experts.mean() for s in steps])),
        "bytes_per_token": sum(s.bytes_read.total for s in steps) / emitted,
        "upper_bound_bytes_per_token": sum(s.bytes_upper_bound for s in steps) / emitted,
        "prediction_recall": float(overlap[2] / overlap[1]) if np.size(overlap) == 3 else None,
        "fallback_steps": sum(s.fallback is not None for s in steps),
        "share_of_time": {
            k: sum(getattr(s, f"{k}_seconds") for s in steps) / total for k in ("draft", "predict", "select", "verify")
        },
        "groups": len(runs),
        "tokens": emitted,
    }


def measure(bench: Bench, tokens: int) -> list[dict[str, Any]]:
    prompts = {family: [bench.encode(p) for p in texts] for family, texts in load_prompts().items()}
    rng = random.Random(0)
    rows = []
    bench.policy("ecospec", 4)
    bench.run([prompts["chat"][0]], 16)
    began, done = time.monotonic(), 0
    total = sum(count // batch * len(prompts) * len(POLICIES) for batch, _, count in SETTINGS)
    for batch, temperature, count in SETTINGS:
        steps: dict[tuple[str, str], list[list[StepReport]]] = defaultdict(list)
        for start in range(0, count, batch):
            for family, items in prompts.items():
                for policy, gamma in rng.sample(POLICIES, len(POLICIES)):
                    bench.policy(policy, gamma)
                    steps[policy, family].append(bench.run(items[start : start + batch], tokens, temperature).steps)
                    done += 1
                print(f"{done} of {total} runs, {time.monotonic() - began:.0f} s", flush=True)
        for policy, gamma in POLICIES:
            for family in prompts:
                rows.append(
                    row(policy, gamma, temperature, batch, family, steps[policy, family], steps["none", family])
                )
            every = [run for family in prompts for run in steps[policy, family]]
            base = [run for family in prompts for run in steps["none", family]]
            rows.append(row(policy, gamma, temperature, batch, "all", every, base))
    return rows


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


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [(b, t) for b, t, _ in SETTINGS]
    measures = (
        ("ratio_to_ar", "speed relative to AR"),
        ("acceptance_length", "tokens per step and request"),
        ("experts_per_layer_step", "distinct experts per layer and step"),
        ("bytes_per_token", "MB read per token"),
    )
    figure, axes = plt.subplots(1, 4, figsize=(16, 4.2), layout="constrained")
    colours = {"none": "#8c8c8c", "likelihood": "#d98032", "ecospec": "#2a7f62"}
    for axis, (name, title) in zip(axes, measures, strict=True):
        for i, (policy, _) in enumerate(POLICIES):
            found = [
                next(
                    r for r in rows if (r["policy"], r["batch"], r["temperature"], r["family"]) == (policy, b, t, "all")
                )
                for b, t in cells
            ]
            at = np.arange(len(cells)) + 0.27 * (i - 1)
            if name == "ratio_to_ar":
                values = np.array([r[name]["median"] for r in found])
                spread = np.abs(np.array([[r[name]["low"], r[name]["high"]] for r in found]).T - values)
                axis.bar(at, values, 0.25, yerr=spread, capsize=3, color=colours[policy], label=LABELS[policy])
                axis.axhline(1, color="black", linewidth=0.6)
            else:
                axis.bar(
                    at,
                    [r[name] / (1e6 if name == "bytes_per_token" else 1) for r in found],
                    0.25,
                    color=colours[policy],
                    label=LABELS[policy],
                )
        axis.set_xticks(range(len(cells)), [f"batch {b}\nT={t:g}" for b, t in cells])
        axis.set_title(title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=3, loc="upper left")
    figure.suptitle("EcoSpec demo target, gamma 4, all prompt families (bars: median, whiskers: 10 - 90 %)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with bench_system() as bench:
        rows = measure(bench, args.tokens)
        geometry = bench.scheduler.engine.geometry
    result = {
        "command": f"python benchmarks/quick.py --tokens {args.tokens}",
        "target": geometry.name,
        "target_revision": geometry.revision,
        "machine": f"{platform.machine()}, {platform.system()}",
        "seconds": round(time.monotonic() - began),
        "rows": rows,
    }
    (args.out / "quick.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = table(rows)
    (args.out / "quick.md").write_text(f"`make bench-quick`\n\n{text}\n", encoding="utf-8")
    picture(rows, args.out / "quick.png")
    print(text)
    print(f"written: quick.json, quick.md and quick.png in {args.out}")


if __name__ == "__main__":
    main()
