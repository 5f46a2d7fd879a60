"""What is compared: policies, their switches and the drafter and experts that they work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness import Bench

from ecospec_orchestrator.core import DraftTree
from ecospec_orchestrator.drafting.base import Drafter
from ecospec_orchestrator.selection.base import SelectionPolicy


@dataclass(frozen=True)
class Case:
    """One way to decode. switches: options of the policy; expert_accuracy: None for the predictor's experts, 1 for the
    true ones (an oracle), below 1 for an oracle of which that share is right; free_predictor: the predictor's time is neither
    charged by the policy nor counted, as if it had a device of its own and answered at once; bad_drafter: ShuffledDrafter."""

    key: str
    label: str
    policy: str
    gamma: int = 0
    ablation: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    expert_accuracy: float | None = None
    bad_drafter: bool = False
    free_predictor: bool = False

    @property
    def time_excludes_prediction(self) -> bool:
        return self.expert_accuracy is not None or self.free_predictor


MAIN_CASES = (
    Case("ar", "AR", "none"),
    Case("eagle3_g4", "EAGLE-3 g4", "likelihood", 4),
    *(Case(f"ecospec_g{g}", f"EcoSpec g{g}", "ecospec", g) for g in range(1, 9)),
    Case("goodput", "goodput", "goodput"),
    Case("goodput_no_experts", "goodput, no experts", "goodput", switches={"footprints": "none"}),
)


def _g4(key: str, ablation: str, accuracy: float | None = None, bad_drafter: bool = False, **switches: Any) -> Case:
    return Case(f"ecospec_g4_{key}", "EcoSpec g4", "ecospec", 4, ablation, switches, accuracy, bad_drafter)


def _goodput(
    key: str, ablation: str, accuracy: float | None = None, bad_drafter: bool = False, **switches: Any
) -> Case:
    return Case(f"goodput_{key}", "goodput", "goodput", 0, ablation, switches, accuracy, bad_drafter)


ABLATIONS = (
    _g4("static_cost", "static cost: no buffer", expert_buffer="none"),
    _g4("per_request", "a buffer per request", expert_buffer="request"),
    _g4("empty_seed", "buffer starts empty, as in the paper", seed_root=False),
    _g4("oracle", "oracle experts", 1.0),
    *(_g4(f"accuracy_{p}", f"experts {p} % right", p / 100) for p in (80, 65, 50)),
    _goodput("oracle", "oracle experts", 1.0, footprints="oracle"),
    Case(
        "goodput_free_predictor",
        "goodput",
        "goodput",
        ablation="the predictor's time is free",
        switches={"footprints": "oracle"},  # which is what tells the policy not to charge it; the predictor answers
        free_predictor=True,
    ),
    _goodput("per_request", "a buffer per request", expert_buffer="request"),
    _g4("bad_drafter", "bad drafter", bad_drafter=True),
    _goodput("bad_drafter", "bad drafter", bad_drafter=True),
)
ADVERSARIAL_CASES = ("ar", "eagle3_g4", "ecospec_g4", "goodput", "goodput_no_experts")
ALL_CASES = {case.key: case for case in (*MAIN_CASES, *ABLATIONS)}


class ShuffledDrafter:
    """A Drafter that is as sure as the one inside it and nearly always wrong: a fixed permutation of the vocabulary
    renames its tokens. Probabilities, shape and the distinctness of siblings stay."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self._drafter = drafter
        self._renamed = np.random.default_rng(0).permutation(vocabulary).astype(np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(
        self, states: Sequence[Any], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        ask = None if another_level is None else lambda trees, level: another_level(self._rename(trees), level)
        return self._rename(self._drafter.draft(states, ask))

    def _rename(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        return [DraftTree(self._renamed[t.tokens], t.parents, t.probabilities, t.depths) for t in trees]


class Switchboard:
    """Sets the system up for a case. A policy that learns keeps one instance per case, as in a server."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.policies: dict[str, SelectionPolicy] = {}
        self.shuffled = ShuffledDrafter(bench.drafter, bench.scheduler.engine.geometry.vocab_size)

    def configure(self, case: Case) -> None:
        if case.key not in self.policies:
            self.policies[case.key] = self.bench.policy_for(case.policy, case.gamma, **case.switches)
        scheduler = self.bench.scheduler
        scheduler.policy = self.policies[case.key]
        scheduler.footprint_source = self.bench.source_for(case.expert_accuracy)
        scheduler.drafter = self.shuffled if case.bad_drafter else self.bench.drafter
