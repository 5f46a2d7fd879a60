"""What a run leaves behind: sums over its steps, result rows made from them, and a file of runs that can be resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_orchestrator.core import StepReport

PARTS = ("draft", "predict", "select", "verify")


@dataclass(frozen=True)
class RunSums:
    """Sums over the decode steps of one or more runs. Times are seconds, sizes are bytes.

    requests: summed over steps, so emitted / requests is the acceptance length; accepted[n]: times that a request had n
    draft tokens accepted in a step; experts: sum over steps of the mean over layers of distinct experts; overlap:
    predicted, actual and common (layer, expert) pairs; not_speculated: steps by reason; step_time_errors: expected over
    measured seconds minus 1 of every step for which the policy had an estimate.
    """

    steps: int
    requests: int
    emitted: int
    nodes: int
    seconds: float
    draft_seconds: float
    predict_seconds: float
    select_seconds: float
    verify_seconds: float
    experts: float
    upper_bound_bytes: int
    autoregressive_bytes: float
    fallback_steps: int
    probes: int
    accepted: list[int]
    overlap: list[int]
    bytes_read: dict[str, int]
    not_speculated: dict[str, int]
    step_time_errors: list[float]

    @property
    def speed(self) -> float:
        """Tokens per second, all requests together."""
        return self.emitted / self.seconds

    @staticmethod
    def of(steps: Sequence[StepReport], time_excludes_prediction: bool = False) -> RunSums:
        """time_excludes_prediction: an oracle's prediction is a second forward that no server would run."""
        accepted = Counter(n for s in steps for n in s.accepted)
        decisions = [s.decision for s in steps]
        reasons = Counter(
            d.not_speculated if d is not None and d.not_speculated else "not said"
            for s, d in zip(steps, decisions, strict=True)
            if not s.speculated
        )
        predict = 0.0 if time_excludes_prediction else sum(s.predict_seconds for s in steps)
        overlaps = [s.predicted_actual_overlap for s in steps if s.predicted_actual_overlap]
        return RunSums(
            steps=len(steps),
            requests=sum(s.requests for s in steps),
            emitted=sum(s.emitted for s in steps),
            nodes=sum(s.nodes for s in steps),
            seconds=sum(s.step_seconds - (s.predict_seconds if time_excludes_prediction else 0.0) for s in steps),
            draft_seconds=sum(s.draft_seconds for s in steps),
            predict_seconds=predict,
            select_seconds=sum(s.select_seconds for s in steps),
            verify_seconds=sum(s.verify_seconds for s in steps),
            experts=float(sum(s.distinct_experts.mean() for s in steps)),
            upper_bound_bytes=sum(s.bytes_upper_bound for s in steps),
            autoregressive_bytes=float(sum(s.bytes_autoregressive for s in steps)),
            fallback_steps=sum(s.fallback is not None for s in steps),
            probes=sum(d is not None and d.probe for d in decisions),
            accepted=[accepted[n] for n in range(max(accepted, default=-1) + 1)],
            overlap=[int(v) for v in np.sum(overlaps, axis=0)] if overlaps else [],
            bytes_read={
                f.name: int(sum(getattr(s.bytes_read, f.name) for s in steps)) for f in fields(steps[0].bytes_read)
            },
            not_speculated=dict(reasons),
            step_time_errors=[
                round(d.expected_seconds / s.step_seconds - 1, 4)
                for s, d in zip(steps, decisions, strict=True)
                if d is not None and d.expected_seconds is not None
            ],
        )

    @staticmethod
    def total(runs: Sequence[RunSums]) -> RunSums:
        """One or more runs as if they were one."""
        how = {"accepted": _add_by_position, "overlap": _add_by_position, "step_time_errors": _join}
        return RunSums(**{f.name: how.get(f.name, _add)([getattr(r, f.name) for r in runs]) for f in fields(RunSums)})


def _add(values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: sum(v.get(key, 0) for v in values) for key in dict.fromkeys(key for v in values for key in v)}
    return sum(values)


def _join(values: Sequence[Sequence[float]]) -> list[float]:
    return list(chain.from_iterable(values))


