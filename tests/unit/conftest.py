"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from scheduler_harness import Harness

# Properties must hold on any machine, however busy: hypothesis would fail an example that takes more than 0.2 s.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture
def harness() -> Iterator[Any]:
    """Makes step loops over the fake engine, which end with the test, whatever holds their engines up."""
    made: list[Harness] = []

    def make(policy: str, start: bool = True, **options: Any) -> Harness:
        made.append(Harness(policy, **options))
        if start:
            made[-1].scheduler.start()
        return made[-1]

    yield make
    for h in made:
        if h.engine.gate is not None:
            h.engine.gate.set()
        if h.scheduler._thread.ident is not None:
            h.scheduler.stop()
