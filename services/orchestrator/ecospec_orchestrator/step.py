"""The parts of one decode step that decide and measure; scheduler.step() strings them together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ecospec_proto.codec import pack_bitsets

from .accounting import traffic
from .core import ROOT, DraftTree, Footprints, StepReport
from .drafting.base import Drafter
from .engine.base import Engine, Verified, VerifyItem
from .footprint.base import FootprintSource, FootprintUnavailableError, TreeContext
from .selection.base import SelectionPolicy
from .verification.accept import Acceptance

if TYPE_CHECKING:
    from .scheduler import Running

log = logging.getLogger(__name__)
CONTEXT_TAIL = 64  # tokens offered to the predictor; it takes what it can use


@dataclass(frozen=True)
class Choice:
    nodes: list[np.ndarray]
    footprints: list[Footprints] | None
    fallback: str | None


@dataclass(frozen=True)
class StepInputs:
    """What account() needs. times: perf_counter before drafting and after drafting, predicting, choosing, verifying, accepting."""

    batch: Sequence[Running]
    chosen: Sequence[DraftTree]
    verified: Sequence[Verified]
    accepted: Sequence[Acceptance]
    choice: Choice
    times: Sequence[float]
    draft_bytes: int


def draft_trees(policy: SelectionPolicy, drafter: Drafter | None, batch: Sequence[Running]) -> list[DraftTree]:
    """One tree per request, no deeper than the tokens it may still emit beside the bonus token."""
    if drafter is None or not policy.needs_drafts:
        return [DraftTree.empty() for _ in batch]
    trees = drafter.draft([r.draft_state for r in batch])
    return [trim_to_depth(tree, r.remaining - 1) for tree, r in zip(trees, batch, strict=True)]


def trim_to_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Drop nodes deeper than depth; the rest stays ancestor-closed."""
    keep = np.flatnonzero(tree.depths <= depth).astype(np.int32)
    return tree if len(keep) == len(tree) else subtree(tree, keep)


def subtree(tree: DraftTree, nodes: np.ndarray) -> DraftTree:
    """The tree of the given ancestor-closed, ascending nodes, renumbered."""
    new_index = np.full(len(tree) + 1, ROOT, np.int32)  # the last entry stands for ROOT
    new_index[nodes] = np.arange(len(nodes), dtype=np.int32)
    return DraftTree(tree.tokens[nodes], new_index[tree.parents[nodes]], tree.probabilities[nodes], tree.depths[nodes])


def verify_item(sequence: Any, root: int, tree: DraftTree) -> VerifyItem:
    """The rows of one request's verification: the root, then the tree's nodes."""
    tokens = np.concatenate([[root], tree.tokens]).astype(np.int64)
    return VerifyItem(sequence, tokens, np.concatenate([[-1], tree.parents + 1]).astype(np.int64))


def choose_nodes(
    policy: SelectionPolicy,
    source: FootprintSource | None,
    batch: Sequence[Running],
    trees: Sequence[DraftTree],
    mark: Callable[[], None],
) -> Choice:
    """Predict, then choose; without a prediction the policy goes on by likelihood and the reason is kept."""
    footprints, fallback = None, None
    if policy.needs_footprints and source is not None and any(len(t) for t in trees):
        try:
            footprints = source.predict(
                [TreeContext(r.tokens[-CONTEXT_TAIL:], t) for r, t in zip(batch, trees, strict=True)]
            )
        except FootprintUnavailableError as error:
            fallback = error.reason
            log.debug("no expert prediction for this step: %s", error)
    mark()
    nodes = policy.choose(trees, footprints)
    mark()
    return Choice(nodes, footprints, fallback)


def account(engine: Engine, s: StepInputs) -> StepReport:
    """Measure the step and add each request's share to its statistics."""
    geometry, sizes = engine.geometry, engine.step_bytes
    experts = np.concatenate([v.experts for v in s.verified])
    distinct = traffic.distinct_per_layer(experts, geometry.experts)
    roots = traffic.distinct_per_layer(np.stack([v.experts[0] for v in s.verified]), geometry.experts)
    context = sum(len(r.tokens) for r in s.batch)
    read = traffic.bytes_of_step(sizes, distinct, len(experts), context, s.draft_bytes)
    emitted = sum(min(len(a.tokens), r.remaining) for a, r in zip(s.accepted, s.batch, strict=True))
    sent = tuple(len(t) for t in s.chosen)
    accepted = tuple(len(a.rows) - 1 for a in s.accepted)
    before, drafted, predicted, selected, verified, done = s.times
    report = StepReport(
        requests=len(s.batch),
        nodes=sum(sent),
        speculated=any(sent),
        accepted=accepted,
        sent=sent,
        emitted=emitted,
        distinct_experts=distinct,
        bytes_read=read,
        bytes_upper_bound=traffic.upper_bound_bytes(
            sizes, geometry.moe_layers, geometry.top_k, geometry.experts, len(experts), context, s.draft_bytes
        ),
        bytes_autoregressive=traffic.autoregressive_bytes(sizes, roots, len(s.batch), emitted, context),
        predicted_actual_overlap=_overlap(engine, s),
        draft_seconds=drafted - before + (done - verified),
        predict_seconds=predicted - drafted,
        select_seconds=selected - predicted,
        verify_seconds=verified - selected,
        step_seconds=done - before,
        fallback=s.choice.fallback,
    )
    for r, n, a in zip(s.batch, sent, accepted, strict=True):
        _add_to_stats(r, n, a, report)
    return report


def _overlap(engine: Engine, s: StepInputs) -> tuple[int, int, int] | None:
    if s.choice.footprints is None:
        return None
    predicted, actual = [], []
    for footprints, nodes, verified in zip(s.choice.footprints, s.choice.nodes, s.verified, strict=True):
        known = footprints.known[1:][nodes]
        predicted.append(footprints.experts[1:][nodes][known])
        actual.append(pack_bitsets(verified.experts[1:][known], engine.geometry.experts))
    return traffic.overlap(np.concatenate(predicted), np.concatenate(actual))


def _add_to_stats(running: Running, sent: int, accepted: int, report: StepReport) -> None:
    stats = running.stats
    stats.steps += 1
    stats.steps_not_speculated += sent == 0
    stats.draft_tokens += sent
    stats.accepted_tokens += accepted
    stats.acceptance_histogram[accepted] = stats.acceptance_histogram.get(accepted, 0) + 1
    by_length = stats.acceptance_histogram_by_draft_length.setdefault(sent, {})
    by_length[accepted] = by_length.get(accepted, 0) + 1
    stats.distinct_experts_sum += float(report.distinct_experts.mean())
    stats.bytes_read += report.bytes_read.total / report.requests
