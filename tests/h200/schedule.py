"""Measures how long chains of drafts should be at each batch size, and writes the file of the setting draft_len_schedule.

    schedule.py OUT.json [--longest 4] [--batches 1,2,4,8] -- OPTIONS OF ecospec-orchestrator serve, --drafter among them

The engine is started once for each length, since a length is captured in its graphs. Not yet run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from compare import load_prompts
from served import Server, serving

from ecospec_orchestrator.engine.tensorrt_llm.plugin.chains import best_lengths, conditional_acceptance, schedule


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--longest", type=int, default=4, help="drafts of one request in a step")
    numbers = lambda text: tuple(sorted(int(part) for part in text.split(",")))
    parser.add_argument("--batches", type=numbers, default=(1, 2, 4, 8), help="requests at a time")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("serve", nargs="+", help="options of ecospec-orchestrator serve, after --")
    options = parser.parse_args(arguments)
    prompts, batches = load_prompts(max(options.batches)), options.batches
    seconds = np.zeros((options.longest + 1, len(batches)))
    accepted = np.zeros(options.longest + 1)
    for length in range(options.longest + 1):
        chain = ["--policy", "likelihood", "--draft-depth", str(length), "--gamma", str(length), "--draft-top-k", "1"]
        chosen = [*options.serve, "--max-running", str(max(batches)), *(chain if length else ("--policy", "none"))]
        with serving(chosen, options.out.with_suffix(f".{length}.log")) as server:
            server.together(prompts, 8)  # what is compiled at first use
            for at, batch in enumerate(batches):
                seconds[length, at], counts = step_seconds(server, prompts[:batch], options.tokens, length)
                accepted += counts if length == options.longest else 0
        print(
            f"{length} drafts: {', '.join(f'{1e3 * s:.2f} ms at batch {b}' for s, b in zip(seconds[length], batches, strict=True))}"
        )
    chances = conditional_acceptance(accepted.tolist())
    cost = lambda requests, length: float(np.interp(requests, batches, seconds[length]))
    print(f"accepted where all before it was: {', '.join(f'{chance:.3f}' for chance in chances)}")
    if best_lengths(1, chances, cost, options.longest) == [0]:
        print("Drafting does not pay even for one request; serve with --policy none.")
        return 1
    lengths = best_lengths(max(batches), chances, cost, options.longest, shortest=1)
    print(f"best lengths: {lengths}")
    options.out.write_text(json.dumps(schedule(lengths)), encoding="utf-8")
    print(
        f"Serve with --policy goodput --draft-depth {lengths[0]} --gamma {lengths[0]} --draft-len-schedule {options.out}"
    )
    return 0


def step_seconds(server: Server, prompts: Sequence[str], tokens: int, length: int) -> tuple[float, np.ndarray]:
    """Of one step that all prompts share, and how many steps accepted 0, 1, ... drafts."""
    name = "request_decode_time_seconds_sum"
    before = server.metrics()[name]
    bodies = server.together(prompts, tokens)
    decoding = server.metrics()[name] - before
    steps, counts = 0, np.zeros(length + 1)
    for body in bodies:
        steps += body["metrics"]["ecospec"]["steps"]
        histogram = body["metrics"]["speculative_decoding"]["acceptance_histogram"]
        counts[: len(histogram)] += histogram
    return decoding / max(1, steps), counts


if __name__ == "__main__":
    raise SystemExit(main())