def _add_by_position(values: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*values, fillvalue=0)]


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median with the 10 and 90 % quantiles."""
    low, median, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    return {"median": float(median), "low": float(low), "high": float(high)}


def row(
    policy: str,
    gamma: int,
    temperature: float,
    batch: int,
    family: str,
    runs: Sequence[RunSums],
    base: Sequence[RunSums],
) -> dict[str, Any]:
    """runs and base hold the same groups of prompts in the same order; the ratio is taken group by group."""
    total = RunSums.total(runs)
    return {
        "policy": policy,
        "gamma": gamma,
        "temperature": temperature,
        "batch": batch,
        "family": family,
        "tokens_per_second": total.speed,
        "ratio_to_ar": spread([run.speed / plain.speed for run, plain in zip(runs, base, strict=True)]),
        "acceptance_length": total.emitted / total.requests,
        "experts_per_layer_step": total.experts / total.steps,
        "bytes_per_token": sum(total.bytes_read.values()) / total.emitted,
        "upper_bound_bytes_per_token": total.upper_bound_bytes / total.emitted,
        "prediction_recall": total.overlap[2] / total.overlap[1] if total.overlap and total.overlap[1] else None,
        "fallback_steps": total.fallback_steps,
        "share_of_time": {k: getattr(total, f"{k}_seconds") / total.seconds for k in PARTS},
        "groups": len(runs),
        "tokens": total.emitted,
    }


Key = tuple[str, int, float, int, str, int]  # family, batch, temperature, group, case, repeat


def key_of(record: dict[str, Any]) -> Key:
    return tuple(record[name] for name in ("family", "batch", "temperature", "group", "case", "repeat"))  # type: ignore[return-value]


class RunFile:
    """JSON lines: a header, then one record per finished run. A line that a kill cut short is dropped."""

    def __init__(self, path: Path, header: dict[str, Any], say: Callable[[str], None] = print) -> None:
        """Goes on with the file when its header has the same "hash", otherwise starts afresh and keeps the old one aside."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        found, records = read_runs(path) if path.exists() else (None, [])
        if found is not None and found["hash"] == header["hash"]:
            self.records = records
            say(f"going on after {len(records)} runs in {path}")
        elif path.exists():
            old = path.with_name(path.name + ".old")
            path.replace(old)
            say(f"{path} is of another configuration or revision: starting afresh, the old runs are in {old}")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(line) + "\n" for line in (header, *self.records)]
        path.write_text("".join(lines), encoding="utf-8")
        self.done = {key_of(r) for r in self.records}

    def append(self, record: dict[str, Any], sums: RunSums) -> None:
        record = {**record, "sums": asdict(sums)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        self.done.add(key_of(record))


def read_runs(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The header (None when not even that is whole) and the records."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break  # only the last line can be cut
    return (lines[0], lines[1:]) if lines else (None, [])


def bench_rows(header: dict[str, Any], records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell and case, and per batch, temperature and case one of family "all" (main families only).

    Counted are the groups in which every run of the cell's plan is finished, so all cases of a cell hold the same groups.
    The repeats of a case count as one run, and so do those of AR, the base; case "ar_again" is its second against its first: the
    noise.
    """
    sums = {key_of(r): RunSums(**r["sums"]) for r in records}
    rows: list[dict[str, Any]] = []
    merged: dict[tuple[int, float, str], list[tuple[list[RunSums], list[RunSums]]]] = {}
    for cell in header["cells"]:
        family, batch, temperature = cell["family"], cell["batch"], cell["temperature"]
        groups = [
            g
            for g in range(cell["groups"])
            if all((family, batch, temperature, g, case, repeat) in sums for case, repeat in cell["runs"])
        ]
        if not groups:
            continue
        at = lambda case, repeat, family=family, batch=batch, temperature=temperature, groups=groups: [
            sums[family, batch, temperature, g, case, repeat] for g in groups
        ]
        repeats: dict[str, list[list[RunSums]]] = {}
        for case, repeat in cell["runs"]:
            repeats.setdefault(case, []).append(at(case, repeat))
        whole = {case: [RunSums.total(runs) for runs in zip(*found, strict=True)] for case, found in repeats.items()}
        base, (first, second, *_) = whole["ar"], repeats["ar"]
        pairs = {"ar_again": (second, first)} | {case: (runs, base) for case, runs in whole.items()}
        for case, (runs, plain) in pairs.items():
            rows.append(_bench_row(header, case, cell["ablation"], temperature, batch, family, runs, plain))
            if cell["ablation"] is None:
                merged.setdefault((batch, temperature, case), []).append((runs, plain))
    for (batch, temperature, case), parts in merged.items():
        runs, plain = ([run for part in parts for run in part[side]] for side in (0, 1))
        rows.append(_bench_row(header, case, None, temperature, batch, "all", runs, plain))
    return rows


def _bench_row(
    header: dict[str, Any],
    key: str,
    text_ablation: str | None,
    temperature: float,
    batch: int,
    family: str,
    runs: Sequence[RunSums],
    base: Sequence[RunSums],
) -> dict[str, Any]:
    case = header["cases"]["ar" if key == "ar_again" else key]
    total = RunSums.total(runs)
    errors = np.abs(total.step_time_errors)
    return {
        **row(case["policy"], case["gamma"], temperature, batch, family, runs, base),
        "case": key,
        "label": "AR again" if key == "ar_again" else case["label"],
        "ablation": case["ablation"] or text_ablation,
        "time_excludes_prediction": case["time_excludes_prediction"],
        "steps": total.steps,
        "nodes_per_request_step": total.nodes / total.requests,
        "accepted_histogram": total.accepted,
        "bytes_per_step": {k: v / total.steps for k, v in total.bytes_read.items()},
        "steps_not_speculated": total.not_speculated,
        "probe_steps": total.probes,
        "step_time_error": float(np.median(errors)) if len(errors) else None,
        "steps_with_estimate": len(errors),
        "group_tokens_per_second": [run.speed for run in runs],
    }
