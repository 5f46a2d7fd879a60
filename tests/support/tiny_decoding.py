"""Tiny checkpoints loaded as a user's model is, and decoded by a scheduler with all that belongs to it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scheduler_harness import PROFILE
from tiny_checkpoints import CONFIGS, VOCABULARY, save_tiny

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, SamplingParams, StepReport, TokenEvent
from ecospec_orchestrator.footprint.oracle import OracleFootprintSource
from ecospec_orchestrator.loading import Loaded, load
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.cost import OnlineCost, StepCost
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.selection.pairs import TargetShape
from ecospec_orchestrator.settings import Settings

TOKENS, GAMMA = 24, 3
CASES = [(family, "ngram") for family in sorted(CONFIGS)] + [("deepseek_v3", "mtp")]
# Verifying costs next to nothing, so that goodput speculates as much as it can.
CHEAP = StepCost(*(1e-3 * c for c in (4.0, 0.01, 0.02, 0.001, 0.0, 0.002, 0.001, 0.001, 0.001, 0.002, 0.001)))
RANDOM = np.random.default_rng(5)
PROMPTS = [
    tuple(RANDOM.integers(3, VOCABULARY, 8).tolist()) * 3,
    tuple(RANDOM.integers(3, VOCABULARY, 5).tolist()) * 4,
    tuple(RANDOM.integers(3, VOCABULARY, 70).tolist()),  # more than a page
]


def load_tiny(
    family: str, drafter: str, directory: Path, tokenizer: Any, device: str = "cpu", **changes: Any
) -> Loaded:
    """changes: to the configuration."""
    save_tiny(family, directory, **changes)
    tokenizer.save_pretrained(directory)
    settings = Settings(
        model=str(directory),
        drafter=drafter,
        device=device,
        max_context_tokens=256,
        max_running=3,
        draft_top_k=1 + (drafter != "mtp"),
    )
    return load(settings, lambda _: None)


def decode(
    loaded: Loaded, policy: str, temperature: float = 0.0, count: int = TOKENS
) -> tuple[dict[str, tuple[int, ...]], Sequence[StepReport]]:
    engine, geometry = loaded.engine, loaded.engine.geometry
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "likelihood": {"gamma": GAMMA},
        "ecospec": {"gamma": GAMMA, "top_k": geometry.top_k},
        "goodput": {
            "cost": OnlineCost(replace(PROFILE, cost=CHEAP)),
            "shape": TargetShape(geometry.moe_layers, geometry.experts, geometry.top_k),
            "max_levels": loaded.drafter.max_levels if loaded.drafter is not None else 1,
        },
    }
    source = OracleFootprintSource(engine)
    limits = Limits(max_running=3, max_waiting=8, max_context_tokens=256)
    scheduler = Scheduler(engine, loaded.drafter, source, make_policy(policy, **options[policy]), limits, Ledger())
    events: queue.Queue[TokenEvent] = queue.Queue()
    reports: list[StepReport] = []
    scheduler.on_step = reports.append
    scheduler.start()
    for i, prompt in enumerate(PROMPTS):
        tokens = tuple(token % geometry.vocab_size for token in prompt)
        scheduler.submit(Request(str(i), tokens, count, SamplingParams(temperature=temperature, seed=i)), events.put)
    outputs: dict[str, tuple[int, ...]] = {}
    ended = 0
    while ended < len(PROMPTS):
        event = events.get(timeout=60)
        assert event.finish_reason in (None, "length"), event
        outputs[event.request_id] = outputs.get(event.request_id, ()) + event.tokens
        ended += event.finish_reason is not None
    scheduler.stop()
    return outputs, reports
