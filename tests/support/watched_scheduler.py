"""The fake engine slow enough to be watched, with every policy to wish for."""

from __future__ import annotations

import time

from byte_engine import ByteEngine, byte_scheduler
from scheduler_harness import build_policy

from ecospec_orchestrator.scheduler import Scheduler

OTHERS = ("none", "likelihood", "ecospec")
INFO = {
    "policy": "goodput",
    "policies": ["goodput", *OTHERS],
    "moe_layers": ByteEngine.geometry.moe_layers,
    "experts": ByteEngine.geometry.experts,
    "top_k": ByteEngine.geometry.top_k,
    "device": "cpu",
}


def watched_scheduler(step_seconds: float = 0.02) -> Scheduler:
    """Not started."""
    scheduler = byte_scheduler("goodput")
    scheduler.other_policies = {name: build_policy(name) for name in OTHERS}
    verify = scheduler.engine.verify
    scheduler.engine.verify = lambda items: (time.sleep(step_seconds), verify(items))[1]  # type: ignore[method-assign]
    return scheduler
