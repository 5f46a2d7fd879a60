"""The measured cost of a step: what the fit recovers, what the file refuses, how fast serving follows the machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecospec_orchestrator.core import EcoSpecError
from ecospec_orchestrator.selection.cost import (
    Binding,
    FitQuality,
    OnlineCost,
    Profile,
    ProfileError,
    Sample,
    StepCost,
    StepFeatures,
    StepSeconds,
    assess,
    distinct_pairs,
    fit,
)

TRUE = StepCost(8e-3, 5e-4, 4e-4, 3e-5, 2e-6, 2e-3, 3e-4, 1e-3, 2e-4, 3e-3, 5e-4)
BINDING = Binding("torch 2.13.0", "f" * 32, "EAGLE-3, depth 3, top_k 2", "remote", "Some CPU, 2 threads", "bfloat16")
PROFILE = Profile(
    TRUE, FitQuality(200, 0.03, 0.98, 0.04, 0.97, 0.03, 0.98), BINDING, "2026-01-31", "ecospec-orchestrator profile"
)


def steps(count: int, seed: int = 0) -> list[StepFeatures]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        requests = int(rng.choice([1, 2, 4, 8]))
        drafted = int(rng.integers(0, requests + 1))
        nodes = int(rng.integers(0, 10 * drafted + 1))
        tokens = requests + nodes
        pairs = int(30 * 32 * (1 - (1 - 4 / 32) ** (tokens * rng.uniform(0.5, 1.0))))
        made.append(
            StepFeatures(
                requests,
                tokens,
                pairs,
                int(requests * rng.integers(10, 400)),
                int(rng.integers(1, 4)) if drafted else 0,
                drafted,
                int(drafted * rng.integers(1, 5)),
                drafted if rng.random() < 0.5 else 0,
            )
        )
    return made


def seconds(
    features: StepFeatures, cost: StepCost, rng: np.random.Generator, noise: float = 0.04, factor: float = 1.0
) -> StepSeconds:
    f = features
    parts = (
        cost.draft(f.draft_levels, f.drafted_requests) + cost.feeding(f.fed_rows),
        cost.predicting(f.predicted_requests),
        cost.verify(f.requests, f.tokens, f.pairs, f.context_tokens),
    )
    return StepSeconds(*(float(p * factor * np.exp(noise * rng.normal())) for p in parts))


def samples(count: int, noise: float = 0.04, outliers: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for f in steps(count, seed):
        factor = rng.uniform(3, 30) if rng.random() < outliers else 1.0
        made.append((f, seconds(f, TRUE, rng, noise, factor)))
    return made


def test_fit_recovers_exact_coefficients_from_exact_seconds() -> None:
    cost, quality = fit(samples(200, noise=0.0))
    for name, value in asdict(TRUE).items():
        assert getattr(cost, name) == pytest.approx(value, rel=1e-6), name
    assert quality.samples == 200 and quality.step_error < 1e-9 and quality.verify_r_squared == pytest.approx(1)


@pytest.mark.parametrize("seed", range(3))
def test_fit_recovers_coefficients_from_noise_and_outliers(seed: int) -> None:
    cost, quality = fit(samples(1500, noise=0.04, outliers=0.05, seed=seed))
    tolerance = {"per_context_token": 0.5, "feed": 0.5, "per_request": 0.5}  # small shares of a step
    for name, value in asdict(TRUE).items():
        assert getattr(cost, name) == pytest.approx(value, rel=tolerance.get(name, 0.15)), name
    held_out = assess(cost, samples(500, noise=0.04, seed=seed + 100))
    assert quality.step_error < 0.04 and held_out.step_error < 0.035 and held_out.draft_r_squared > 0.95


def test_coefficients_are_never_negative_and_the_cost_never_falls() -> None:
    rng = np.random.default_rng(3)
    noisy = [
        (f, StepSeconds(*rng.uniform(1e-4, 1e-2, 3))) for f in steps(300, 3)
    ]  # seconds that features do not explain
    cost, quality = fit(noisy)
    assert all(value >= 0 for value in asdict(cost).values())
    assert quality.verify_r_squared < 0.3
    for f in steps(50, 4):
        for field in fields(StepFeatures):
            more = replace(f, **{field.name: getattr(f, field.name) + 1})
            assert cost.total(more) >= cost.total(f)


def test_total_is_the_sum_of_its_parts_and_parts_not_run_cost_nothing() -> None:
    plain = StepFeatures(2, 2, 100, 50)
    assert TRUE.total(plain) == TRUE.verify(2, 2, 100, 50)
    assert TRUE.draft(0, 5) == TRUE.feeding(0) == TRUE.predicting(0) == 0
    full = StepFeatures(2, 9, 300, 50, 3, 2, 4, 2)
    assert TRUE.total(full) == pytest.approx(
        TRUE.verify(2, 9, 300, 50) + TRUE.draft(3, 2) + TRUE.feeding(4) + TRUE.predicting(2)
    )


def test_a_drafter_of_one_level_is_fed_and_run_at_one_price() -> None:
    rng = np.random.default_rng(0)
    shallow = [replace(f, draft_levels=min(1, f.draft_levels)) for f in steps(300)]
    cost, _ = fit([(f, seconds(f, TRUE, rng, 0.0)) for f in shallow])
    assert cost.feed == 0 and cost.draft_level == pytest.approx(TRUE.draft_level + TRUE.feed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:19], "19 measured steps were verified; at least 20 are needed: measure for longer"),
        (
            lambda s: [(replace(f, predicted_requests=0), t) for f, t in s],
            "0 measured steps asked the predictor; at least 20",
        ),
        (
            lambda s: [(replace(f, draft_levels=0, fed_rows=0), t) for f, t in s],
            "0 measured steps drafted; at least 20",
        ),
        (lambda s: [(replace(f, requests=1), t) for f, t in s], "do not tell per_request from fixed"),
        (lambda s: [(replace(f, pairs=7 * f.tokens), t) for f, t in s], "do not tell per_pair from per_token"),
        (lambda s: [(replace(f, fed_rows=0), t) for f, t in s], "no measured step shows what feed costs"),
        (lambda s: [(replace(f, context_tokens=0), t) for f, t in s], "no measured step shows what per_context_token"),
        (lambda s: [], "0 measured steps were verified"),
    ],
)
def test_steps_that_do_not_show_a_cost_are_refused(change: Callable[[list], list], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(change(samples(200)))


def test_distinct_pairs_counts_each_expert_once_per_layer() -> None:
    rng = np.random.default_rng(0)
    experts = [rng.integers(0, 6, (rows, 3, 2)).astype(np.uint8) for rows in (1, 4, 2)]
    expected = {(layer, int(e)) for ids in experts for row in ids for layer, chosen in enumerate(row) for e in chosen}
    assert distinct_pairs(experts) == len(expected)


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    Profile.load(path).check(BINDING)


def test_another_binding_is_named_with_both_values() -> None:
    with pytest.raises(ProfileError, match="device 'Some CPU, 2 threads', but this system has 'Some CPU, 8 threads'"):
        PROFILE.check(replace(BINDING, device="Some CPU, 8 threads"))
    digests = {replace(BINDING, **{field.name: "x"}).digest for field in fields(Binding)} | {BINDING.digest}
    assert len(digests) == 7 and all(len(d) == 12 for d in digests)


def edit(*path: str, to: Any) -> Callable[[dict], Any]:
    def change(raw: dict) -> dict:
        at = raw
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = to
        return raw

    return change


def without(*path: str) -> Callable[[dict], Any]:
    def change(raw: dict) -> dict:
        at = raw
        for name in path[:-1]:
            at = at[name]
        del at[path[-1]]
        return raw

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: [], "has version None; this program reads 2"),
        (edit("version", to=1), "has version 1; this program reads 2"),
        (edit("version", to=True), "has version True"),
        (without("cost"), "because the profile lacks the field cost"),
        (edit("costs", to=1), "because the profile has the unknown field costs"),
        (edit("cost", to=3), "because cost is 3, but an object is needed"),
        (without("cost", "per_pair"), "because cost lacks the field per_pair"),
        (edit("cost", "per_expert", to=1.0), "because cost has the unknown field per_expert"),
        (edit("cost", "fixed", to=-1e-9), "because cost.fixed is -1e-09, but a finite number of at least 0 is needed"),
        (edit("cost", "feed", to=float("nan")), "because cost.feed is nan"),
        (edit("cost", "feed", to=float("inf")), "because cost.feed is inf"),
        (edit("cost", "feed", to=True), "because cost.feed is True"),
        (edit("cost", "feed", to="1"), "because cost.feed is '1'"),
        (edit("quality", "step_error", to=None), "because quality.step_error is None, but a finite number is needed"),
        (edit("binding", "dtype", to=16), "because binding.dtype is 16, but a text is needed"),
        (edit("created", to="yesterday"), "because created is 'yesterday', but a date like 2026-01-31 is needed"),
        (edit("command", to=None), "because command is None, but a text is needed"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path: Path, change: Callable, message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(change(json.loads(json.dumps(asdict(PROFILE))))))
    refused(path, message)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ProfileError) as error:
        Profile.load(path)
    text = str(error.value)
    assert isinstance(error.value, EcoSpecError) and message in text and str(path) in text
    assert text.endswith("run ecospec-orchestrator profile to measure a new one.") and "\n" not in text


def test_a_missing_folder_and_broken_file_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "none.json", "There is no cost profile at")
    refused(tmp_path, "cannot be read")
    broken = tmp_path / "broken.json"
    broken.write_bytes(b'{"version": 2,')
    refused(broken, "is not valid JSON")
    broken.write_bytes(b"\xff\xfe")
    refused(broken, "is not valid JSON")
    with pytest.raises(ProfileError, match="cannot be written to .*broken.json/x"):
        PROFILE.save(broken / "x")


def serve(online: OnlineCost, count: int, factor: float = 1.0, seed: int = 0, noise: float = 0.04) -> None:
    rng = np.random.default_rng(seed)
    for f in steps(count, seed):
        measured = seconds(f, TRUE, rng, noise, factor)
        online.follow(online.paced.total(f), measured.total)
        online.observe(f, measured)


def test_online_cost_stays_where_the_profile_is_right() -> None:
    online = OnlineCost(PROFILE)
    assert online.cost == online.paced == TRUE and online.median_error == 0
    serve(online, 2000)
    for f in steps(100, 9):
        assert online.cost.total(f) == pytest.approx(TRUE.total(f), rel=0.04)
    assert 0.01 < online.median_error < 0.05 and online.pace == pytest.approx(1, abs=0.03) and not online.drifted


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_online_cost_follows_a_change_of_speed_and_says_so(factor: float) -> None:
    online = OnlineCost(PROFILE)
    serve(online, 1000)
    serve(online, 60, factor, seed=1)
    for f in steps(100, 9):
        assert online.paced.total(f) == pytest.approx(factor * TRUE.total(f), rel=0.07), "within tens of steps"
    assert not online.drifted, "not for long enough"
    serve(online, 1500, factor, seed=2)
    assert online.drifted, "the profile itself is still wrong, whatever was learned"
    for f in steps(100, 9):
        assert online.cost.total(f) == pytest.approx(factor * TRUE.total(f), rel=0.07)
    assert online.median_error < 0.06 and online.pace == pytest.approx(1, abs=0.07), "learned by now"
    serve(online, 300, seed=3)
    assert not online.drifted


def test_drift_needs_more_than_a_quarter_and_ends_below_fifteen_percent() -> None:
    online = OnlineCost(PROFILE)
    serve(online, 400, 1.2)
    assert not online.drifted
    serve(online, 400, 1.35)
    assert online.drifted
    serve(online, 400, 1.2)
    assert online.drifted, "between the two thresholds it stays as it is"
    serve(online, 400, 1.1)
    assert not online.drifted


def test_one_outlier_hardly_moves_anything() -> None:
    online = OnlineCost(PROFILE)
    serve(online, 500)
    before, error, pace = online.cost, online.median_error, online.pace
    f = steps(1, 5)[0]
    outlier = seconds(f, TRUE, np.random.default_rng(0), factor=100)
    online.follow(online.paced.total(f), outlier.total)
    online.observe(f, outlier)
    for name, value in asdict(before).items():
        assert getattr(online.cost, name) == pytest.approx(value, rel=0.01), name
    assert online.median_error == pytest.approx(error, rel=0.1) and online.pace == pytest.approx(pace, rel=0.02)
    for bad in (0.0, float("nan"), float("inf")):
        kept = online.cost
        online.observe(f, StepSeconds(0.0, 0.0, bad))
        online.follow(TRUE.total(f), bad)
        assert online.cost == kept and online.median_error == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize(("factor", "bound"), [(50.0, 4.0), (0.001, 0.25)])
def test_coefficients_stay_within_a_quarter_and_four_times(factor: float, bound: float) -> None:
    online = OnlineCost(replace(PROFILE, cost=replace(TRUE, feed=0.0)))
    serve(online, 3000, factor)
    for name, value in asdict(online.cost).items():
        base = getattr(TRUE, name) if name != "feed" else 0.0
        assert 0.25 * base - 1e-15 <= value <= 4 * base + 1e-15, name
    assert online.cost.fixed == pytest.approx(bound * TRUE.fixed)


def test_one_coefficient_that_changes_is_told_from_the_others() -> None:
    online, rng = OnlineCost(PROFILE), np.random.default_rng(0)
    slower_memory = replace(TRUE, per_pair=2 * TRUE.per_pair)
    for f in steps(4000, 1):
        online.observe(f, seconds(f, slower_memory, rng))
    assert online.cost.per_pair == pytest.approx(2 * TRUE.per_pair, rel=0.15)
    assert online.cost.draft_level == pytest.approx(TRUE.draft_level, rel=0.15)


def test_a_step_is_no_more_work_after_thousands_of_them() -> None:
    """It is part of every step. In calls, which do not depend on what else the machine does: some 100 take tens of microseconds."""
    online, rng = OnlineCost(PROFILE), np.random.default_rng(0)
    features = StepFeatures(4, 20, 300, 400, 3, 4, 8, 4)
    made = [calls_of(partial(online.observe, features, seconds(features, TRUE, rng))) for _ in range(3000)]
    assert max(made[200:]) == min(made[200:]) < 200


def calls_of(work: Callable[[], object]) -> int:
    made = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return made
