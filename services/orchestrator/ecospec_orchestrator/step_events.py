"""What a request may watch of its decode steps. Built in the step thread for requests that asked, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .accounting import traffic
from .core import Decision, DraftTree, StepEvent, StepReport
from .engine.base import Verified
from .running import Running
from .step import Choice, Drafted, observed_mass
from .verification.accept import Acceptance
from .wishes import PLAIN


def step_events(
    batch: Sequence[Running],
    drafted: Drafted,
    choice: Choice,
    verified: Sequence[Verified],
    accepted: Sequence[Acceptance],
    report: StepReport,
    num_experts: int,
) -> list[StepEvent | None]:
    """One entry per request, None for those that did not ask. Called after the step was accounted for and before its tokens join
    their requests."""
    if not any(r.request.step_events for r in batch):
        return [None] * len(batch)
    plain = traffic.distinct_per_layer(np.stack([v.experts[0] for v in verified]), num_experts)
    return [
        _event(r, tree, nodes, a, plain, report) if r.request.step_events else None
        for r, tree, nodes, a in zip(batch, drafted.trees, choice.nodes, accepted, strict=True)
    ]


def _event(
    running: Running, tree: DraftTree, nodes: np.ndarray, acceptance: Acceptance, plain: np.ndarray, report: StepReport
) -> StepEvent:
    path = nodes[acceptance.rows[1:] - 1]
    chosen, kept = np.zeros(len(tree), bool), np.zeros(len(tree), bool)
    chosen[nodes], kept[path] = True, True
    return StepEvent(
        index=running.stats.steps - 1,
        root=running.last_token,
        tree=tree,
        chosen=chosen,
        accepted=kept,
        target_probabilities=observed_mass(tree, nodes, path, acceptance),
        plain_experts=plain,
        not_speculated=None if len(nodes) else _reason(running.request.policy, tree, report.decision),
        report=report,
    )


def _reason(wish: str | None, tree: DraftTree, decision: Decision | None) -> str:
    """Why nothing of a request was verified; the decision tells of the whole step, in which others may have speculated."""
    if wish == PLAIN:
        return "request"
    if decision is not None and decision.not_speculated is not None:
        return decision.not_speculated
    return "no_node_pays" if len(tree) else "nothing_drafted"
