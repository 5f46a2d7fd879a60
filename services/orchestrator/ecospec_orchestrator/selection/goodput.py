"""Maximise accepted tokens per second: for whom to draft, how deep, whom to ask, which nodes to verify, and how many.

One currency: tokens. A second is worth `rate` tokens, what this system makes of a second in the long run, so an action
pays when the tokens that it is expected to bring exceed rate times the seconds that it is expected to take (renewal
reward: maximising the sum of tokens - rate * seconds of every step maximises tokens per second, with the rate its own
fixed point). Tokens come from calibrated probabilities, seconds from the measured and followed cost model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np

from ..core import Decision, DraftTree, Footprints
from .asking import PROBE_CAP, Asking
from .base import BatchView, FixedPolicy, PolicyHealth, StepOutcome
from .best_children import BestChildren
from .calibration import CLASSES, Calibrator, temperature_class
from .cost import OnlineCost, StepFeatures, StepSeconds
from .ecospec import EcoSpecPolicy
from .goodput_kernel import best_closure, warm_up
from .goodput_state import KIND_STEPS, PRIOR_STEPS, Kind, OwnRecord, Rest, StepPlan
from .means import Mean
from .options import check_count, check_expert_buffer, check_flag, check_range
from .pack import Pack, pack
from .pairs import PairEstimates, TargetShape

log = logging.getLogger(__name__)

TRIALS = 4  # steps that draft before its worth is judged, per kind of traffic
MAX_REST = 1000  # steps
LEARN_EVERY = 4  # steps, once the first hundred have taught: costs change slowly, and learning takes time, too
LEARN_FIRST = 100


class GoodputPolicy:
    """Maximise (R + sum of P) / seconds over all requests together, in the long run.

    cost: the measured cost model. shape: the target's. max_levels: of the drafter. knows_experts: False never asks the
    predictor and prices nodes by count alone (ablation). free_predictions: asking is not charged (an oracle). probe_share:
    share of the time that may go into looking whether drafting pays again where it did not, 0 to 0.2; a quarter of it, on
    top, for asking. max_slowdown: at least 1; a request is never expected to get less than 1 / max_slowdown of its plain
    speed so that others gain. expert_buffer, seed_root: ablations, see EcoSpecPolicy. placement: int [layers, experts],
    the expert-parallel rank of every expert; None: one rank.
    """

    name = "goodput"
    needs_drafts = True
    overlaps_prediction = True

    def __init__(
        self,
        cost: OnlineCost,
        shape: TargetShape,
        max_levels: int,
        knows_experts: bool = True,
        free_predictions: bool = False,
        probe_share: float = 0.005,
        max_slowdown: float = 1.5,
        expert_buffer: str = "batch",
        seed_root: bool = True,
        placement: np.ndarray | None = None,
    ) -> None:
        self.needs_footprints = check_flag("knows_experts", knows_experts)
        self._free_predictions = check_flag("free_predictions", free_predictions)
        self._online, self._shape = cost, shape
        self._probe_share = check_range("probe_share", probe_share, 0.0, 0.2)
        self._max_slowdown = check_range("max_slowdown", max_slowdown, 1.0, 100.0)
        self._buffer_mode, self._seed_root = check_expert_buffer(expert_buffer), check_flag("seed_root", seed_root)
        self._max_levels = check_count("max_levels", max_levels)
        self._pairs = PairEstimates(shape, placement)
        self._calibrator = Calibrator(max_levels)
        self._kinds = [Kind() for _ in CLASSES]
        self._requests: dict[str, OwnRecord] = {}
        self._best_children = BestChildren(len(CLASSES), max_levels)
        self._asking = Asking(self._probe_share)
        self._draft_allowance = 0.0  # seconds
        self._own_seconds = (Mean(KIND_STEPS), Mean(KIND_STEPS))  # choosing and learning, by whether the step drafted
        self._drift_told = False
        self._steps = 0
        self._step: StepPlan | None = None
        # Between two looks, plain steps of an unchanged batch pass through without a thought.
        self._rest: Rest | None = None
        warm_up()

    # What the policy knows of itself.

    def health(self) -> PolicyHealth:
        return PolicyHealth(self._calibrator.errors, self._online.median_error, self._online.drifted, True)

    # One step.

    def begin_step(self, batch: BatchView) -> np.ndarray:
        """bool [R]: those whose expected gain pays for drafting; one of them when it is time to look again."""
        if self._rest is not None:
            if self._rest.left > 0 and self._rest.request_ids == batch.request_ids:
                self._rest.left -= 1
                self._rest.taken += 1
                return self._rest.wanted
            self._wake()
        requests, cost = len(batch), self._online.paced
        self._requests = {name: self._requests.get(name) or OwnRecord() for name in batch.request_ids}
        kinds = np.array([temperature_class(t) for t in batch.temperatures.tolist()])
        root_pairs = self._pairs.roots(requests)
        plain = cost.verify(requests, requests, root_pairs, float(batch.context_tokens.sum()))
        factor = float(np.mean([self._rate_of(n, k) for n, k in zip(batch.request_ids, kinds.tolist(), strict=True)]))
        step = StepPlan(batch, cost, kinds, root_pairs, plain, max(1.0, factor) * requests / plain)
        self._step = step

        useful = (batch.remaining_tokens > 1) & batch.may_draft
        if not useful.any():
            step.reason = "nothing_drafted"
            return np.zeros(requests, bool)
        if any(self._kinds[k].trials < TRIALS for k in set(kinds[useful].tolist())):
            wanted = useful
        else:
            wanted = self._worth_drafting(step, useful)
            if not wanted.any():
                at = self._next_to_look_at(batch, useful)
                looking = cost.draft(1, 1) + cost.feeding(int(batch.unfed_rows[at]))
                if self._draft_allowance < looking:
                    step.reason = "drafting_does_not_pay"
                    earned = self._probe_share * plain
                    # What is decided meanwhile will have to be fed before the look.
                    gained = max(earned - cost.feed_row, earned / 4)
                    lacking = looking - self._draft_allowance
                    steps = math.ceil(min(lacking / gained, MAX_REST)) if gained else MAX_REST
                    empty = [np.zeros(0, np.int32) for _ in batch.request_ids]
                    usual = plain / self._online.pace
                    self._rest = Rest(batch.request_ids, kinds.tolist(), steps - 1, usual, earned, empty, wanted)
                    self._draft_allowance += earned
                    return wanted
                self._draft_allowance = min(self._draft_allowance, PROBE_CAP * looking) - looking
                step.probe = True
                wanted[at] = True
        step.drafts = int(wanted.sum())
        return wanted

    def another_level(self, trees: Sequence[DraftTree], level: int) -> bool:
        """Would the next level bring more tokens than its draft forward costs? Guessed from recent best children."""
        step = self._now
        node_tokens = step.rate * self._node_seconds(step)
        gain = 0.0
        for tree, kind, values in zip(trees, step.kinds.tolist(), self._values(trees), strict=True):
            if len(tree):
                values = values[tree.depths == level]
                if len(values):
                    tops = self._best_children.of(kind, level + 1)
                    # Its nodes are worth verifying only with their parents: what the parent lacks is charged.
                    lacking = np.minimum(0.0, values - node_tokens)
                    gain += float(
                        np.maximum(0.0, np.multiply.outer(values, tops) - node_tokens + lacking[:, None]).mean(1).sum()
                    )
        return gain > step.rate * step.cost.draft(1, step.drafts)

    def wants_footprints(self, trees: Sequence[DraftTree]) -> bool:
        """Ask the predictor where its answer can change the choice and is worth the wait."""
        step = self._now
        if not self.needs_footprints:
            return False
        requests = len(step.batch)
        seconds, probe = 0.0 if self._free_predictions else step.cost.predicting(requests), False
        if not self._asking.pays(requests, step.rate * seconds):
            step.prediction = "does_not_pay"
            if not self._asking.may_probe(seconds, step.plain_seconds):
                return False
            probe = True
        packed = self._pack(trees, None)
        cheapest = self._solve(packed, step, unknown_share=0.0)[0]
        dearest = self._solve(packed, step, unknown_share=self._shape.experts / self._shape.top_k)[0]
        if not cheapest.any() or (dearest == cheapest).all():
            step.prediction = "cannot_matter"
            self._asking.cannot_matter(requests)
            return False
        if probe:
            self._asking.probed(seconds)
        step.prediction = "asked"
        return True

    def choose(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> list[np.ndarray]:
        """int32 node indices per tree, ascending and ancestor-closed; all empty where nothing pays."""
        if self._step is None and self._rest is not None:
            return self._rest.nodes
        step = self._now
        if not any(len(tree) for tree in trees):
            step.reason = step.reason or "nothing_drafted"
            step.nodes = [np.zeros(0, np.int32) for _ in trees]
            step.node_values = [np.zeros(0) for _ in trees]
            step.tokens = float(len(trees))
            return step.nodes
        packed = self._pack(trees, footprints)
        chosen, tokens, seconds = self._solve(packed, step)
        if footprints is not None:
            self._learn_knowledge(packed, step, chosen)
        step.nodes, step.tokens, step.extra_seconds = packed.nodes(chosen), tokens, seconds - step.plain_seconds
        step.node_values = [
            packed.values[start + 1 :][nodes] for start, nodes in zip(packed.offsets.tolist(), step.nodes, strict=False)
        ]
        picked = int(chosen.sum())
        if picked == 0:
            step.reason = "no_node_pays"
        elif packed.known[chosen].all():
            step.predicted_new = self._pairs.added(packed, chosen)
        elif not packed.known[chosen].any():
            step.guessed_new = self._pairs.guess(step.root_pairs, picked)
        return step.nodes

    def end_step(self, outcome: StepOutcome) -> Decision:
        if self._step is None and self._rest is not None:
            return self._end_resting(self._rest, outcome)
        began = time.perf_counter()
        step, self._step = self._now, None
        asked = len(step.batch) if outcome.predicted and not self._free_predictions else 0
        spent = (
            step.cost.draft(outcome.draft_levels, outcome.drafted_requests)
            + step.cost.feeding(outcome.fed_rows)
            + step.cost.predicting(asked)
        )
        own = self._own_seconds[step.drafts > 0]
        plain_seconds = step.plain_seconds + self._own_seconds[0].value(0.0, 1e-9)
        expected_seconds = spent + step.plain_seconds + step.extra_seconds + own.value(0.0, 1e-9)
        self._steps += 1
        if self._steps <= LEARN_FIRST or self._steps % LEARN_EVERY == 0:
            self._learn_costs(step, outcome, asked)
        if step.probe and not any(len(nodes) for nodes in step.nodes):  # what it cost beyond the first look
            self._draft_allowance -= step.cost.draft(max(0, outcome.draft_levels - 1), outcome.drafted_requests)
        self._online.follow(spent + step.plain_seconds + step.extra_seconds, _measured(outcome))
        self._learn_tokens(step, outcome, expected_seconds)
        own.add(outcome.select_seconds + time.perf_counter() - began)
        return Decision(
            self.name,
            step.reason,
            step.probe,
            step.prediction,
            step.tokens,
            expected_seconds,
            plain_seconds=plain_seconds,
        )

    # Parts of the decisions.

    @property
    def _now(self) -> StepPlan:
        if self._step is None:
            raise RuntimeError("begin_step() opens a step; it was not called.")
        return self._step

    def _next_to_look_at(self, batch: BatchView, useful: np.ndarray) -> int:
        """The request that was looked at least, the one that costs the least where that is equal: a new one costs next to
        nothing, and its text may be of another kind than what came before."""
        looks = [self._requests[name].looks for name in batch.request_ids]
        return min(np.flatnonzero(useful).tolist(), key=lambda i: (looks[i], batch.unfed_rows[i], i))

    def _rate_of(self, name: str, kind: int) -> float:
        prior = self._kinds[kind].rate.value(1.0, PRIOR_STEPS)
        return self._requests[name].rate.value(prior, PRIOR_STEPS)

    def _worth_drafting(self, step: StepPlan, useful: np.ndarray) -> np.ndarray:
        """The requests with a gain, if all together they pay for the drafting."""
        batch, cost = step.batch, step.cost
        gains = np.array(
            [
                self._requests[name].gain.value(self._kinds[kind].gain(len(batch)), PRIOR_STEPS)
                for name, kind in zip(batch.request_ids, step.kinds.tolist(), strict=True)
            ]
        )
        net = np.where(useful, gains - step.rate * cost.draft_level_request, 0.0)
        wanted = net > 0
        feeding = cost.feed if batch.unfed_rows[wanted].any() else 0.0
        plain, drafting = (own_seconds.value(0.0, 1e-9) for own_seconds in self._own_seconds)
        shared = step.rate * (cost.draft_level + feeding + max(0.0, drafting - plain))
        return wanted if net[wanted].sum() > shared else np.zeros(len(batch), bool)

    def _node_seconds(self, step: StepPlan) -> float:
        """Of one more node with unknown routing, beside the roots."""
        return step.cost.per_token + step.cost.per_pair * self._pairs.guess(step.root_pairs, 1) * self._pairs.share(
            len(step.batch)
        )

    def _pack(self, trees: Sequence[DraftTree], footprints: Sequence[Footprints] | None) -> Pack:
        return pack(trees, footprints, self._values(trees))

    def _values(self, trees: Sequence[DraftTree]) -> list[np.ndarray]:
        """Path probabilities, float64 [N] per tree: calibrated, and corrected by how each request's own drafts fare."""
        batch = self._now.batch
        return [
            np.minimum(1.0, self._calibrator.path_probabilities(tree, t) * self._requests[name].factor ** tree.depths)
            for tree, t, name in zip(trees, batch.temperatures.tolist(), batch.request_ids, strict=True)
        ]

    def _solve(
        self, packed: Pack, step: StepPlan, unknown_share: float | None = None
    ) -> tuple[np.ndarray, float, float]:
        """(chosen bool [rows], expected tokens, expected seconds of verification)"""
        shape, cost = self._shape, step.cost
        return best_closure(
            packed.experts,
            packed.known,
            packed.values,
            packed.parents,
            packed.offsets,
            layers=shape.layers,
            experts_count=shape.experts,
            top_k=shape.top_k,
            fixed_seconds=step.plain_seconds,
            plain_seconds=step.plain_seconds,
            token_seconds=cost.per_token,
            pair_seconds=cost.per_pair,
            rate=step.rate,
            rank_masks=self._pairs.masks,
            known_factor=self._pairs.known_factor,
            unknown_share=self._pairs.share(len(step.batch)) if unknown_share is None else unknown_share,
            root_pairs=step.root_pairs,
            max_slowdown=self._max_slowdown,
            buffer_mode=self._buffer_mode,
            seed_root=self._seed_root,
        )

    # Learning.

    def _learn_knowledge(self, packed: Pack, step: StepPlan, chosen: np.ndarray) -> None:
        """What asking gained: this choice against the one without footprints, both at the predicted cost."""
        blind = Pack(
            packed.experts, np.zeros_like(packed.known), packed.values, packed.parents, packed.offsets, packed.layers
        )
        without = self._solve(blind, step)[0]
        gain = self._worth(packed, step, chosen) - self._worth(packed, step, without)
        self._asking.learn(len(step.batch), gain)

    def _worth(self, packed: Pack, step: StepPlan, chosen: np.ndarray) -> float:
        """Tokens net of time of a choice: known nodes at their predicted pairs, others at what is usual."""
        known = chosen & packed.known
        unknown = int((chosen & ~packed.known).sum())
        pairs = self._pairs.added(packed, known)
        pairs += self._pairs.share(len(step.batch)) * self._pairs.guess(step.root_pairs, unknown)
        seconds = step.cost.per_token * int(chosen.sum()) + step.cost.per_pair * pairs
        return float(packed.values[chosen].sum()) - step.rate * seconds

    def _learn_costs(self, step: StepPlan, outcome: StepOutcome, asked: int) -> None:
        requests = len(step.batch)
        pairs = self._pairs.learn(outcome, step.predicted_new, step.guessed_new)
        features = StepFeatures(
            requests,
            requests + sum(len(nodes) for nodes in outcome.chosen),
            pairs,
            int(step.batch.context_tokens.sum()),
            outcome.draft_levels,
            outcome.drafted_requests,
            outcome.fed_rows,
            asked,
        )
        measured = StepSeconds(outcome.draft_seconds, outcome.predict_seconds if asked else 0.0, outcome.verify_seconds)
        self._online.observe(features, measured)
        if self._online.drifted and not self._drift_told:
            log.warning(
                "The cost profile no longer fits this machine: steps take %.2f times what it says. The policy goes on with what "
                "it has learned since; run ecospec-orchestrator profile to measure a new one.",
                self._online.times_profile,
            )
        self._drift_told = self._online.drifted

    def _end_resting(self, rest: Rest, outcome: StepOutcome) -> Decision:
        """A plain step of a rest; its only lesson is how fast the machine is."""
        expected = rest.plain_seconds * self._online.pace
        self._online.follow(expected, _measured(outcome))
        self._draft_allowance += rest.earned_seconds
        return Decision(
            self.name,
            "drafting_does_not_pay",
            expected_tokens=float(len(rest.request_ids)),
            expected_seconds=expected,
            plain_seconds=expected,
        )

    def _wake(self) -> None:
        """Account for the plain steps of a rest: they made what plain decoding makes."""
        rest, self._rest = self._rest, None
        if rest is None or rest.taken == 0:
            return
        for name, kind in zip(rest.request_ids, rest.kinds, strict=True):
            self._kinds[kind].rate.add(rest.taken, rest.taken, rest.taken)
            if name in self._requests:
                self._requests[name].rate.add(rest.taken, rest.taken, rest.taken)

    def _learn_tokens(self, step: StepPlan, outcome: StepOutcome, seconds: float) -> None:
        requests = len(step.batch)
        plain_tokens = seconds / step.plain_seconds  # that plain decoding gives a request in this time
        picked = max(1, sum(len(nodes) for nodes in step.nodes))
        levels_seconds = step.cost.draft(max(0, outcome.draft_levels - 1), outcome.drafted_requests)
        for i, name in enumerate(step.batch.request_ids):
            tree, kind, state = outcome.trees[i], self._kinds[int(step.kinds[i])], self._requests[name]
            temperature = float(step.batch.temperatures[i])
            accepted = 1.0 + len(outcome.accepted_nodes[i])
            state.rate.add(accepted, plain_tokens)
            kind.rate.add(accepted, plain_tokens)
            if not len(tree):
                continue
            share = len(step.nodes[i]) / picked
            spent = step.extra_seconds * share + levels_seconds / max(1, outcome.drafted_requests)
            gain = float(step.node_values[i].sum()) - step.rate * spent
            state.gain.add(gain)
            kind.gains.setdefault(requests, Mean(KIND_STEPS)).add(gain)
            state.looks += 1
            values = self._calibrator.path_probabilities(tree, temperature)
            self._best_children.remember(tree, values, int(step.kinds[i]))
            seen = np.flatnonzero(~np.isnan(outcome.mass[i]))
            above = np.where(tree.parents[seen] >= 0, values[tree.parents[seen]], 1.0)
            expected = float((values[seen] / np.maximum(above, 1e-9)).sum())
            state.acceptance.add(float(outcome.mass[i][seen].sum()), expected)
            self._calibrator.observe(tree, outcome.mass[i], temperature)
        for kind_index in set(step.kinds.tolist()):
            self._kinds[kind_index].trials += step.drafts > 0


def _measured(outcome: StepOutcome) -> float:
    return outcome.draft_seconds + outcome.predict_seconds + outcome.verify_seconds


class UnprofiledGoodputPolicy(EcoSpecPolicy):
    """What stands in for goodput without a valid cost profile: the paper's fixed choice. The policy does not guess costs."""

    name = "goodput"

    def end_step(self, outcome: StepOutcome) -> Decision:
        decision = FixedPolicy.end_step(self, outcome)
        return Decision(
            self.name, decision.not_speculated, prediction=decision.prediction, fallback_policy=EcoSpecPolicy.name
        )
