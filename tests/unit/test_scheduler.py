"""The step loop over a small, exact target: a Markov chain whose logits depend on the last two tokens."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import (
    DraftTree,
    Footprints,
    InvalidRequestError,
    QueueFullError,
    Request,
    SamplingParams,
    ShuttingDownError,
    StepReport,
    TokenEvent,
)
from ecospec_orchestrator.engine.base import StepBytes, Verified, VerifyItem
from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_orchestrator.selection.factory import make_policy
from ecospec_orchestrator.step import subtree, trim_to_depth
from ecospec_proto.codec import pack_bitsets
from ecospec_proto.geometry import TargetGeometry

VOCABULARY, LAYERS, EXPERTS, TOP_K = 23, 3, 16, 2
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY, VOCABULARY)).astype(np.float32) * 2


def experts_of(token: int) -> np.ndarray:
    return np.array(
        [[(token * 3 + layer) % EXPERTS, (token * 5 + layer + 1) % EXPERTS] for layer in range(LAYERS)], np.uint8
    )


class ChainEngine:
    """A sequence is the list of its committed tokens."""

    geometry = TargetGeometry("chain", "test", VOCABULARY, 4, LAYERS, EXPERTS, TOP_K)
    step_bytes = StepBytes(per_expert=10, attention=100, shared=200, head=300, kv_per_token=1)
    max_context_tokens = 64

    def __init__(self) -> None:
        self.fail = False
        self.gate: threading.Event | None = None
        self.pending: dict[int, tuple[list[int], np.ndarray]] = {}

    def enter_thread(self) -> None: ...

    def new_sequence(self) -> list[int]:
        return []

    def prefill(self, sequence: list[int], tokens: np.ndarray) -> np.ndarray:
        sequence += tokens.tolist()
        return tokens[:, None]

    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        if self.gate is not None:
            self.gate.wait(10)
        if self.fail:
            raise RuntimeError("out of memory")
        return [self._verify(item) for item in items]

    def _verify(self, item: VerifyItem) -> Verified:
        before = item.sequence[-1] if item.sequence else 0
        last_two = [
            (before if parent < 0 else int(item.tokens[parent]), int(token))
            for token, parent in zip(item.tokens, item.parents, strict=True)
        ]
        self.pending[id(item.sequence)] = (item.tokens.tolist(), item.parents)
        return Verified(
            np.stack([LOGITS[pair] for pair in last_two]),
            np.array(item.tokens)[:, None],
            np.stack([experts_of(int(t)) for t in item.tokens]),
        )

    def commit(self, sequence: list[int], rows: np.ndarray) -> None:
        tokens, parents = self.pending.pop(id(sequence))
        assert rows[0] == 0 and all(parents[b] == a for a, b in zip(rows, rows[1:], strict=False)), (
            "not a path from the root"
        )
        sequence += [tokens[r] for r in rows]


class ChainDrafter:
    """Knows the last token only, so that it is right sometimes."""

    bytes_per_step = 7

    def new_state(self) -> list[int]:
        return []

    def extend(self, states: Sequence[list[int]], features: Sequence[Any], next_tokens: Sequence[Any]) -> None:
        for state, feature, tokens in zip(states, features, next_tokens, strict=True):
            assert len(feature) == len(tokens)
            state += list(tokens)

    def draft(self, states: Sequence[list[int]]) -> list[DraftTree]:
        return [self._tree(state[-1]) if state else DraftTree.empty() for state in states]

    def _tree(self, root: int) -> DraftTree:
        tokens, parents, probabilities, depths = [], [], [], []
        level = [(-1, int(root), 1.0)]
        for depth in (1, 2, 3):
            following = []
            for parent, token, above in level:
                mean = LOGITS[:, token].mean(0)
                share = np.exp(mean) / np.exp(mean).sum()
                for child in np.argsort(-share)[:2].tolist():
                    tokens.append(child)
                    parents.append(parent)
                    probabilities.append(above * share[child])
                    depths.append(depth)
                    following.append((len(tokens) - 1, child, above * share[child]))
            level = following[:2]
        return DraftTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(probabilities, np.float32),
            np.array(depths, np.int32),
        )


class ChainFootprints:
    def __init__(self) -> None:
        self.down = False

    def predict(self, trees: Sequence[TreeContext]) -> list[Footprints]:
        if self.down:
            raise FootprintUnavailableError("unavailable", "nobody listens")
        return [
            Footprints(
                pack_bitsets(
                    np.stack([experts_of(t) for t in (c.context_tokens[-1], *c.tree.tokens.tolist())]), EXPERTS
                ),
                np.ones(1 + len(c.tree), bool),
            )
            for c in trees
        ]

    def close(self) -> None: ...


class Harness:
    def __init__(self, policy: str, max_running: int = 4, max_waiting: int = 8) -> None:
        options = {"none": {}, "likelihood": {"gamma": 4}, "ecospec": {"gamma": 4, "top_k": TOP_K}}[policy]
        self.engine, self.source, self.ledger = ChainEngine(), ChainFootprints(), Ledger()
        self.scheduler = Scheduler(
            self.engine,
            ChainDrafter(),
            self.source,
            make_policy(policy, **options),
            Limits(max_running, max_waiting, 64),
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
            event = self.events.get(timeout=10)
            tokens.setdefault(event.request_id, []).extend(event.tokens)
            if event.finish_reason is not None:
                assert event.request_id not in ended, "two last events"
                ended[event.request_id] = event
        return {name: (tokens[name], event) for name, event in ended.items()}


@pytest.fixture
def harness() -> Iterator[Any]:
    made: list[Harness] = []

    def make(policy: str, start: bool = True, **limits: int) -> Harness:
        made.append(Harness(policy, **limits))
        if start:
            made[-1].scheduler.start()
        return made[-1]

    yield make
    for h in made:
        if h.engine.gate is not None:
            h.engine.gate.set()
        if h.scheduler._thread.ident is not None:
            h.scheduler.stop()


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    tokens = [0, *prompt]
    for _ in range(count):
        tokens.append(int(LOGITS[tokens[-2], tokens[-1]].argmax()))
    return tokens[len(prompt) + 1 :]


@pytest.mark.parametrize("policy", ["none", "likelihood", "ecospec"])
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
    for policy, max_running in (("none", 1), ("likelihood", 4), ("ecospec", 2)):
        h = harness(policy, max_running=max_running)
        for seed in range(5):
            h.submit(f"s{seed}", sampling=SamplingParams(temperature=1.0, seed=seed))
        found = h.collect(5)
        texts.append([found[f"s{seed}"][0] for seed in range(5)])
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(t) for t in texts[0]}) == 5


@pytest.mark.parametrize("policy", ["none", "ecospec"])
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
    stats = last.stats
    assert stats.steps == len(h.reports) and stats.draft_tokens == sum(r.nodes for r in h.reports)
    assert stats.accepted_tokens == sum(k * n for k, n in stats.acceptance_histogram.items())
    assert sum(r.emitted for r in h.reports) == 12


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
