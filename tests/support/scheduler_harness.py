"""A scheduler over the fake engine, under every policy, with its events collected."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
from fake_engine import EXPERTS, LAYERS, TOP_K, ChainDrafter, ChainEngine, ChainFootprints

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import Request, StepReport, TokenEvent
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.base import SelectionPolicy
from ecospec_orchestrator.selection.cost import Binding, FitQuality, OnlineCost, Profile, StepCost
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.selection.pairs import TargetShape

# Made-up milliseconds with a large fixed part: however the measured times shift them, drafting pays and some nodes do.
COST = StepCost(*(1e-3 * c for c in (4.0, 0.01, 0.02, 0.005, 0.0, 0.002, 0.001, 0.001, 0.001, 0.002, 0.001)))
QUALITY = FitQuality(100, 0.05, 0.9, 0.05, 0.9, 0.05, 0.9)
PROFILE = Profile(COST, QUALITY, Binding("chain", "test", "chain", "chain", "none", "float32"), "2026-01-31", "test")
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "likelihood": ("likelihood", {"gamma": 4}),
    "ecospec": ("ecospec", {"gamma": 4, "top_k": TOP_K}),
    **{f"ecospec, gamma {g}": ("ecospec", {"gamma": g, "top_k": TOP_K}) for g in (1, 2, 3, 5, 6, 7, 8)},
    "ecospec, static cost": ("ecospec", {"gamma": 4, "top_k": TOP_K, "expert_buffer": "none"}),
    "ecospec, buffer per request": ("ecospec", {"gamma": 4, "top_k": TOP_K, "expert_buffer": "request"}),
    "ecospec, empty buffer": ("ecospec", {"gamma": 4, "top_k": TOP_K, "seed_root": False}),
    "goodput": ("goodput", {}),
    "goodput, no experts": ("goodput", {"knows_experts": False}),
    "goodput, oracle": ("goodput", {"free_predictions": True}),
    "goodput, static cost": ("goodput", {"expert_buffer": "none"}),
    "goodput, buffer per request": ("goodput", {"expert_buffer": "request", "seed_root": False}),
    "goodput, four ranks": ("goodput", {"placement": np.tile(np.arange(EXPERTS) % 4, (LAYERS, 1))}),
}


def build_policy(label: str) -> SelectionPolicy:
    name, options = POLICIES[label]
    if name == "goodput":
        options = {
            "cost": OnlineCost(PROFILE),
            "shape": TargetShape(LAYERS, EXPERTS, TOP_K),
            "max_levels": 3,
            **options,
        }
    return make_policy(name, **options)


class Harness:
    """pages: of the target's cache and of the drafter's each."""

    def __init__(
        self,
        policy: str,
        max_running: int = 4,
        max_waiting: int = 8,
        max_context_tokens: int = 64,
        pages: int = 64,
        prefix_reuse: bool = True,
    ) -> None:
        self.engine, self.drafter = ChainEngine(pages, prefix_reuse), ChainDrafter(pages)
        self.source, self.ledger = ChainFootprints(), Ledger()
        self.scheduler = Scheduler(
            self.engine,
            self.drafter,
            self.source,
            build_policy(policy),
            Limits(max_running, max_waiting, max_context_tokens),
            self.ledger,
        )
        self.reports: list[StepReport] = []
        self.scheduler.on_step = self.reports.append
        self.events: queue.Queue[TokenEvent] = queue.Queue()

    def submit(self, name: str, prompt: Sequence[int] = (3, 4, 5), tokens: int = 20, **fields: Any) -> None:
        self.scheduler.submit(Request(name, tuple(prompt), tokens, **fields), self.events.put)

    def collect(self, count: int) -> dict[str, tuple[list[int], TokenEvent]]:
        """Events until `count` requests ended -> per request its tokens and last event."""
        tokens: dict[str, list[int]] = {}
        ended: dict[str, TokenEvent] = {}
        while len(ended) < count:
            event = self.events.get(timeout=60)
            tokens.setdefault(event.request_id, []).extend(event.tokens)
            if event.finish_reason is not None:
                assert event.request_id not in ended, "two last events"
                ended[event.request_id] = event
        return {name: (tokens[name], event) for name, event in ended.items()}
