"""Measure what a step of this system costs: real steps with random drafts, then a fit. `ecospec-orchestrator profile`."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from .accounting.ledger import Ledger
from .core import ROOT, Decision, DraftTree, Footprints, SettingsError
from .drafting.base import Drafter
from .engine.base import Engine
from .engine.torch.device import name_of
from .footprint.base import FootprintSource
from .footprint.channel import client_tls
from .predictor_process import PredictorProcess, is_serving, predictor_command
from .profiling_report import report
from .profiling_workload import SystemLike, Workload
from .selection.base import BatchView, FixedPolicy, StepOutcome
from .selection.cost import (
    Binding,
    Profile,
    ProfileError,
    Sample,
    StepFeatures,
    StepSeconds,
    assess,
    distinct_pairs,
    fit,
)
from .settings import Settings

SECONDS, QUICK_SECONDS = 60.0, 20.0
BATCH_SIZES = (1, 2, 4, 8)
WARM_UP_STEPS = 5  # dropped: first touches of memory, first call of the predictor
PREDICTOR_START_SECONDS = 60.0
PREDICTOR_DEADLINE_MS = 2000.0  # while profiling: a call that is cut off does not show what it costs
NO_PREDICTOR = "none"
COMMAND = "ecospec-orchestrator profile"


class ProfilingPolicy(FixedPolicy):
    """Draws everything that a policy may decide, so that each cost varies on its own: for whom to draft, how deep, whether
    to ask the predictor, which nodes to verify. Collects (features, seconds) of every step in `samples`."""

    name = "profiling"
    needs_drafts = True
    needs_footprints = True
    overlaps_prediction = False  # a call that hides behind drafting does not show what it costs

    def __init__(self, seed: int = 0) -> None:
        self.samples: list[Sample] = []
        self.questions = self.answers = 0
        self._random = np.random.default_rng(seed)
        self._context_tokens = 0
        self._levels = 0.0
        self._asked = False

    def begin_step(self, batch: BatchView) -> np.ndarray:
        self._context_tokens = int(batch.context_tokens.sum())
        self._levels, self._asked = self._random.random(), False
        if self._random.random() < 0.35:  # also makes rows gather that the drafter is fed later
            return np.zeros(len(batch), bool)
        return self._random.random(len(batch)) < self._random.choice([0.5, 1.0])

    def another_level(self, trees: Sequence[DraftTree], level: int) -> bool:
        return bool(self._random.random() < self._levels**0.5)

    def wants_footprints(self, trees: Sequence[DraftTree]) -> bool:
        self._asked = bool(self._random.random() < 0.6)
        self.questions += self._asked
        return self._asked

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """int32 node indices per tree: a random ancestor-closed set of random size, from nothing to the whole tree."""
        share = self._random.random() ** 1.5 if self._random.random() < 0.8 else 1.0
        return [random_closed_set(tree, round(share * len(tree)), self._random) for tree in trees]

    def end_step(self, outcome: StepOutcome) -> Decision:
        self.answers += outcome.predicted
        # A question without an answer says how long the deadline is, not what a prediction costs.
        answered = self._asked and outcome.predicted
        features = StepFeatures(
            requests=len(outcome.chosen),
            tokens=sum(len(experts) for experts in outcome.experts),
            pairs=distinct_pairs(outcome.experts),
            context_tokens=self._context_tokens,
            draft_levels=outcome.draft_levels,
            drafted_requests=outcome.drafted_requests,
            fed_rows=outcome.fed_rows,
            predicted_requests=len(outcome.chosen) if answered else 0,
        )
        seconds = StepSeconds(
            outcome.draft_seconds, outcome.predict_seconds if answered else 0.0, outcome.verify_seconds
        )
        self.samples.append((features, seconds))
        return super().end_step(outcome)


def random_closed_set(tree: DraftTree, count: int, random: np.random.Generator) -> np.ndarray:
    """int32, ascending: count nodes of the tree, grown from the root by one random node after the other."""
    taken: set[int] = {ROOT}
    parents = tree.parents.tolist()
    for _ in range(count):
        open_nodes = [n for n, parent in enumerate(parents) if parent in taken and n not in taken]
        taken.add(int(random.choice(open_nodes)))
    return np.array(sorted(taken - {ROOT}), np.int32)


def measure(system: SystemLike, seconds: float, progress: Callable[[str], None]) -> Profile:
    """Run random steps for so long and fit their cost. The system must be idle; its scheduler is started when it does not
    run yet, and goes on running with its own policy. progress gets a line now and then. Raises ProfileError."""
    scheduler = system.scheduler
    binding = binding_of(scheduler.engine, scheduler.drafter, scheduler.footprint_source)
    return profile_of(collect(system, seconds, progress), binding)


def collect(system: SystemLike, seconds: float, progress: Callable[[str], None]) -> list[Sample]:
    """The measured steps, warm-up left out; otherwise as measure()."""
    scheduler = system.scheduler
    if scheduler.drafter is None:
        raise ProfileError("This system has no drafter, so there is no speculation to profile.")
    if scheduler.running or scheduler.waiting:
        raise ProfileError("Requests are running, so their steps would be measured, too; profile an idle system.")
    policy = ProfilingPolicy()
    kept = scheduler.policy, scheduler.limits, scheduler.ledger, scheduler.on_verified
    # One request alone would not tell the cost of a request from that of a step. Metrics count what is served, not this.
    most = max(2, scheduler.limits.max_running)
    limits = replace(scheduler.limits, max_running=most, max_waiting=2 * most)
    scheduler.policy, scheduler.limits, scheduler.ledger, scheduler.on_verified = policy, limits, Ledger(), None
    try:
        if not scheduler.alive:
            scheduler.start()
        Workload(system, policy.samples, seconds, progress).run([size for size in BATCH_SIZES if size <= most])
    finally:
        scheduler.policy, scheduler.limits, scheduler.ledger, scheduler.on_verified = kept
    if policy.answers < policy.questions / 2:
        raise ProfileError(
            f"The predictor answered {policy.answers} of {policy.questions} calls in time; see why, or give it longer with "
            "ECOSPEC_PREDICTOR_DEADLINE_MS."
        )
    return policy.samples[WARM_UP_STEPS:]


def profile_of(samples: Sequence[Sample], binding: Binding) -> Profile:
    """Fit all samples; the quality is that of a fit to four fifths of them on the rest. Raises ProfileError."""
    try:
        with_predictor = binding.predictor != NO_PREDICTOR
        trial, _ = fit([sample for i, sample in enumerate(samples) if i % 5], with_predictor)
        cost, _ = fit(samples, with_predictor)
    except ValueError as error:
        raise ProfileError(f"The cost cannot be fitted: {error}") from error
    return Profile(cost, assess(trial, samples[::5]), binding, date.today().isoformat(), COMMAND)


def binding_of(engine: Engine, drafter: Drafter | None, source: FootprintSource | None) -> Binding:
    """What a cost measured on these is good for."""
    model = getattr(engine, "model", None)
    stored: Counter[str] = Counter()
    device = torch.device("cpu")
    for weight in model.parameters() if model is not None else ():
        stored[str(weight.dtype).removeprefix("torch.")] += weight.numel() * weight.element_size()
        device = weight.device
    if device.type == "cuda":
        name = f"{name_of(device)}, {getattr(engine, 'computed_by', 'not known')}"
    else:  # the engine's own number: torch's differs from thread to thread
        name = f"{name_of(device)}, {getattr(engine, 'threads', 0) or torch.get_num_threads()} threads"
    return Binding(
        engine=f"{type(engine).__name__} {version('ecospec-orchestrator')}, torch {torch.__version__}",
        target=engine.geometry.fingerprint,
        drafter="none"
        if drafter is None
        else f"{type(drafter).__name__}, depth {drafter.max_levels}, top_k {getattr(drafter, 'top_k', 1)}",
        predictor=NO_PREDICTOR if source is None else type(source).__name__,
        device=name,
        dtype=stored.most_common(1)[0][0] if stored else "not known",
    )


def default_profile_path(binding: Binding) -> Path:
    """Where a profile is kept and looked for when no setting names one."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ecospec" / f"profile-{binding.digest}.json"


