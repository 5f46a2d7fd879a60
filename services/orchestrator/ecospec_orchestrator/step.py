"""The parts of one decode step that decide and measure; scheduler.step() strings them together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ecospec_proto.codec import pack_bitsets

from .accounting import traffic
from .core import ROOT, Decision, DraftTree, Footprints, PredictedFootprint, StepReport
from .drafting.base import Drafter
from .engine.base import Engine, Verified, VerifyItem
from .footprint.base import FootprintSource, FootprintUnavailableError, TreeContext
from .running import Running
from .selection.base import BatchView, SelectionPolicy, StepOutcome
from .verification.accept import Acceptance
from .wishes import PLAIN

log = logging.getLogger(__name__)
FEED_ROWS = 256  # decided tokens that may wait for the drafter; most answers for which drafting does not pay end before


@dataclass(frozen=True)
class Drafted:
    """trees: one per request, empty where nothing was drafted; levels: draft forwards run; requests: how many were drafted
    for; fed_rows: rows fed to the drafter before; consulted: the policy was asked about footprints while drafting, and if it
    wanted them, asked() waits for those of the levels before the last."""

    trees: list[DraftTree]
    levels: int = 0
    requests: int = 0
    fed_rows: int = 0
    consulted: bool = False
    asked: Callable[[], list[Footprints]] | None = None


@dataclass(frozen=True)
class Choice:
    """footprints: what was predicted, None without; fallback: why there is none though it was asked for."""

    nodes: list[np.ndarray]
    footprints: list[Footprints] | None
    fallback: str | None

    @property
    def predicted(self) -> bool:
        return self.footprints is not None


@dataclass(frozen=True)
class StepInputs:
    """What account() needs. times: perf_counter before drafting and after drafting, predicting, choosing, verifying, learning."""

    batch: Sequence[Running]
    chosen: Sequence[DraftTree]
    verified: Sequence[Verified]
    accepted: Sequence[Acceptance]
    choice: Choice
    times: Sequence[float]
    draft_bytes: int
    decision: Decision


def view(batch: Sequence[Running]) -> BatchView:
    return BatchView(
        tuple(r.request.request_id for r in batch),
        np.array([r.request.sampling.temperature for r in batch], np.float64),
        np.array([len(r.tokens) for r in batch], np.int64),
        np.array([r.remaining for r in batch], np.int64),
        np.array([r.unfed_rows for r in batch], np.int64),
        np.array([r.request.policy != PLAIN for r in batch], bool),
    )


def feed(drafter: Drafter, batch: Sequence[Running], wanted: np.ndarray) -> int:
    """Tell the drafter what was decided since it was last asked: for requests to draft for, and where much has gathered.
    Returns the rows fed."""
    fed = [r for r, now in zip(batch, wanted, strict=True) if r.unfed and (now or r.unfed_rows >= FEED_ROWS)]
    rows = sum(r.unfed_rows for r in fed)
    if fed:
        drafter.extend(
            [r.draft_state for r in fed],
            [drafter.join([features for features, _ in r.unfed]) for r in fed],
            [np.concatenate([tokens for _, tokens in r.unfed]) for r in fed],
        )
    for r in fed:
        r.unfed = []
    return rows


def draft(
    policy: SelectionPolicy,
    drafter: Drafter | None,
    source: FootprintSource | None,
    batch: Sequence[Running],
    wanted: np.ndarray,
) -> Drafted:
    """One tree per wanted request, no deeper than the tokens it may still emit beside the bonus token, and no deeper than
    the policy finds worth it. A policy that can do without the last level's experts has its question sent meanwhile."""
    trees = [DraftTree.empty() for _ in batch]
    if drafter is None or not policy.needs_drafts:
        return Drafted(trees)
    fed_rows = feed(drafter, batch, wanted)
    at = np.flatnonzero(wanted).tolist()
    if not at:
        return Drafted(trees, fed_rows=fed_rows)
    levels, consulted, asked = 1, False, None

    def spread(drafted: Sequence[DraftTree]) -> list[DraftTree]:
        spread_trees = list(trees)
        for i, tree in zip(at, drafted, strict=True):
            spread_trees[i] = trim_to_depth(tree, batch[i].remaining - 1)
        return spread_trees

    def another_level(drafted: list[DraftTree], level: int) -> bool:
        nonlocal levels, consulted, asked
        so_far = spread(drafted)
        if not policy.another_level(so_far, level):
            return False
        levels = level + 1
        if levels == drafter.max_levels and policy.overlaps_prediction and source is not None:
            consulted = True
            if policy.wants_footprints(so_far):
                asked = ask(source, batch, so_far)
        return True

    drafted = drafter.draft([batch[i].draft_state for i in at], another_level)
    return Drafted(spread(drafted), levels, len(at), fed_rows, consulted, asked)


