"""Profiling a small system on a clock of its own, which only the engine, the drafter and the predictor move on, by known costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCABULARY, ChainDrafter, ChainEngine, ChainFootprints  # noqa: E402

from ecospec_orchestrator import cli, profiling
from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import DraftTree, Footprints, SettingsError
from ecospec_orchestrator.engine.base import Verified, VerifyItem
from ecospec_orchestrator.footprint.base import TreeContext
from ecospec_orchestrator.profiling import (
    ProfilingPolicy,
    binding_of,
    collect,
    default_profile_path,
    measure,
    profile_of,
    random_closed_set,
    require_writable,
)
from ecospec_orchestrator.profiling_report import conclusion, report
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.base import BatchView, StepOutcome
from ecospec_orchestrator.selection.cost import (
    Profile,
    ProfileError,
    StepCost,
    StepFeatures,
    StepSeconds,
    charges,
    distinct_pairs,
    fit,
)
from ecospec_orchestrator.selection.none import NonePolicy

LAYERS, EXPERTS, TOP_K = 4, 32, 2
COST = StepCost(8e-3, 3e-4, 3e-4, 3e-5, 2e-6, 2e-3, 3e-4, 1e-3, 2e-4, 3e-3, 5e-4)
TREE = DraftTree(
    np.arange(10, dtype=np.int32),
    np.array([-1, -1, 0, 0, 1, 1, 2, 2, 3, 3], np.int32),
    np.array([0.6, 0.3, 0.4, 0.1, 0.2, 0.1, 0.3, 0.1, 0.05, 0.04], np.float32),
    np.array([1, 1, 2, 2, 2, 2, 3, 3, 3, 3], np.int32),
)


class Clock:
    """Stands in for the module time, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


CLOCK = Clock()


def wait(seconds: float) -> None:
    CLOCK.now += seconds


def levels(tree: DraftTree, depth: int) -> DraftTree:
    n = int((tree.depths <= depth).sum())
    return DraftTree(tree.tokens[:n], tree.parents[:n], tree.probabilities[:n], tree.depths[:n])


class SlowEngine(ChainEngine):
    def prefill(self, sequence: Any, tokens: np.ndarray) -> np.ndarray:
        wait(1e-3 + 1e-5 * len(tokens))
        return super().prefill(sequence, tokens)

    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        verified = super().verify(items)
        experts = [v.experts for v in verified]
        context = sum(len(i.sequence) + 1 for i in items)
        wait(COST.verify(len(items), sum(len(e) for e in experts), distinct_pairs(experts), context) / 10)
        return verified


class SlowDrafter(ChainDrafter):
    def extend(self, states: Sequence[Any], features: Sequence[Any], next_tokens: Sequence[Any]) -> None:
        super().extend(states, features, next_tokens)
        wait(COST.feeding(sum(len(t) for t in next_tokens)) / 10)

    def draft(self, states: Sequence[Any], another_level: Callable | None = None) -> list[DraftTree]:
        assert another_level is not None

        def slowly(trees: list[DraftTree], level: int) -> bool:
            wait(COST.draft(1, len(states)) / 10)
            return another_level(trees, level)

        trees = super().draft(states, slowly)
        if trees[0].depths.max() == self.max_levels:  # nobody is asked after the last one
            wait(COST.draft(1, len(states)) / 10)
        return trees


class SlowFootprints(ChainFootprints):
    def begin(self, trees: Sequence[TreeContext]) -> Callable[[], list[Footprints]]:
        answer = super().begin(trees)
        wait(COST.predicting(len(trees)) / 10)
        return answer


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module in ("profiling_workload", "scheduler", "prefill"):
        monkeypatch.setattr(f"ecospec_orchestrator.{module}.time", CLOCK)
    scheduler = Scheduler(SlowEngine(), SlowDrafter(), SlowFootprints(), NonePolicy(), Limits(4, 1, 96), Ledger())
    yield SimpleNamespace(
        scheduler=scheduler, tokenizer=lambda text: {"input_ids": [b % VOCABULARY for b in text.encode()][::8]}
    )
    scheduler.stop()


