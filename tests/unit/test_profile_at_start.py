"""A server that finds no cost profile measures one before it is ready, keeps it where the next start looks, and says what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import ChainDrafter, ChainEngine, ChainFootprints
from scheduler_harness import PROFILE

from ecospec_orchestrator import cli, system
from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.footprint.base import FootprintSource
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource
from ecospec_orchestrator.profiling import binding_of, default_profile_path
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.cost import Profile, ProfileError
from ecospec_orchestrator.selection.goodput import GoodputPolicy, UnprofiledGoodputPolicy
from ecospec_orchestrator.settings import Settings, load_settings
from ecospec_orchestrator.state.sharing import open_sharing
from ecospec_orchestrator.system import System

Built = Callable[..., System]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """Seconds of every measurement, each of which gives a profile of the system; a negative number fails the next one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seconds: list[float] = []

    def measure(of: System, at_most: float, progress: Any) -> Profile:
        failing = bool(seconds) and seconds[-1] < 0
        seconds.append(at_most)
        if failing:
            raise ProfileError("Too few steps.")
        parts = of.scheduler.engine, of.scheduler.drafter, of.scheduler.footprint_source
        return replace(PROFILE, binding=binding_of(*parts))

    monkeypatch.setattr(system, "measure", measure)
    return seconds


@pytest.fixture
def build() -> Iterator[Built]:
    built: list[System] = []

    def make(settings: Settings, source: FootprintSource | None = None) -> System:
        engine: Any = ChainEngine()
        ledger, parts = Ledger(), (engine, ChainDrafter(), source or ChainFootprints())
        policy = system.policy_from_settings(settings, *parts)
        scheduler = Scheduler(*parts, policy, Limits(4, 4, 64), ledger)
        sharing = open_sharing(settings, engine.geometry, ledger.state)
        built.append(System(scheduler, None, "chain", ledger, {}, settings, sharing))
        return built[-1]

    yield make
    for each in built:
        each.close()


def kept() -> Path:
    return default_profile_path(binding_of(ChainEngine(), ChainDrafter(), ChainFootprints()))


def test_the_first_start_measures_and_the_next_one_finds_it(build: Built, measured: list[float]) -> None:
    first, shown = build(Settings()), list[str]()
    assert isinstance(first.scheduler.policy, UnprofiledGoodputPolicy)
    first.profile_if_missing(20, shown.append)
    assert isinstance(first.scheduler.policy, GoodputPolicy) and measured == [20]
    assert "for 20 s" in shown[0] and str(kept()) in shown[0]
    second = build(Settings())
    assert isinstance(second.scheduler.policy, GoodputPolicy)
    second.profile_if_missing(20)
    build(Settings(policy="ecospec")).profile_if_missing(20)
    assert measured == [20]


def test_what_cannot_be_kept_is_used_and_told(
    build: Built, measured: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("where a folder should be")  # root may write to any folder
    server = build(Settings())
    caplog.clear()
    server.profile_if_missing(20)
    assert isinstance(server.scheduler.policy, GoodputPolicy) and measured == [20]
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert str(kept()) in told and "ECOSPEC_PROFILE" in told and "measured again at the next start" in told


def test_a_busy_machine_is_measured_for_longer_and_then_not_at_all(build: Built, measured: list[float]) -> None:
    server = build(Settings())
    measured.append(-1.0)
    server.profile_if_missing(20)
    assert measured == [-1.0, 20, 60] and isinstance(server.scheduler.policy, GoodputPolicy)


def test_it_can_be_forbidden(build: Built, measured: list[float], caplog: pytest.LogCaptureFixture) -> None:
    server = build(Settings())
    server.profile_if_missing(0)
    assert isinstance(server.scheduler.policy, UnprofiledGoodputPolicy) and not measured
    assert "profile_seconds is 0" in caplog.text


def test_a_named_profile_is_written_where_there_is_none_and_never_replaced(
    build: Built, measured: list[float], tmp_path: Path
) -> None:
    named = tmp_path / "mine.json"
    build(Settings(profile=named)).profile_if_missing(20)
    assert Profile.load(named).binding.target == ChainEngine.geometry.fingerprint and not kept().exists()
    others = replace(PROFILE, binding=replace(PROFILE.binding, device="another machine"))
    others.save(named)
    server = build(Settings(profile=named))
    server.profile_if_missing(20)
    assert isinstance(server.scheduler.policy, UnprofiledGoodputPolicy)
    assert Profile.load(named) == others and measured == [20]


def test_without_its_predictor_nothing_is_measured(
    build: Built, measured: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    address = "127.0.0.1:1"
    server = build(Settings(predictor_address=address), RemoteFootprintSource(address, ChainEngine.geometry, 0.1))
    server.profile_if_missing(0.5)
    assert not measured and f"No predictor serves at {address}" in caplog.text


def test_serve_measures_for_as_long_as_is_set() -> None:
    asked: list[float] = []

    class Fake:
        profile_if_missing = staticmethod(asked.append)

    prepare = cli._preparing(load_settings({"profile_seconds": "7"}, {}))
    assert prepare is not None
    prepare(Fake())
    assert asked == [7]
    assert cli._preparing(load_settings({"engine": "tensorrt-llm"}, {})) is None, "its costs are not measured so"