def ask(
    source: FootprintSource, batch: Sequence[Running], trees: Sequence[DraftTree]
) -> Callable[[], list[Footprints]]:
    """Send the question; what is wrong with it shows when the answer is waited for."""
    try:
        return source.begin(
            [TreeContext(r.tokens, t, r.sequence, r.request.request_id) for r, t in zip(batch, trees, strict=True)]
        )
    except FootprintUnavailableError as error:
        problem = error

        def fail() -> list[Footprints]:
            raise problem

        return fail


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
    drafted: Drafted,
    mark: Callable[[], None],
) -> Choice:
    """Predict, then choose; without a prediction the policy goes on without and the reason is kept."""
    footprints, fallback, asked = None, None, drafted.asked
    try:
        if not drafted.consulted and source is not None and any(len(t) for t in drafted.trees):
            if policy.wants_footprints(drafted.trees):
                asked = ask(source, batch, drafted.trees)
        if asked is not None:
            footprints = [fit(f, len(t)) for f, t in zip(asked(), drafted.trees, strict=True)]
    except FootprintUnavailableError as error:
        fallback = error.reason
        log.debug("no expert prediction for this step: %s", error)
    mark()
    nodes = policy.choose(drafted.trees, footprints)
    mark()
    return Choice(nodes, footprints, fallback)


def fit(footprints: Footprints, nodes: int) -> Footprints:
    """Footprints of a tree that has grown (new nodes are unknown) or was trimmed since they were asked for."""
    rows, more = min(len(footprints.known), 1 + nodes), max(0, 1 + nodes - len(footprints.known))
    if more == 0:
        return Footprints(footprints.experts[:rows], footprints.known[:rows])
    unknown = np.zeros((more, *footprints.experts.shape[1:]), np.uint64)
    return Footprints(
        np.concatenate([footprints.experts, unknown]), np.concatenate([footprints.known, np.zeros(more, bool)])
    )


def outcome(
    drafted: Drafted,
    choice: Choice,
    verified: Sequence[Verified],
    accepted: Sequence[Acceptance],
    times: Sequence[float],
) -> StepOutcome:
    """What the policy learns from. times as in StepInputs, up to the end of verification."""
    before, draft_end, predict_end, select_end, verify_end = times
    paths = [nodes[a.rows[1:] - 1] for nodes, a in zip(choice.nodes, accepted, strict=True)]
    return StepOutcome(
        trees=drafted.trees,
        chosen=choice.nodes,
        accepted_nodes=paths,
        mass=[
            observed_mass(t, nodes, path, a)
            for t, nodes, path, a in zip(drafted.trees, choice.nodes, paths, accepted, strict=True)
        ],
        experts=[v.experts for v in verified],
        draft_seconds=draft_end - before,
        predict_seconds=predict_end - draft_end,
        select_seconds=select_end - predict_end,
        verify_seconds=verify_end - select_end,
        fed_rows=drafted.fed_rows,
        draft_levels=drafted.levels,
        drafted_requests=drafted.requests,
        predicted=choice.predicted,
    )


def observed_mass(tree: DraftTree, nodes: np.ndarray, path: np.ndarray, acceptance: Acceptance) -> np.ndarray:
    """float64 [N]: the target's probability of each node's token where the target was asked, else NaN.

    Verified nodes have the target's own probability mass. Children of accepted nodes and of the root that were not verified
    still tell something: the target's token there is known, and it was theirs (1) or not (0).
    """
    mass = np.full(len(tree), np.nan)
    if not len(tree):
        return mass
    for parent, token in zip([ROOT, *path.tolist()], acceptance.tokens.tolist(), strict=True):
        below = tree.parents == parent
        mass[below] = tree.tokens[below] == token
    mass[nodes] = acceptance.mass[1:]
    return mass


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
    footprint = _footprint(engine, s)
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
        predicted_actual_overlap=None if footprint is None else footprint.node_totals,
        draft_seconds=drafted - before,
        predict_seconds=predicted - drafted,
        select_seconds=selected - predicted,
        verify_seconds=verified - selected,
        step_seconds=done - before,
        fallback=s.choice.fallback,
        decision=s.decision,
        footprint=footprint,
    )
    for r, n, a in zip(s.batch, sent, accepted, strict=True):
        _add_to_stats(r, n, a, report)
    return report


def _footprint(engine: Engine, s: StepInputs) -> PredictedFootprint | None:
    if s.choice.footprints is None:
        return None
    predicted, actual, drafts = [], [], []
    for footprints, nodes, verified in zip(s.choice.footprints, s.choice.nodes, s.verified, strict=True):
        rows = np.concatenate([[0], nodes + 1])  # the root and the verified nodes
        known = footprints.known[rows]
        predicted.append(footprints.experts[rows[known]])
        actual.append(pack_bitsets(verified.experts[known], engine.geometry.experts))
        drafts.append(rows[known] > 0)
    told, used, nodes = np.concatenate(predicted), np.concatenate(actual), np.concatenate(drafts)
    by_layer = traffic.overlap_by_layer(told[nodes], used[nodes])
    return PredictedFootprint(len(told), by_layer, traffic.union_size(told), traffic.union_size(used))


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