def test_a_system_is_measured_and_left_as_it_was(system: Any, tmp_path: Path) -> None:
    scheduler, shown = system.scheduler, list[str]()
    sampled: list[object] = []
    scheduler.on_verified = sample = lambda *step: sampled.append(step)
    kept = scheduler.policy, scheduler.limits, scheduler.ledger, sample
    samples = collect(system, 2.0, shown.append)
    assert (scheduler.policy, scheduler.limits, scheduler.ledger, scheduler.on_verified) == kept and scheduler.alive
    assert not sampled, "made-up text must not reach the predictor"
    assert scheduler.running == scheduler.waiting == 0
    assert any(re.fullmatch(r"profiling: \d+%, \d s left, \d+ steps measured", line) for line in shown)
    assert {f.requests for f, _ in samples} >= {1, 2, 4}

    for name in ("requests", "tokens", "pairs", "context_tokens", "draft_levels", "fed_rows", "predicted_requests"):
        assert len({getattr(f, name) for f, _ in samples}) >= 4, name
    profile = profile_of(samples, binding_of(scheduler.engine, scheduler.drafter, scheduler.footprint_source))
    for name, value in asdict(COST).items():
        assert getattr(profile.cost, name) == pytest.approx(value / 10, rel=1e-3), name
    assert profile.quality.samples == len(samples[::5])

    text = report(profile, samples)
    assert all(name in text for name in asdict(profile.cost))
    assert re.search(
        r"At batch 1 a draft node costs about \d+% of a plain step .* (pays when its probability|never)", text
    )
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_measure_needs_one_call_and_can_be_repeated(system: Any) -> None:
    first = measure(system, 1.0, lambda _: None)
    second = measure(system, 1.0, lambda _: None)
    first.check(second.binding)
    assert "SlowEngine" in first.binding.engine and "depth 3, top_k 2" in first.binding.drafter
    assert first.binding.target == SlowEngine.geometry.fingerprint and "threads" in first.binding.device


