"""AR, EAGLE-3 (likelihood, gamma 4), EcoSpec (gamma 4) and goodput on the same prompts, interleaved: a table, a picture, a JSON
file. A policy that learns is the same one throughout, as in a server.

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
from records import RunSums, row
from report import COLOURS, LABELS, table

from ecospec_orchestrator.profiling import SECONDS

POLICIES = (("none", 0), ("likelihood", 4), ("ecospec", 4), ("goodput", 0))
FAMILIES = ("chat", "code", "maths")
SETTINGS = ((1, 0.0, 8), (4, 0.0, 8), (1, 1.0, 4))  # batch, temperature, prompts per family


def measure(bench: Bench, tokens: int) -> list[dict[str, Any]]:
    prompts = {family: [bench.encode(p) for p in texts] for family, texts in load_prompts(FAMILIES).items()}
    rng = random.Random(0)
    rows = []
    policies = {name: bench.policy_for(name, gamma) for name, gamma in POLICIES}
    bench.scheduler.policy = policies["ecospec"]
    bench.run([prompts["chat"][0]], 16)
    began, done = time.monotonic(), 0
    total = sum(count // batch * len(prompts) * len(POLICIES) for batch, _, count in SETTINGS)
    for batch, temperature, count in SETTINGS:
        runs: dict[tuple[str, str], list[RunSums]] = defaultdict(list)
        for start in range(0, count, batch):
            for family, items in prompts.items():
                for policy in rng.sample(list(policies), len(policies)):
                    bench.scheduler.policy = policies[policy]
                    steps = bench.run(items[start : start + batch], tokens, temperature).steps
                    runs[policy, family].append(RunSums.of(steps))
                    done += 1
                print(f"{done} of {total} runs, {time.monotonic() - began:.0f} s", flush=True)
        for policy, gamma in POLICIES:
            for family in prompts:
                rows.append(row(policy, gamma, temperature, batch, family, runs[policy, family], runs["none", family]))
            every = [run for family in prompts for run in runs[policy, family]]
            base = [run for family in prompts for run in runs["none", family]]
            rows.append(row(policy, gamma, temperature, batch, "all", every, base))
    return rows


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
    for axis, (name, title) in zip(axes, measures, strict=True):
        for i, (policy, _) in enumerate(POLICIES):
            found = [
                next(
                    r for r in rows if (r["policy"], r["batch"], r["temperature"], r["family"]) == (policy, b, t, "all")
                )
                for b, t in cells
            ]
            at = np.arange(len(cells)) + 0.21 * (i - 1.5)
            if name == "ratio_to_ar":
                values = np.array([r[name]["median"] for r in found])
                spread = np.abs(np.array([[r[name]["low"], r[name]["high"]] for r in found]).T - values)
                axis.bar(at, values, 0.2, yerr=spread, capsize=3, color=COLOURS[policy], label=LABELS[policy])
                axis.axhline(1, color="black", linewidth=0.6)
            else:
                axis.bar(
                    at,
                    [r[name] / (1e6 if name == "bytes_per_token" else 1) for r in found],
                    0.2,
                    color=COLOURS[policy],
                    label=LABELS[policy],
                )
        axis.set_xticks(range(len(cells)), [f"batch {b}\nT={t:g}" for b, t in cells])
        axis.set_title(title, fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=4, loc="upper left")
    figure.suptitle(
        "EcoSpec demo target, gamma 4 where it is fixed, all prompt families (bars: median, whiskers: 10 - 90 %)"
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with bench_system(SECONDS) as bench:
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
