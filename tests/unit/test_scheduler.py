"""The step loop over a small, exact target: a Markov chain whose logits depend on the last two tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCABULARY, ChainDrafter, greedy  # noqa: E402
from scheduler_harness import POLICIES  # noqa: E402

from ecospec_orchestrator.core import (
    DraftTree,
    InvalidRequestError,
    QueueFullError,
    SamplingParams,
    ShuttingDownError,
)
from ecospec_orchestrator.selection.base import BatchView, FixedPolicy
from ecospec_orchestrator.step import subtree, trim_to_depth


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_running", [1, 4])
def test_greedy_output_is_the_chains_own(harness: Any, policy: str, max_running: int) -> None:
    h = harness(policy, max_running=max_running)
    prompts = {f"r{i}": [i + 1] + [2 * i % VOCABULARY] * i for i in range(7)}
    for name, prompt in prompts.items():
        h.submit(name, prompt, tokens=17)
    for name, (tokens, last) in h.collect(7).items():
        assert tokens == greedy(prompts[name], 17)
        assert last.finish_reason == "length" and last.stats.output_tokens == 17
    if policy != "none":
        assert sum(sum(r.accepted) for r in h.reports) > 0, "the drafter was never right: the test shows nothing"


def test_sampled_output_depends_on_the_seed_alone(harness: Any) -> None:
    texts = []
    for i, policy in enumerate(POLICIES):
        h = harness(policy, max_running=(1, 4, 2)[i % 3])
        for seed in range(5):
            h.submit(f"s{seed}", sampling=SamplingParams(temperature=1.0, seed=seed))
        found = h.collect(5)
        texts.append([found[f"s{seed}"][0] for seed in range(5)])
    assert all(text == texts[0] for text in texts)
    assert len({tuple(t) for t in texts[0]}) == 5


@pytest.mark.parametrize("policy", ["none", "ecospec", "goodput"])
def test_a_stop_token_ends_the_text_and_is_left_out(harness: Any, policy: str) -> None:
    whole = greedy((3, 4, 5), 20)
    stop = whole[6]
    h = harness(policy)
    h.submit("a", stop_token_ids=frozenset({stop}))
    tokens, last = h.collect(1)["a"]
    assert tokens == whole[: whole.index(stop)] and last.finish_reason == "stop"


def test_a_step_is_accounted_as_measured(harness: Any) -> None:
    h = harness("ecospec")
    h.submit("a", tokens=12)
    _, last = h.collect(1)["a"]
    for report in h.reports:
        assert report.bytes_read.experts == 10 * report.distinct_experts.sum()
        assert report.bytes_read.total <= report.bytes_upper_bound
        assert report.emitted <= sum(report.accepted) + report.requests
        if report.predicted_actual_overlap is not None:  # the footprints are the real ones
            predicted, actual, both = report.predicted_actual_overlap
            assert predicted == actual == both
            assert report.footprint is not None and report.footprint.node_totals == (predicted, actual, both)
            assert (report.footprint.union_predicted == report.footprint.union_actual).all()
            assert (report.footprint.union_actual == report.distinct_experts).all(), "every row had a prediction"
    stats = last.stats
    assert stats.steps == len(h.reports) and stats.draft_tokens == sum(r.nodes for r in h.reports)
    assert stats.accepted_tokens == sum(k * n for k, n in stats.acceptance_histogram.items())
    assert sum(r.emitted for r in h.reports) == 12


class EveryOther(FixedPolicy):
    """Drafts for a request in some steps only, and verifies nothing then."""

    name, needs_drafts, needs_footprints = "every other", True, False

    def __init__(self, every: int) -> None:
        self.every, self.steps = every, 0

    def begin_step(self, batch: BatchView) -> np.ndarray:
        self.steps += 1
        return np.full(len(batch), self.steps % self.every == 0)

    def choose(self, trees: Sequence[DraftTree], footprints: Any) -> list[np.ndarray]:
        return [np.arange(len(tree), dtype=np.int32) for tree in trees]


@pytest.mark.parametrize(("every", "prompt"), [(3, [3, 4, 5]), (1000, [3])])
def test_what_was_decided_meanwhile_reaches_the_drafter(
    harness: Any, monkeypatch: pytest.MonkeyPatch, every: int, prompt: list[int]
) -> None:
    monkeypatch.setattr("ecospec_orchestrator.step.FEED_ROWS", 8)
    h = harness("likelihood", start=False)
    h.scheduler.policy = EveryOther(every)
    states: list[list[int]] = []
    new_state = h.drafter.new_state
    monkeypatch.setattr(h.drafter, "new_state", lambda: states.append(new_state()) or states[-1])
    fed: list[int] = []
    h.scheduler.on_step = lambda report: (h.reports.append(report), fed.append(len(states[0])))
    h.submit("a", prompt, tokens=30)
    h.scheduler.start()
    tokens, last = h.collect(1)["a"]
    assert tokens == greedy(prompt, 30)
    whole = [*prompt[1:], *tokens]
    assert states[0] == whole[: len(states[0])]  # everything, in order, once
    assert len(whole) - len(states[0]) <= 8 + 4  # and never far behind
    assert len(set(fed)) < len(fed) or every == 1, "it was fed in every step: nothing was put off"
    assert (sum(r.nodes for r in h.reports) > 0) == (every == 3)


def test_a_policy_that_overlaps_asks_while_the_last_level_is_drafted(harness: Any) -> None:
    h = harness("goodput", start=False)
    asked: list[int] = []
    begin = h.source.begin
    h.source.begin = lambda trees: asked.append(len(trees[0].tree)) or begin(trees)
    levels: list[int] = []
    draft = h.scheduler.drafter.draft
    h.scheduler.drafter.draft = lambda states, more: levels.append(len(asked)) or draft(states, more)
    h.scheduler.policy.another_level = lambda trees, level: True
    h.scheduler.policy.wants_footprints = lambda trees: True
    h.submit("a")
    h.scheduler.start()
    assert h.collect(1)["a"][0] == greedy((3, 4, 5), 20)
    assert asked[0] == 6  # two levels of 2 and 4 nodes; the last level's 4 are not known
    first = next(r for r in h.reports if r.nodes)
    assert first.predicted_actual_overlap is not None
    assert first.footprint is not None and first.footprint.rows <= 1 + first.nodes


def test_goodput_says_what_it_expected_and_why_it_did_not_speculate(harness: Any) -> None:
    h = harness("goodput")
    for i in range(6):
        h.submit(f"r{i}", [i + 1, 2 * i + 1], tokens=40)
    h.collect(6)
    decisions = [r.decision for r in h.reports]
    assert all(
        d.policy == "goodput" and d.expected_tokens >= r.requests for d, r in zip(decisions, h.reports, strict=True)
    )
    assert all((d.not_speculated is None) == r.speculated for d, r in zip(decisions, h.reports, strict=True))
    assert {d.not_speculated for d in decisions} <= {None, "drafting_does_not_pay", "no_node_pays", "nothing_drafted"}
    assert all(d.plain_seconds is not None and d.plain_seconds > 0 for d in decisions)
    assert b"ecospec_policy_nodes_chosen_count" in h.ledger.render()


def test_no_prediction_means_likelihood_and_is_counted(harness: Any) -> None:
    h, reference = harness("ecospec"), harness("likelihood")
    h.source.down = True
    h.submit("a")
    reference.submit("a")
    assert h.collect(1)["a"][0] == reference.collect(1)["a"][0] == greedy((3, 4, 5), 20)
    assert [r.sent for r in h.reports] == [r.sent for r in reference.reports]
    assert {r.fallback for r in h.reports if r.nodes} == {"unavailable"}
    assert b'ecospec_predictor_fallbacks_total{reason="unavailable"} 0.0' not in h.ledger.render()
    h.source.down = False
    h.submit("b")
    h.collect(1)
    assert h.reports[-2].fallback is None


def test_a_full_queue_refuses_with_a_time_to_retry(harness: Any) -> None:
    h = harness("none", max_running=1, max_waiting=2)
    h.engine.gate = threading.Event()
    refused = None
    for i in range(8):
        try:
            h.submit(f"r{i}", tokens=2)
        except QueueFullError as error:
            refused = error
            break
    assert refused is not None and refused.retry_after_seconds >= 1
    h.engine.gate.set()
    h.collect(i)


def test_the_predictor_is_told_whose_text_grows_and_when_it_ends(harness: Any) -> None:
    h = harness("ecospec")
    asked: dict[str, list[int]] = {}
    ended: list[str] = []
    answer = h.source.begin

    def begin(trees: Any) -> Any:
        for item in trees:
            assert item.request_id not in ended
            before = asked.get(item.request_id, [3, 4, 5])
            assert item.context_tokens[: len(before)] == before
            asked[item.request_id] = list(item.context_tokens)
        return answer(trees)

    h.source.begin, h.source.end = begin, ended.append
    for name in ("a", "b"):
        h.submit(name, tokens=20)
    found = h.collect(2)
    assert sorted(ended) == ["a", "b"]
    for name, (tokens, _) in found.items():
        text = [3, 4, 5, *tokens]
        assert asked[name] == text[: len(asked[name])] and len(asked[name]) > 10


def test_cancel_frees_the_slot_of_running_and_waiting_requests(harness: Any) -> None:
    h = harness("none", max_running=1)
    h.engine.gate = threading.Event()
    h.submit("running", tokens=60)
    h.submit("waiting", tokens=60)
    h.submit("next", tokens=3)
    h.scheduler.cancel("running")
    h.scheduler.cancel("waiting")
    h.scheduler.cancel("nobody")
    h.engine.gate.set()
    found = h.collect(3)
    assert found["running"][1].finish_reason == found["waiting"][1].finish_reason == "abort"
    assert found["next"][0] == greedy((3, 4, 5), 3)


def test_a_crash_fails_what_runs_and_refuses_what_comes(harness: Any) -> None:
    h = harness("none", start=False)
    h.engine.fail = True
    h.submit("a")
    h.scheduler.start()
    last = h.collect(1)["a"][1]
    assert last.finish_reason == "error" and "engine failed" in last.error
    h.scheduler._thread.join(10)
    assert not h.scheduler.alive
    with pytest.raises(ShuttingDownError):
        h.submit("b")


@pytest.mark.parametrize(
    ("prompt", "tokens", "param", "words"),
    [
        ((), 5, "prompt", "empty"),
        ((1,) * 60, 5, "max_tokens", "60 tokens.*at most 64"),
        ((1,) * 70, 5, "prompt", "70 tokens"),
        ((1, 23), 5, "prompt", "token id 23; ids from 0 to 22"),
        ((-1,), 5, "prompt", "token id -1"),
    ],
)
def test_what_cannot_run_is_refused_before_it_queues(
    harness: Any, prompt: tuple, tokens: int, param: str, words: str
) -> None:
    h = harness("none", start=False)
    with pytest.raises(InvalidRequestError, match=words) as error:
        h.submit("a", prompt, tokens)
    assert error.value.param == param and h.scheduler.waiting == 0


def test_stop_aborts_what_is_left(harness: Any) -> None:
    h = harness("none", start=False)
    h.submit("a")
    h.scheduler._stopping = True
    h.scheduler.start()
    assert h.collect(1)["a"][1].finish_reason == "abort"


def test_subtree_renumbers_and_trim_keeps_whole_paths() -> None:
    tree = ChainDrafter()._tree(3)
    kept = subtree(tree, np.array([0, 2, 3], np.int32))
    assert kept.tokens.tolist() == tree.tokens[[0, 2, 3]].tolist() and kept.parents.tolist() == [-1, 0, 0]
    shallow = trim_to_depth(tree, 1)
    assert len(shallow) == 2 and shallow.parents.tolist() == [-1, -1]
    assert trim_to_depth(tree, 9) is tree and len(trim_to_depth(tree, 0)) == 0