def play(policy: ProfilingPolicy, count: int, depth: int = 3) -> None:
    """The policy's own calls in the scheduler's order, on a made-up clock that follows COST exactly."""
    random, unfed = np.random.default_rng(1), np.ones(8, np.int64)
    for step in range(count):
        requests = (1, 2, 4, 8)[step // 40 % 4]
        context = random.integers(10, 400, requests)
        wanted = policy.begin_step(
            BatchView(("r",) * requests, np.zeros(requests), context, np.full(requests, 50), unfed[:requests])
        )
        drafted, run = int(wanted.sum()), 0
        if drafted:
            run = 1
            while run < depth and policy.another_level([TREE] * requests, run):
                run += 1
        trees = [levels(TREE, run) if w else DraftTree.empty() for w in wanted]
        asked = bool(drafted) and policy.wants_footprints(trees)
        chosen = policy.choose(trees, None)
        fed = int(unfed[:requests][wanted].sum())
        unfed[:requests] = np.where(wanted, 0, unfed[:requests]) + random.integers(1, 4, requests)
        experts = [random.integers(0, EXPERTS, (1 + len(c), LAYERS, TOP_K)) for c in chosen]
        f = StepFeatures(
            requests,
            sum(len(e) for e in experts),
            distinct_pairs(experts),
            int(context.sum()),
            run,
            drafted,
            fed,
            requests if asked else 0,
        )
        policy.end_step(
            StepOutcome(
                trees=trees,
                chosen=chosen,
                accepted_nodes=[],
                mass=[],
                experts=experts,
                draft_seconds=COST.draft(run, drafted) + COST.feeding(fed),
                predict_seconds=COST.predicting(f.predicted_requests),
                select_seconds=1e-4,
                verify_seconds=COST.verify(f.requests, f.tokens, f.pairs, f.context_tokens),
                fed_rows=fed,
                draft_levels=run,
                drafted_requests=drafted,
                predicted=asked,
            )
        )
        assert policy.samples[-1][0] == f


@pytest.mark.parametrize("seed", range(3))
def test_its_steps_tell_every_coefficient_from_the_others(seed: int) -> None:
    policy = ProfilingPolicy(seed)
    play(policy, 300)
    cost, _ = fit(policy.samples)
    for name, value in asdict(COST).items():
        assert getattr(cost, name) == pytest.approx(value, rel=1e-4), name
    columns = np.array([list(charges(COST, f).values()) for f, _ in policy.samples])
    assert np.linalg.cond(columns / np.linalg.norm(columns, axis=0)) < 60
    text = report(profile_of(policy.samples, binding_of(SlowEngine(), SlowDrafter(), object())), policy.samples)
    plain = COST.fixed + COST.per_request
    assert "whole step 0.0% (1.00)" in text and f"{COST.fixed * 1e6:.2f}" in text and plain > 0


def test_a_drafter_of_one_level_can_be_profiled() -> None:
    policy = ProfilingPolicy()
    play(policy, 300, depth=1)
    cost, _ = fit(policy.samples)
    assert cost.draft(1, 2) + cost.feeding(3) == pytest.approx(COST.draft(1, 2) + COST.feeding(3))


def test_random_sets_are_closed_and_reach_every_size() -> None:
    random = np.random.default_rng(0)
    for count in [*range(len(TREE) + 1)] * 5:
        nodes = random_closed_set(TREE, count, random)
        assert nodes.dtype == np.int32 and len(nodes) == count and (np.diff(nodes) > 0).all()
        assert {int(TREE.parents[n]) for n in nodes} <= {-1, *nodes.tolist()}


def test_unanswered_questions_are_no_measurements(system: Any) -> None:
    system.scheduler.footprint_source.down = True
    with pytest.raises(ProfileError, match=r"The predictor answered 0 of \d+ calls in time; .*DEADLINE"):
        collect(system, 1.0, lambda _: None)
    assert system.scheduler.policy.name == "none"


def test_a_system_without_a_predictor_has_a_profile_of_its_own(system: Any) -> None:
    system.scheduler.footprint_source = None
    samples = collect(system, 1.0, lambda _: None)
    binding = binding_of(system.scheduler.engine, system.scheduler.drafter, None)
    profile = profile_of(samples, binding)
    assert profile.binding.predictor == "none" and profile.cost.predict == profile.cost.predict_request == 0
    assert profile.cost.fixed > 0 and profile.cost.draft_level > 0
    with pytest.raises(ProfileError, match="0 measured steps asked the predictor"):
        profile_of(samples, replace(binding, predictor="remote"))


def test_what_cannot_be_profiled_is_refused(system: Any) -> None:
    scheduler = system.scheduler
    with pytest.raises(ProfileError, match="The cost cannot be fitted: 0 measured steps"):
        profile_of([], binding_of(scheduler.engine, None, scheduler.footprint_source))
    scheduler.engine.fail = True
    with pytest.raises(ProfileError, match="The engine stopped while it was profiled: the engine failed"):
        collect(system, 1.0, lambda _: None)
    scheduler.drafter = None
    with pytest.raises(ProfileError, match="no drafter, so there"):
        collect(system, 1.0, lambda _: None)


def test_a_node_that_costs_more_than_a_plain_step_never_pays() -> None:
    dear = StepCost(1e-3, 0, 5e-3, 1e-3, 0, 0, 0, 0, 0, 0, 0)
    plain, speculated = StepFeatures(4, 4, 30, 40), StepFeatures(4, 10, 390, 40, 3, 4, 4, 4)
    assert "it never pays, however likely it is" in conclusion(dear, plain, speculated)
    cheap = StepCost(10e-3, 0, 1e-3, 0, 0, 0, 0, 0, 0, 0, 0)
    one = StepFeatures(1, 1, 30, 40)
    assert "costs about 9% of a plain step" in conclusion(cheap, one, StepFeatures(1, 4, 50, 40, 3, 1, 1, 1))
    assert "above about 0.09" in conclusion(cheap, one, StepFeatures(1, 4, 50, 40, 3, 1, 1, 1))


def test_the_default_path_depends_on_the_binding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    binding = binding_of(SlowEngine(), SlowDrafter(), None)
    assert default_profile_path(binding) == tmp_path / "ecospec" / f"profile-{binding.digest}.json"
    assert default_profile_path(binding_of(SlowEngine(), None, None)) != default_profile_path(binding)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_profile_path(binding).parent == tmp_path / ".cache" / "ecospec"


def test_a_bad_out_is_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for bad in (tmp_path, tmp_path / "file" / "profile.json"):
        with pytest.raises(SettingsError, match="Option --out is '.*', which cannot be written"):
            require_writable(bad)
    require_writable(tmp_path / "file")
    require_writable(tmp_path / "new" / "folder" / "profile.json")
    assert cli.main(["profile", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"Option --out is '{tmp_path}', which cannot be written; give a file")
    seen: list[Any] = []
    monkeypatch.setattr(profiling, "run", lambda settings, out, seconds: seen.append((out, seconds)) or 0)
    assert cli.main(["profile", "--quick"]) == cli.main(["profile", "--out", "a.json"]) == 0
    assert seen == [(None, 20.0), (Path("a.json"), 60.0)]


def test_seconds_add_up_by_coefficient() -> None:
    f = StepFeatures(2, 9, 300, 50, 3, 2, 4, 2)
    assert sum(charges(COST, f).values()) == pytest.approx(COST.total(f))
    assert StepSeconds(1.0, 2.0, 3.0).total == 6