def run(settings: Settings, out: Path | None, seconds: float) -> int:
    """The command: build the system as serving does, measure, print the table, write the file. Raises SettingsError,
    ProfileError."""
    from .loading import DEMO, gguf_path
    from .system import build_system

    out = out if out is not None else settings.profile
    if out is not None:
        require_writable(out)
    settings = settings.model_copy(
        update={
            "predictor_deadline_ms": max(settings.predictor_deadline_ms, PREDICTOR_DEADLINE_MS),
            "policy": "none",  # which needs no profile
        }
    )
    predictor = None
    if settings.footprints == "predictor" and not is_serving(settings.predictor_address, client_tls(settings)):
        if settings.model != DEMO:
            raise SettingsError(
                f"Setting predictor_address is {settings.predictor_address}, where no predictor answers; start the one of this "
                "model, or measure without one by --footprints none (and serve with the same)."
            )
        predictor = PredictorProcess(predictor_command(settings, gguf_path(settings)))
        predictor.start()
    try:
        system = build_system(settings, say)
        try:
            if predictor is not None and not predictor.wait_until_serving(
                settings.predictor_address, PREDICTOR_START_SECONDS
            ):
                raise ProfileError(
                    f"No predictor answers on {settings.predictor_address}; see its messages above, or free the address."
                )
            time.sleep(1)  # the client connects within its back-off
            samples = collect(system, seconds, say)
        finally:
            system.close()
    finally:
        if predictor is not None:
            predictor.stop()
    scheduler = system.scheduler
    profile = profile_of(samples, binding_of(scheduler.engine, scheduler.drafter, scheduler.footprint_source))
    path = out if out is not None else default_profile_path(profile.binding)
    profile.save(path)
    print(report(profile, samples), f"Written to {path}.", sep="\n", flush=True)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def require_writable(path: Path) -> None:
    """Before a minute is spent. Raises SettingsError."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise SettingsError(f"Option --out is '{path}', which cannot be written; give a file in a folder that can be.")
