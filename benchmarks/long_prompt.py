"""What a long prompt does to the others: time between tokens of running answers before, while it is computed and after, and the
same prompt once more, from shared pages.

    python benchmarks/long_prompt.py [--prompt-tokens 2000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, StepReport, TokenEvent
from ecospec_orchestrator.loading import load
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.settings import Settings

RUNNING, ALONE_STEPS, SETTLE_STEPS = (1, 4, 15), 60, 20
COLUMNS = (
    "running answers",
    "ms between tokens alone",
    "with the long prompt: mean",
    "ratio",
    "longest gap, ms",
    "long prompt, s",
    "again, s",
)


class Run:
    """The demo target under plain decoding, its steps timed."""

    def __init__(self, scheduler: Scheduler, prompt_tokens: int) -> None:
        self.scheduler, self.prompt_tokens = scheduler, prompt_tokens
        self.ends: list[float] = []
        self.events: queue.Queue[TokenEvent] = queue.Queue()
        self._random = np.random.default_rng(0)
        self._names = 0
        self.batch = 0  # requests in the last step
        scheduler.on_step = self._note

    def _note(self, report: StepReport) -> None:
        self.ends.append(time.perf_counter())
        self.batch = report.requests

    def submit(self, length: int, tokens: int, prompt: tuple[int, ...] | None = None) -> tuple[str, tuple[int, ...]]:
        self._names += 1
        prompt = prompt or tuple(self._random.integers(100, 40000, length).tolist())
        self.scheduler.submit(Request(str(self._names), prompt, tokens), self.events.put)
        return str(self._names), prompt

    def wait_for(self, name: str) -> TokenEvent:
        while (event := self.events.get(timeout=600)).request_id != name or event.finish_reason is None:
            pass
        return event

    def steps(self, count: int) -> list[float]:
        """Seconds between the ends of so many further steps."""
        first = len(self.ends)
        while len(self.ends) < first + count + 1:
            time.sleep(0.005)
        return np.diff(self.ends[first : first + count + 1]).tolist()

    def measure(self, running: int) -> dict[str, float]:
        names = [self.submit(40 + 5 * i, 1500)[0] for i in range(running)]
        while self.batch < running:
            time.sleep(0.02)
        self.steps(SETTLE_STEPS)
        alone = self.steps(ALONE_STEPS)
        first = len(self.ends)
        name, prompt = self.submit(self.prompt_tokens, 2)
        stats = self.wait_for(name).stats
        beside = np.diff(self.ends[first - 1 :])
        again, _ = self.submit(0, 2, prompt)
        repeated = self.wait_for(again).stats
        for each in names:
            self.scheduler.cancel(each)
        while self.scheduler.running:
            time.sleep(0.02)
        assert stats is not None and repeated is not None
        return {
            "alone_ms": 1e3 * float(np.mean(alone)),
            "beside_ms": 1e3 * float(beside.mean()),
            "ratio": float(beside.mean() / np.mean(alone)),
            "longest_gap_ms": 1e3 * float(beside.max()),
            "prefill_seconds": stats.prefill_seconds,
            "again_seconds": repeated.prefill_seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    settings = Settings(demo_dir=ROOT / "models" / "demo", drafter="none", max_context_tokens=4096, max_running=17)
    engine = load(settings, lambda text: print(text, flush=True)).engine
    limits = Limits(settings.max_running, 32, settings.max_context_tokens, settings.prefill_share)
    scheduler = Scheduler(engine, None, None, make_policy("none"), limits, Ledger())
    scheduler.start()
    run, rows = Run(scheduler, args.prompt_tokens), list[dict[str, Any]]()
    try:
        found: dict[int, list[dict[str, float]]] = {count: [] for count in RUNNING}
        for repeat in range(args.repeats):
            for count in RUNNING:
                found[count].append(run.measure(count))
                print(f"repeat {repeat + 1} of {args.repeats}, {count} running: {found[count][-1]}", flush=True)
    finally:
        scheduler.stop()
    for count, runs in found.items():
        rows.append({"running": count, **{key: float(np.median([r[key] for r in runs])) for key in runs[0]}})
    command = f"python benchmarks/long_prompt.py --prompt-tokens {args.prompt_tokens} --repeats {args.repeats}"
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for r in rows:
        lines.append(
            f"| {r['running']} | {r['alone_ms']:.1f} | {r['beside_ms']:.1f} | {r['ratio']:.2f} | {r['longest_gap_ms']:.0f} | "
            f"{r['prefill_seconds']:.1f} | {r['again_seconds']:.2f} |"
        )
    text = "\n".join(lines)
    (args.out / "long_prompt.json").write_text(
        json.dumps({"command": command, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    (args.out / "long_prompt.md").write_text(
        f"`{command}`: a prompt of {args.prompt_tokens} tokens beside running answers, medians; prefill_share "
        f"{settings.prefill_share:g}.\n\n{text}\n",
        encoding="utf-8",
    )
    print(text)


if __name__ == "__main__":
    main()
