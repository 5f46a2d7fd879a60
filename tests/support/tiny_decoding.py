"""Tiny checkpoints loaded as a user's model is, and decoded by a scheduler with all that belongs to it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_heads
from scheduler_harness import PROFILE
from tiny_checkpoints import CONFIGS, VOCABULARY, save_tiny

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, SamplingParams, StepReport, TokenEvent
from ecospec_orchestrator.engine.base import VerifyItem
from ecospec_orchestrator.footprint.oracle import OracleFootprintSource
from ecospec_orchestrator.loading import Loaded, load
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.cost import OnlineCost, StepCost
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.selection.pairs import TargetShape
from ecospec_orchestrator.settings import Settings

TOKENS, GAMMA = 24, 3
TIE = 1e-3  # of a step's largest logit: below it, rounding may decide which of two tokens is taken
CASES = [(family, "ngram") for family in sorted(CONFIGS)] + [("deepseek_v3", "mtp"), ("qwen3_moe", "eagle3")]
# Verifying costs next to nothing, so that goodput speculates as much as it can.
CHEAP = StepCost(*(1e-3 * c for c in (4.0, 0.01, 0.02, 0.001, 0.0, 0.002, 0.001, 0.001, 0.001, 0.002, 0.001)))
RANDOM = np.random.default_rng(5)
PROMPTS = [
    tuple(RANDOM.integers(3, VOCABULARY, 8).tolist()) * 3,
    tuple(RANDOM.integers(3, VOCABULARY, 5).tolist()) * 4,
    tuple(RANDOM.integers(3, VOCABULARY, 70).tolist()),  # more than a page
]


def load_tiny(family: str, drafter: str, directory: Path, tokenizer: Any, device: str = "cpu") -> Loaded:
    """drafter: as the setting, or "eagle3" for a head that is made for the purpose."""
    changes: dict[str, Any] = {}
    if drafter == "eagle3":
        layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        drafter = str(tiny_heads.save_safeailab(directory.with_name(f"{directory.name}-head"), eagle_config=layers))
        changes = dict(hidden_size=tiny_heads.HIDDEN, vocab_size=tiny_heads.VOCABULARY)
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
        event = events.get(timeout=300)  # kernels may be compiled first
        assert event.finish_reason in (None, "length"), event
        outputs[event.request_id] = outputs.get(event.request_id, ()) + event.tokens
        ended += event.finish_reason is not None
    scheduler.stop()
    return outputs, reports


def differs_beyond_ties(
    exact: Loaded, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> str | None:
    """Where another device's greedy tokens leave those of `exact` though these were no tie; what follows a tie is another text."""
    engine = exact.engine
    for i, prompt in enumerate(PROMPTS):
        ours, theirs = wanted[str(i)], found[str(i)]
        at = next((n for n, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        text = np.array([*prompt, *ours[:at]]) % engine.geometry.vocab_size
        sequence = engine.new_sequence()
        engine.prefill(sequence, text[:-1])
        (verified,) = engine.verify([VerifyItem(sequence, text[-1:], np.array([-1]))])
        engine.release(sequence)
        logits = verified.logits[0]
        lead = float(logits[ours[at]] - logits[theirs[at]]) / np.abs(logits).max()
        if lead > TIE:
            return f"request {i}, token {at}: {theirs[at]} instead of {ours[at]}, which leads by {lead:.1e} of the largest logit"
    return None
