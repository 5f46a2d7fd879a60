"""What could be reached at most: the same recorded steps, decided by different rules, priced by this machine's cost profile.

    python benchmarks/bounds.py [--tokens 64] [--out benchmarks/results]

Real steps in which the whole draft tree was verified are recorded (batch 1; larger batches put the steps of several prompts
together). Then every rule decides each step as if it were its own; tokens are those that the target really accepted, seconds
come from the measured profile and the experts that the rows really used. Every rule that drafts pays for the drafting in
every step but those that hindsight would not have drafted in; time for predictions is left out throughout, so that the
columns differ by what is known and how it is used; the greedy and the exact optimum are compared at one rate. Unlike `make bench`, nothing is timed here: it compares decisions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import SPEC_BENCH
from exact_selection import best_closure_exact
from families import default_names, fitting, load_families
from harness import ROOT, Bench, bench_system

from ecospec_orchestrator.core import Decision, DraftTree, Footprints
from ecospec_orchestrator.footprint.oracle import degrade
from ecospec_orchestrator.profiling import SECONDS
from ecospec_orchestrator.selection import make_policy
from ecospec_orchestrator.selection.base import SelectionPolicy, StepOutcome
from ecospec_orchestrator.selection.calibration import Calibrator
from ecospec_orchestrator.selection.cost import StepCost
from ecospec_orchestrator.selection.ecospec import EcoSpecPolicy
from ecospec_orchestrator.selection.goodput_kernel import best_closure
from ecospec_orchestrator.selection.pack import Pack, pack
from ecospec_orchestrator.system import load_profile
from ecospec_proto.codec import pack_bitsets
from ecospec_proto.geometry import TargetGeometry

BATCHES, TEMPERATURES, GAMMAS = (1, 2, 4, 8), (0.0, 1.0), (1, 2, 3, 4, 5, 6, 7, 8)
PROMPTS = 8  # per family
ACCURACIES = (0.5, 0.65, 0.8)  # of predictors that are compared with ours and with none
ROUNDS = 4  # of the fixed point of the rate; it has settled to four digits by then
LABELS = {
    "ecospec_g4": "EcoSpec g4",
    "best_gamma": "EcoSpec, best gamma in hindsight",
    "no_experts": "goodput, no experts",
    "predicted": "goodput, predicted experts",
    "accuracy_50": "50 % right",
    "accuracy_65": "65 % right",
    "accuracy_80": "80 % right",
    "true": "goodput, true experts",
    "exact": "exact optimum, true experts",
    "hindsight": "hindsight: acceptance known",
}


@dataclass(frozen=True)
class Recorded:
    """One request's step, all of its tree verified. accepted: node indices, a path; actual: true experts; degraded: what a
    predictor of each accuracy of ACCURACIES would have said."""

    tree: DraftTree
    predicted: Footprints
    actual: Footprints
    degraded: dict[float, Footprints]
    mass: np.ndarray
    accepted: np.ndarray


class Recorder(EcoSpecPolicy):
    """Verifies every node and keeps the steps."""

    def __init__(self, geometry: TargetGeometry) -> None:
        super().__init__(top_k=geometry.top_k, gamma=64)
        self.geometry = geometry
        self.steps: list[Recorded] = []
        self.footprints: Sequence[Footprints] | None = None
        self.random = np.random.default_rng(0)

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        self.footprints = footprints
        return super().choose(trees, footprints)

    def end_step(self, outcome: StepOutcome) -> Decision:
        tree, experts = outcome.trees[0], outcome.experts[0]
        if self.footprints is not None and len(tree) and len(experts) == 1 + len(tree):
            count = self.geometry.experts
            known = lambda ids: Footprints(pack_bitsets(ids, count), np.ones(len(ids), bool))
            degraded = {a: known(degrade(experts, count, a, self.random)) for a in ACCURACIES}
            self.steps.append(
                Recorded(tree, self.footprints[0], known(experts), degraded, outcome.mass[0], outcome.accepted_nodes[0])
            )
        return super().end_step(outcome)


def record(bench: Bench, prompts: Sequence[tuple[int, ...]], tokens: int, temperature: float) -> list[list[Recorded]]:
    """The steps of every prompt."""
    found = []
    for prompt in prompts:
        recorder = Recorder(bench.scheduler.engine.geometry)
        bench.scheduler.policy = recorder
        bench.run([prompt], tokens, temperature)
        found.append(recorder.steps)
    return found


@dataclass
class World:
    """Recorded steps of one cell, in the order in which a server would have seen them."""

    groups: list[list[Recorded]]
    values: list[list[np.ndarray]]  # calibrated path probabilities, of each step's requests
    cost: StepCost
    geometry: TargetGeometry
    context: int = 100  # tokens per request

    def plain(self, step: Sequence[Recorded]) -> float:
        roots = sum_pairs([s.actual.experts[:1] for s in step])
        return self.cost.verify(len(step), len(step), roots, self.context * len(step))

    def drafting(self, step: Sequence[Recorded]) -> float:
        return self.cost.draft(int(step[0].tree.depths.max()), len(step)) + self.cost.feeding(2 * len(step))

    def seconds(self, step: Sequence[Recorded], nodes: Sequence[np.ndarray]) -> float:
        """Of verification."""
        used = [s.actual.experts[np.concatenate([[0], 1 + n])] for s, n in zip(step, nodes, strict=True)]
        rows = len(step) + sum(len(n) for n in nodes)
        return self.cost.verify(len(step), rows, sum_pairs(used), self.context * len(step))

    def speed(self, choose: Callable[[int], list[np.ndarray]], always_drafts: bool = True) -> float:
        """Tokens per second of a rule from step number to nodes; one that does not always draft drafts where it verifies."""
        tokens = seconds = 0.0
        for at, step in enumerate(self.groups):
            nodes = choose(at)
            tokens += len(step) + sum(accepted(s, n) for s, n in zip(step, nodes, strict=True))
            seconds += self.seconds(step, nodes)
            if always_drafts or any(len(n) for n in nodes):
                seconds += self.drafting(step)
        return tokens / seconds

    def plain_speed(self) -> float:
        return self.speed(lambda at: [np.zeros(0, np.int64) for _ in self.groups[at]], always_drafts=False)

    def settled(self, choose: Callable[[int, float], list[np.ndarray]], always_drafts: bool = True) -> float:
        """Speed of a rule that takes the rate, at the rate that it makes itself."""
        rate = self.plain_speed()
        for _ in range(ROUNDS):
            rate = self.speed(partial(lambda at, rate: choose(at, rate), rate=rate), always_drafts)
        return rate


def sum_pairs(bitsets: Sequence[np.ndarray]) -> int:
    return int(np.bitwise_count(np.bitwise_or.reduce(np.concatenate(list(bitsets)), axis=0)).sum())


def accepted(step: Recorded, nodes: np.ndarray) -> int:
    """Tokens of the accepted path that these nodes hold."""
    inside = np.isin(step.accepted, nodes)
    return len(inside) if inside.all() else int(inside.argmin())


Knows = Callable[[Recorded], Footprints | None]


def greedy(world: World, at: int, rate: float, knows: Knows, unknown_share: float) -> tuple[Pack, np.ndarray]:
    step, shape, cost = world.groups[at], world.geometry, world.cost
    found = [f for s in step if (f := knows(s)) is not None]
    known = found or None
    packed = pack([s.tree for s in step], known, world.values[at])
    plain = world.plain(step)
    chosen, _, _ = best_closure(
        packed.experts,
        packed.known,
        packed.values,
        packed.parents,
        packed.offsets,
        layers=shape.moe_layers,
        experts_count=shape.experts,
        top_k=shape.top_k,
        fixed_seconds=plain,
        plain_seconds=plain,
        token_seconds=cost.per_token,
        pair_seconds=cost.per_pair,
        rate=rate,
        unknown_share=unknown_share,
        root_pairs=sum_pairs([s.actual.experts[:1] for s in step]),
    )
    return packed, chosen


def hindsight(world: World, at: int, rate: float) -> list[np.ndarray]:
    """The prefixes of the accepted paths that are worth their true cost; request by request, which is the optimum for one
    request and a lower bound for several."""
    step = world.groups[at]
    nodes = [np.zeros(0, np.int64) for _ in step]
    for _ in range(2):
        for i, s in enumerate(step):
            options = [s.accepted[:n].astype(np.int64) for n in range(len(s.accepted) + 1)]
            nodes[i] = max(
                options, key=lambda o, i=i: len(o) - rate * world.seconds(step, [*nodes[:i], o, *nodes[i + 1 :]])
            )
    net = sum(len(n) for n in nodes) - rate * (world.seconds(step, nodes) - world.plain(step) + world.drafting(step))
    return nodes if net > 0 else [np.zeros(0, np.int64) for _ in step]


def usual_share(world: World) -> float:
    """New pairs of a node over those of experts drawn at random, mean over the recorded trees."""
    shape, ratios = world.geometry, []
    for step in world.groups:
        roots = sum_pairs([s.actual.experts[:1] for s in step])
        free = 1 - roots / (shape.moe_layers * shape.experts)
        for s in step:
            added = [sum_pairs([s.actual.experts[:1], s.actual.experts[n : n + 1]]) for n in range(1, 1 + len(s.tree))]
            ratios.append((np.mean(added) - shape.moe_layers * shape.top_k) / (shape.moe_layers * shape.top_k * free))
    return float(np.mean(ratios))


def cell(world: World) -> dict[str, Any]:
    """Speed of every rule over plain decoding, and how far the greedy is from the exact optimum."""
    plain, share = world.plain_speed(), usual_share(world)

    def by_gamma(at: int, policy: SelectionPolicy) -> list[np.ndarray]:
        step = world.groups[at]
        return policy.choose([s.tree for s in step], [s.predicted for s in step])

    def by_greedy(at: int, rate: float, knows: Knows) -> list[np.ndarray]:
        packed, chosen = greedy(world, at, rate, knows, share)
        return packed.nodes(chosen)

    fixed = {
        gamma: world.speed(partial(by_gamma, policy=make_policy("ecospec", top_k=world.geometry.top_k, gamma=gamma)))
        for gamma in GAMMAS
    }
    best = max(fixed, key=lambda gamma: fixed[gamma])
    result: dict[str, Any] = {"ecospec_g4": fixed[4], "best_gamma": fixed[best]}
    known: dict[str, Knows] = {"no_experts": lambda s: None, "predicted": lambda s: s.predicted}
    known |= {f"accuracy_{round(100 * a)}": lambda s, a=a: s.degraded[a] for a in ACCURACIES}
    known["true"] = lambda s: s.actual
    for name, knows in known.items():
        result[name] = world.settled(partial(by_greedy, knows=knows))
    rate = result["true"]
    gaps: list[float] = []
    exact_nodes: dict[int, list[np.ndarray]] = {}
    for at, step in enumerate(world.groups):
        packed, chosen = greedy(world, at, rate, known["true"], share)
        optimum, _, _ = best_closure_exact(packed, world.plain(step), world.cost.per_token, world.cost.per_pair, rate)
        gaps.append(1 - worth(world, at, chosen, packed, rate) / worth(world, at, optimum, packed, rate))
        exact_nodes[at] = packed.nodes(optimum)
    result["exact"] = world.speed(lambda at: exact_nodes[at])
    result["hindsight"] = world.settled(partial(hindsight, world), always_drafts=False)
    return {
        "ratio_to_ar": {name: speed / plain for name, speed in result.items()},
        "best_gamma": best,
        "steps": len(world.groups),
        "greedy_gap_mean": float(np.mean(gaps)),
        "greedy_gap_worst": float(np.max(gaps)),
        "greedy_equals_exact": float(np.mean(np.array(gaps) <= 1e-9)),
    }


def worth(world: World, at: int, chosen: np.ndarray, packed: Pack, rate: float) -> float:
    """Expected tokens of the step (bonus tokens included) net of what its extra seconds are worth."""
    step = world.groups[at]
    extra = world.seconds(step, packed.nodes(chosen)) - world.plain(step)
    return len(step) + float(packed.values[chosen].sum()) - rate * extra


def grouped(streams: Sequence[list[Recorded]], batch: int) -> list[list[Recorded]]:
    """Steps of `batch` prompts side by side."""
    groups = []
    for start in range(0, len(streams) - batch + 1, batch):
        groups += [list(step) for step in zip(*streams[start : start + batch], strict=False)]
    return groups


def calibrated(
    groups: Sequence[Sequence[Recorded]], temperature: float, calibrator: Calibrator
) -> list[list[np.ndarray]]:
    """Values before learning from each step, as a server has them."""
    values = []
    for step in groups:
        values.append([calibrator.path_probabilities(s.tree, temperature) for s in step])
        for s in step:
            calibrator.observe(s.tree, s.mass, temperature)
    return values


def table(cells: Sequence[dict[str, Any]]) -> str:
    names = list(LABELS)
    lines = [
        "| batch | T | " + " | ".join(LABELS[n] for n in names) + " | greedy gap, mean (worst) |",
        "|---|---|" + "---|" * (len(names) + 1),
    ]
    for temperature in TEMPERATURES:
        for batch in BATCHES:
            of = [c for c in cells if (c["batch"], c["temperature"]) == (batch, temperature)]
            means = [np.exp(np.mean([np.log(c["ratio_to_ar"][n]) for c in of])) for n in names]
            gap, worst = np.mean([c["greedy_gap_mean"] for c in of]), max(c["greedy_gap_worst"] for c in of)
            lines.append(
                f"| {batch} | {temperature:g} | "
                + " | ".join(f"{m:.3f}" for m in means)
                + f" | {gap:.3%} ({worst:.1%}) |"
            )
    every = [np.exp(np.mean([np.log(c["ratio_to_ar"][n]) for c in cells])) for n in names]
    gap, worst = np.mean([c["greedy_gap_mean"] for c in cells]), max(c["greedy_gap_worst"] for c in cells)
    lines.append("| all | all | " + " | ".join(f"{m:.3f}" for m in every) + f" | {gap:.3%} ({worst:.1%}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--spec-bench", type=Path, default=SPEC_BENCH)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    families = load_families(args.spec_bench)
    began = time.monotonic()
    streams: dict[tuple[str, float], list[list[Recorded]]] = defaultdict(list)
    with bench_system(SECONDS) as bench:
        engine = bench.scheduler.engine
        profile = load_profile(bench.system.settings, engine, bench.drafter, bench.scheduler.footprint_source)
        for name in default_names(families):
            prompts = fitting(bench.encode, families[name].prompts, PROMPTS)
            for temperature in TEMPERATURES:
                streams[name, temperature] = record(bench, prompts, args.tokens, temperature)
                count = sum(len(s) for s in streams[name, temperature])
                print(f"{name}, T={temperature:g}: {count} steps, {time.monotonic() - began:.0f} s", flush=True)
        geometry, depth = engine.geometry, bench.drafter.max_levels
    cells = []
    for temperature in TEMPERATURES:
        for batch in BATCHES:
            calibrator = Calibrator(depth)
            for name in default_names(families):
                groups = grouped(streams[name, temperature], batch)
                world = World(groups, calibrated(groups, temperature, calibrator), profile.cost, geometry)
                cells.append({"family": name, "batch": batch, "temperature": temperature, **cell(world)})
            print(f"decided: T={temperature:g}, batch {batch}, {time.monotonic() - began:.0f} s", flush=True)
    result = {
        "command": f"python benchmarks/bounds.py --tokens {args.tokens}",
        "target": geometry.name,
        "sources": {name: families[name].source for name in default_names(families)},
        "cost_seconds": vars(profile.cost),
        "cells": cells,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bounds.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = f"`{result['command']}`: speed over plain decoding, geometric means over families.\n\n{table(cells)}\n"
    (args.out / "bounds.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
