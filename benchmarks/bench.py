"""The paper's tables on the demo target: every policy, batch, temperature and prompt family, paired and interleaved.

    python benchmarks/bench.py [--tokens 48] [--minutes 30] [--report-only]

Every finished run is kept in benchmarks/results/bench.runs.jsonl; started again, the benchmark goes on where it stopped.
Written: bench.json (rows and summary), bench.md (the report) and its pictures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cases import ABLATIONS, ADVERSARIAL_CASES, ALL_CASES, MAIN_CASES, Switchboard
from families import ADVERSARIAL, Family, default_names, fitting, load_families, random_prompts
from harness import ROOT, Bench, bench_system
from pictures import pictures
from records import RunFile, RunSums, bench_rows, key_of, read_runs
from report import markdown, summary

from ecospec_orchestrator.profiling import SECONDS

SPEC_BENCH = Path("../shared/data/spec_bench.jsonl")
BATCHES, TEMPERATURES = (1, 2, 4, 8), (0.0, 1.0)
ABLATION_BATCHES, ABLATION_TEMPERATURE = (1, 4), 0.0
MIN_GROUPS_BATCH_1 = 3
# Runs of every group of what is compared the closest: each round of them runs back to back, against the machine's changing pace.
REPEATS = {"ar": 3, "goodput": 3, "goodput_no_experts": 3}
CODE = ("proto", "services", "models", "benchmarks/*.py", "benchmarks/prompts.json")  # what a result depends on


@dataclass(frozen=True)
class Cell:
    """runs: (case, repeat) of every group. ablation: of the text, for all of its cases."""

    family: str
    batch: int
    temperature: float
    groups: int
    runs: tuple[tuple[str, int], ...]
    ablation: str | None = None


def groups_of(batch: int, prompts_per_cell: int, available: int) -> int:
    """How many groups of `batch` prompts a cell has: at least one, at least 3 at batch 1, if so many prompts are there."""
    wanted = max(-(-prompts_per_cell // batch), MIN_GROUPS_BATCH_1 if batch == 1 else 1)
    return min(wanted, available // batch)


def plan(args: argparse.Namespace, available: dict[str, int], say: Callable[[str], None] = print) -> list[Cell]:
    """available: usable prompts by family."""
    cells = []
    for family, count in available.items():
        adversarial = family == ADVERSARIAL
        for batch in args.batches:
            for temperature in args.temperatures:
                ablate = batch in ABLATION_BATCHES and temperature == ABLATION_TEMPERATURE
                groups = groups_of(batch, args.prompts_per_cell, count)
                if adversarial and not ablate:
                    continue
                if not groups:
                    say(f"{family} at batch {batch} is left out: only {count} prompts fit.")
                    continue
                cases = ADVERSARIAL_CASES if adversarial else [c.key for c in (*MAIN_CASES, *(ABLATIONS * ablate))]
                kept = ["ar", *(case for case in cases if case in args.cases and case != "ar")]
                runs = tuple((case, repeat) for case in kept for repeat in range(REPEATS.get(case, 1)))
                ablation = "adversarial text" if adversarial else None
                cells.append(Cell(family, batch, temperature, groups, runs, ablation))
    return cells


def measure(
    board: Switchboard,
    cells: Sequence[Cell],
    prompts: dict[str, list[tuple[int, ...]]],
    file: RunFile,
    tokens: int,
    minutes: float | None,
) -> bool:
    """Run what is not in the file yet, the first groups of all cells first. False when the time was up before the end."""
    began, spent, done_cost = time.monotonic(), 0.0, 0.0
    units = [(g, cell) for g in range(max(c.groups for c in cells)) for cell in cells if g < cell.groups]
    cost = lambda cell: cell.batch**0.6  # a larger batch takes longer, but not in proportion
    total = sum(len(cell.runs) for _, cell in units)
    open_cost = sum(cost(cell) for g, cell in units for run in cell.runs if _key(cell, g, run) not in file.done)
    for g, cell in units:
        order = shuffled(cell.runs, random.Random(f"{cell.family} {cell.batch} {cell.temperature} {g}"))
        todo = [(place, run) for place, run in enumerate(order) if _key(cell, g, run) not in file.done]
        for place, run in todo:
            if minutes is not None and time.monotonic() - began > 60 * minutes:
                print(f"{minutes:g} minutes are over; the same command goes on from here", flush=True)
                return False
            case = ALL_CASES[run[0]]
            board.configure(case)
            batch = prompts[cell.family][g * cell.batch : (g + 1) * cell.batch]
            steps = board.bench.run(batch, tokens, cell.temperature).steps
            record = dict(
                zip(("family", "batch", "temperature", "group", "case", "repeat"), _key(cell, g, run), strict=True)
            )
            file.append({**record, "place": place}, RunSums.of(steps, case.time_excludes_prediction))
            done_cost += cost(cell)
        if todo:
            spent = time.monotonic() - began
            left = spent / done_cost * (open_cost - done_cost)
            print(
                f"{len(file.done)} of {total} runs ({cell.family}, batch {cell.batch}, T={cell.temperature:g}, group {g}), "
                f"{spent:.0f} s, about {left:.0f} s left",
                flush=True,
            )
    return True


def shuffled(runs: Sequence[tuple[str, int]], chance: random.Random) -> list[tuple[str, int]]:
    """All runs in a random order, but those of one round of REPEATS side by side, in a random order of their own."""
    rounds: dict[tuple[str, int] | int, list[tuple[str, int]]] = {}
    for case, repeat in runs:
        rounds.setdefault(repeat if case in REPEATS else (case, repeat), []).append((case, repeat))
    units = [chance.sample(unit, len(unit)) for unit in rounds.values()]
    return [run for unit in chance.sample(units, len(units)) for run in unit]


def _key(cell: Cell, group: int, run: tuple[str, int]) -> tuple[Any, ...]:
    return (cell.family, cell.batch, cell.temperature, group, *run)


def revision() -> str:
    """The commit, and a digest of what is not committed of the code that a result depends on; "unknown" without git."""
    git = lambda *arguments: subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, check=True).stdout
    try:
        commit, changes = git("rev-parse", "HEAD").decode().strip(), git("diff", "HEAD", "--", *CODE)
        new = git("ls-files", "-z", "--others", "--exclude-standard", "--", *CODE).decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    changes += b"".join((ROOT / name).read_bytes() for name in sorted(filter(None, new)))
    return commit + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def header_of(
    args: argparse.Namespace,
    cells: Sequence[Cell],
    families: dict[str, Family],
    prompts: dict[str, list[tuple[int, ...]]],
    bench: Bench,
) -> dict[str, Any]:
    """What identifies a set of runs ("hash") and what its report has to say about them."""
    geometry = bench.scheduler.engine.geometry
    used = {cell.family for cell in cells}
    cases = {run[0] for cell in cells for run in cell.runs}
    header = {
        "tokens": args.tokens,
        "cells": [asdict(cell) for cell in cells],
        "cases": {
            c.key: {**asdict(c), "time_excludes_prediction": c.time_excludes_prediction}
            for c in ALL_CASES.values()
            if c.key in cases
        },
        "sources": {name: families[name].source if name in families else "drawn token ids" for name in sorted(used)},
        "prompts": {name: hashlib.sha256(json.dumps(prompts[name]).encode()).hexdigest()[:16] for name in sorted(used)},
        "revision": revision(),
        "target": geometry.name,
        "target_revision": geometry.revision,
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} CPU cores",
    }
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
    return {**header, "command": command_of(args), "hash": digest}


def command_of(args: argparse.Namespace) -> str:
    """The command that makes these results, with the options that are not at their default."""
    words = [f"python benchmarks/bench.py --tokens {args.tokens} --prompts-per-cell {args.prompts_per_cell}"]
    default = parser().parse_args([])
    for name in ("families", "batches", "temperatures", "cases"):
        value = getattr(args, name)
        if value is not None and list(value) != list(getattr(default, name) or ()):
            words.append(f"--{name} {' '.join(f'{v:g}' if isinstance(v, float) else str(v) for v in value)}")
    return " ".join(words)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    p.add_argument("--prompts-per-cell", type=int, default=8, help="prompts per family, batch and temperature")
    p.add_argument("--families", nargs="+", help="prompt families; default: four that are present")
    p.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    p.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES))
    p.add_argument("--cases", nargs="+", default=list(ALL_CASES), choices=list(ALL_CASES), metavar="CASE")
    p.add_argument(
        "--spec-bench", type=Path, default=SPEC_BENCH, help="Spec-Bench's questions, from the repository root"
    )
    p.add_argument("--minutes", type=float, help="stop after so many minutes; the same command goes on later")
    p.add_argument("--report-only", action="store_true", help="write the report of the runs that are there")
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    return p


def write_report(out: Path, header: dict[str, Any], records: Sequence[dict[str, Any]]) -> None:
    rows = bench_rows(header, records)
    if not rows:
        print("no group of prompts is complete yet: no report")
        return
    planned = sum(cell["groups"] * len(cell["runs"]) for cell in header["cells"])
    kept = ("command", "target", "target_revision", "machine", "revision", "tokens", "sources")
    result = {
        **{name: header[name] for name in kept},
        "runs": len({key_of(r) for r in records}),
        "runs_planned": planned,
        "measured_seconds": round(sum(r["sums"]["seconds"] for r in records)),
        "rows": rows,
        "summary": summary(rows),
    }
    (out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    names = pictures(rows, out)
    (out / "bench.md").write_text(markdown(result, names), encoding="utf-8")
    print(f"written: bench.json, bench.md, {', '.join(names)} in {out}")


def main() -> int:
    args = parser().parse_args()
    path = args.out / "bench.runs.jsonl"
    if args.report_only:
        header, records = read_runs(path) if path.exists() else (None, [])
        if header is None:
            print(f"{path} holds no runs; run the benchmark first.", file=sys.stderr)
            return 1
        write_report(args.out, header, records)
        return 0
    families = load_families(ROOT / args.spec_bench)
    names = args.families or default_names(families)
    unknown = [name for name in names if name not in families]
    if unknown:
        print(f"family {unknown[0]!r} is not there; present are {', '.join(families)}.", file=sys.stderr)
        return 1
    with bench_system(SECONDS) as bench:
        most = max(groups_of(b, args.prompts_per_cell, 10**9) * b for b in args.batches)
        prompts = {name: fitting(bench.encode, families[name].prompts, most) for name in names}
        prompts[ADVERSARIAL] = random_prompts(most, bench.scheduler.engine.geometry.vocab_size)
        cells = plan(args, {name: len(found) for name, found in prompts.items()})
        file = RunFile(path, header := header_of(args, cells, families, prompts, bench))
        board = Switchboard(bench)
        board.configure(ALL_CASES["ecospec_g4"])
        bench.run(prompts[names[0]][:1], 16)  # the first run pays for what is compiled and loaded lazily
        try:
            measure(board, cells, prompts, file, args.tokens, args.minutes)
        finally:
            board.configure(
                ALL_CASES["ar"]
            )  # the predictor's client is back in its place and is closed with the system
    write_report(args.out, header, file.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
