"""Long prompts beside decoding requests, and requests beside each other in a small cache; counted in steps and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_engine import VOCABULARY, greedy  # noqa: E402
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import Harness  # noqa: E402

from ecospec_orchestrator.admission import fits, worst_case_pages
from ecospec_orchestrator.core import InvalidRequestError, Request
from ecospec_orchestrator.engine.torch import cache
from ecospec_orchestrator.prefill import (
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    PrefillCost,
    PrefillMeter,
    PrefillPace,
    chunk_tokens,
    next_in_turn,
)
from ecospec_orchestrator.selection.base import FixedPolicy

SECONDS = st.floats(1e-4, 10)
PER_TOKEN = st.floats(1e-6, 0.1)


class Everything(FixedPolicy):
    """Verifies the whole tree: as many rows as there can be."""

    name, needs_drafts, needs_footprints = "everything", True, False

    def choose(self, trees: Sequence[Any], footprints: Any) -> list[np.ndarray]:
        return [np.arange(len(tree), dtype=np.int32) for tree in trees]


# The rule.


@given(st.integers(1, 20_000), SECONDS, PER_TOKEN, SECONDS)
def test_a_chunk_is_about_a_step_long_or_balanced_or_the_smallest(
    remaining: int, fixed: float, per_token: float, step: float
) -> None:
    cost = PrefillCost(fixed, per_token)
    tokens = chunk_tokens(remaining, cost, step)
    assert 1 <= tokens <= min(remaining, LARGEST_CHUNK)
    longest = max(step, 2 * fixed, cost.seconds(SMALLEST_CHUNK))
    assert cost.seconds(tokens - 1) <= 1.25 * longest * (1 + 1e-9)
    # Not wasteful: what is left is not cut into crumbs.
    wanted = min(max(SMALLEST_CHUNK, (step - fixed) / per_token, fixed / per_token), LARGEST_CHUNK)
    assert tokens >= min(remaining, wanted / 2)


@given(st.integers(1, 20_000), SECONDS, PER_TOKEN, SECONDS)
def test_chunks_add_up_to_the_prompt_in_even_parts(remaining: int, fixed: float, per_token: float, step: float) -> None:
    cost, chunks = PrefillCost(fixed, per_token), []
    while remaining:
        chunks.append(chunk_tokens(remaining, cost, step))
        remaining -= chunks[-1]
    assert len(chunks) == 1 or max(chunks) - min(chunks) <= max(2, 0.5 * max(chunks))


@given(SECONDS, PER_TOKEN, st.lists(st.integers(1, 512), min_size=2, max_size=20))
def test_the_cost_is_learned_from_what_is_measured(fixed: float, per_token: float, sizes: list[int]) -> None:
    true, meter = PrefillCost(fixed, per_token), PrefillMeter()
    meter.observe(1, 1e6)  # the first one compiles
    assert meter.cost is None
    meter.observe(sizes[0], true.seconds(sizes[0]))
    assert meter.cost is not None and meter.cost.seconds(sizes[0]) == pytest.approx(true.seconds(sizes[0]))
    for size in sizes[1:]:
        meter.observe(size, true.seconds(size))
    assert meter.cost.fixed >= 0 and meter.cost.per_token > 0
    size = sizes[-1]
    for _ in range(50):  # of one size in the end, whose cost has changed
        meter.observe(size, 3 * true.seconds(size))
    assert meter.cost.seconds(size) == pytest.approx(3 * true.seconds(size), rel=0.01)


@given(
    fixed_in_tokens=st.floats(1, 400),
    per_token=PER_TOKEN,
    sizes=st.lists(st.sampled_from([32, 100, 300, 512]), min_size=2, max_size=2, unique=True),
)
def test_two_sizes_tell_both_parts(fixed_in_tokens: float, per_token: float, sizes: list[int]) -> None:
    true, meter = PrefillCost(fixed_in_tokens * per_token, per_token), PrefillMeter()
    for size in [1, *sizes, *[sizes[0]] * 50]:
        meter.observe(size, true.seconds(size))
        last = meter.cost
    assert last is not None
    assert (last.fixed, last.per_token) == pytest.approx((true.fixed, true.per_token), rel=1e-2)


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.05, 3),
    fixed=st.floats(1e-3, 0.5),
    per_token=st.floats(1e-5, 1e-2),
    step=st.floats(5e-3, 0.5),
    prompt=st.integers(1, 4000),
    noise=st.integers(0, 2**31),
)
def test_the_pace_keeps_its_share_and_the_prompt_goes_on(
    share: float, fixed: float, per_token: float, step: float, prompt: int, noise: int
) -> None:
    random, true = np.random.default_rng(noise), PrefillCost(fixed, per_token)
    pace = PrefillPace(share)
    for _ in range(2):
        pace.observe_chunk(300, true.seconds(300), decoding=False)
    stepping = chunking = longest = 0.0
    while prompt:
        seconds = step * random.uniform(0.8, 1.25)
        pace.observe_step(seconds)
        stepping += seconds
        tokens = pace.tokens(prompt, decoding=True)
        assert 0 <= tokens <= prompt
        if tokens:
            seconds = true.seconds(tokens) * random.uniform(0.9, 1.1)
            pace.observe_chunk(tokens, seconds, decoding=True)
            chunking, longest, prompt = chunking + seconds, max(longest, seconds), prompt - tokens
        # Paid for before it runs, as far as its time was known: one chunk at most is owed.
        assert chunking <= share * stepping + longest
        assert stepping < 1e6 * step, "the prompt starves"


def test_nothing_decodes_so_chunks_are_large_and_free() -> None:
    pace = PrefillPace(0.8)
    assert pace.tokens(2000, decoding=False) == LARGEST_CHUNK and pace.tokens(7, decoding=False) == 7
    pace.observe_chunk(LARGEST_CHUNK, 1.0, decoding=False)
    assert pace.tokens(2000, decoding=False) == LARGEST_CHUNK


def test_the_shortest_and_the_oldest_take_turns() -> None:
    assert [next_in_turn([900, 30, 20, 20], turn) for turn in range(4)] == [2, 0, 2, 0]


# Admission.


def test_the_worst_case_counts_prompt_answer_and_tree() -> None:
    request = Request("a", (1,) * 40, 16)
    assert worst_case_pages(request, 9, 64) == 1 and worst_case_pages(request, 10, 64) == 2


@given(st.integers(1, 50), st.lists(st.integers(1, 50), max_size=8), st.integers(1, 200))
def test_what_fits_is_what_all_of_them_may_need(worst: int, running: list[int], pages: int) -> None:
    assert fits(worst, running, pages) == (sum([worst, *running]) <= pages)


class Clock:
    """Stands in for the module time: the fake engine's work moves it on."""

    def __init__(self, engine: Any, cost: PrefillCost, step_seconds: float) -> None:
        self.now, prefill, verify = 0.0, engine.prefill, engine.verify

        def slow_prefill(sequence: Any, tokens: np.ndarray) -> Any:
            self.now += cost.seconds(len(tokens))
            return prefill(sequence, tokens)

        def slow_verify(items: Any) -> Any:
            self.now += step_seconds
            return verify(items)

        engine.prefill, engine.verify = slow_prefill, slow_verify

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    monkeypatch.setattr(cache, "PAGE_TOKENS", 8)
    made: list[Harness] = []

    def make(**options: Any) -> Harness:
        made.append(Harness("none", **{"max_context_tokens": 4000, "max_waiting": 100, **options}))
        made[-1].scheduler.policy = Everything()
        return made[-1]

    yield make
    for h in made:
        if h.scheduler._thread.ident is not None:
            h.scheduler.stop()


def turn(h: Harness) -> None:
    """What the scheduler's own thread does over and over."""
    h.scheduler._drop_cancelled()
    h.scheduler._admit()
    h.scheduler._prefiller.turn(h.scheduler._running, h.ledger)
    if any(r.decodes for r in h.scheduler._running):
        h.scheduler.step()


def drain(h: Harness) -> None:
    while h.scheduler.running or h.scheduler.waiting:
        turn(h)
        tables = [r.sequence.cache.pages for r in h.scheduler._running]
        assert h.engine.pool.audit(tables) is None
        assert h.drafter.pool.audit([r.draft_state.cache.pages for r in h.scheduler._running]) is None
    assert h.engine.cache_use().used == h.drafter.pool.use().used == 0
    assert h.engine.check_idle() is None and h.drafter.check_idle() is None


PROMPT = st.tuples(st.integers(1, 50), st.integers(1, 3), st.integers(1, 30))  # length, which text, max_tokens


@settings(max_examples=40, deadline=None)
@given(
    pages=st.integers(2, 24),
    max_running=st.integers(1, 5),
    prompts=st.lists(PROMPT, min_size=1, max_size=8),
    reuse=st.booleans(),
)
def test_an_admitted_request_always_finds_its_pages(
    pages: int, max_running: int, prompts: list[tuple[int, int, int]], reuse: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PAGE_TOKENS", 8)
        h = Harness("none", max_running, 100, 4000, pages, reuse)
        h.scheduler.policy = Everything()
        wanted = {}
        for i, (length, text, tokens) in enumerate(prompts):
            prompt = [(j * text + j // 5) % VOCABULARY for j in range(length)]
            needed = -(-(length + tokens - 1 + h.drafter.max_nodes) // 8)
            if needed > pages:
                with pytest.raises(InvalidRequestError, match=f"may need {needed} pages .* it has {pages}:"):
                    h.submit(f"r{i}", prompt, tokens)
            else:
                h.submit(f"r{i}", prompt, tokens)
                wanted[f"r{i}"] = greedy(prompt, tokens)
        drain(h)  # a CacheFullError would come out here
        assert {name: tokens for name, (tokens, _) in h.collect(len(wanted)).items()} == wanted


def test_small_requests_do_not_overtake_one_that_waits_for_pages(harness: Any) -> None:
    h = harness(pages=10, max_running=8)
    h.submit("first", [1] * 20, 20)  # 7 pages
    h.submit("large", [2] * 30, 20)  # 8 pages
    for i in range(4):
        h.submit(f"small{i}", [3], 2)  # 2 pages each
    turn(h)
    assert h.scheduler.running == 1 and h.scheduler.waiting == 5
    order: list[str] = []
    drain(h)
    while not h.events.empty():
        event = h.events.get()
        order += [event.request_id] * (event.finish_reason is not None)
    assert order[0] == "first" and set(order) == {"first", "large", *(f"small{i}" for i in range(4))}


@pytest.mark.parametrize("how", ["finish", "stop token", "cancel in prefill", "cancel", "error", "abort"])
def test_every_end_gives_all_pages_back(harness: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    h = harness(pages=64)
    clock = Clock(h.engine, PrefillCost(0.01, 0.0004), step_seconds=0.03)
    for module in ("scheduler", "prefill"):
        monkeypatch.setattr(f"ecospec_orchestrator.{module}.time", clock)
    stop = frozenset({greedy([3, 4, 5], 9)[8]}) if how == "stop token" else frozenset()
    h.submit("a", [3, 4, 5], 30, stop_token_ids=stop)
    turn(h)
    h.submit("b", [4] * 200, 30)
    while len(h.engine.prefills) < 2:
        turn(h)
    assert h.engine.cache_use().used > 0 and h.drafter.pool.use().used > 0
    assert [r.decodes for r in h.scheduler._running] == [True, False]
    if how.startswith("cancel"):
        if how == "cancel":
            while not all(r.decodes for r in h.scheduler._running):
                turn(h)
        h.scheduler.cancel("b")
    elif how == "error":
        h.scheduler._end_all("error", "it broke")
    elif how == "abort":
        h.scheduler._stopping = True
        h.scheduler._loop()
    drain(h)
    found = h.collect(2)
    reasons = {"finish": ("length", "length"), "stop token": ("stop", "length"), "error": ("error", "error")}
    assert (found["a"][1].finish_reason, found["b"][1].finish_reason) == reasons.get(
        how, ("abort",) * 2 if how == "abort" else ("length", "abort")
    )
    stats = found["b"][1].stats
    assert stats.prefill_seconds > 0 and (stats.decode_seconds > 0) == (how in ("finish", "stop token", "cancel"))


def test_a_crash_gives_all_pages_back(harness: Any) -> None:
    h = harness()
    h.engine.fail = True
    h.submit("a", [3] * 20, 5)
    h.scheduler.start()
    assert h.collect(1)["a"][1].finish_reason == "error"
    h.scheduler._thread.join(10)
    assert h.engine.cache_use().used == h.drafter.pool.use().used == 0


def test_a_lost_page_is_reported_and_serving_goes_on(harness: Any, caplog: pytest.LogCaptureFixture) -> None:
    h = harness(pages=16)
    h.submit("a", [3] * 20, 5)
    drain(h)
    h.engine.pool.take(3)
    h.drafter.pool.take(2)
    h.scheduler._check_caches()
    assert "the target's KV cache was not in order when idle and starts afresh: of 16 pages, 3" in caplog.text
    assert "the drafter's KV cache was not in order when idle and starts afresh: of 16 pages, 2" in caplog.text
    assert b"ecospec_kv_cache_violations_total 2.0" in h.ledger.render()
    h.submit("b", [3] * 20, 60)  # all 12 pages
    h.scheduler.start()
    assert h.collect(2)["b"][0] == greedy([3] * 20, 60)


# Prefix reuse.


def test_a_prompt_that_begins_alike_is_not_computed_again(harness: Any) -> None:
    common = [(i * 7) % VOCABULARY for i in range(600)]
    h = harness(pages=200)
    h.submit("a", [*common, 1, 2], 30)
    drain(h)
    answer = h.collect(1)["a"][0]
    before = sum(h.engine.prefills)
    assert before == 601
    # As in a chat: what was asked, the answer, and more; the answer's last token never was in the cache.
    follow_up = [*common, 1, 2, *answer, 5, 6]
    h.submit("b", follow_up, 30)
    h.submit("c", [*common, 9], 30)
    drain(h)
    found = h.collect(2)
    assert found["b"][0] == greedy(follow_up, 30) and found["c"][0] == greedy([*common, 9], 30)
    reused = {"b": (602 + 29) // 8 * 8, "c": 600}
    assert sum(h.engine.prefills) - before == len(follow_up) - 1 - reused["b"] + 600 - reused["c"]
    text = h.ledger.render().decode()
    assert f"ecospec_prefix_cache_hits_total {float(sum(reused.values()))}" in text
    assert f"ecospec_prefix_cache_queries_total {601 + len(follow_up) - 1 + 600}.0" in text
    assert f"ecospec_prefill_tokens_total {float(sum(h.engine.prefills))}" in text
    assert f"ecospec_prefill_chunk_seconds_count {float(len(h.engine.prefills))}" in text


def test_reuse_can_be_switched_off(harness: Any) -> None:
    h = harness(pages=64, prefix_reuse=False)
    for name in "ab":
        h.submit(name, [3] * 41, 5)
        drain(h)
    assert h.engine.prefills == [40, 40] and h.engine.cache_use().kept == 0


# A long prompt among decoding requests.


@pytest.mark.parametrize("cost", [PrefillCost(0.010, 0.0004), PrefillCost(0.060, 0.001), PrefillCost(0.001, 0.0001)])
def test_a_long_prompt_does_not_stall_the_others(
    harness: Any, monkeypatch: pytest.MonkeyPatch, cost: PrefillCost
) -> None:
    step = 0.03
    h = harness(pages=2000, max_running=8)
    clock = Clock(h.engine, cost, step)
    for module in ("scheduler", "prefill"):
        monkeypatch.setattr(f"ecospec_orchestrator.{module}.time", clock)
    for i in range(3):
        h.submit(f"r{i}", [i + 1] * 40, 1500)
    while not all(r.decodes for r in h.scheduler._running) or not h.scheduler._running:
        turn(h)
    ends: list[float] = []
    h.scheduler.on_step = lambda _report: ends.append(clock.now)
    turn(h)
    long = [(i * 5) % VOCABULARY for i in range(2049)]
    h.submit("long", long, 5)
    h.submit("short", [7] * 20, 5)
    before, start = len(h.engine.prefills), len(ends)
    steps_to_first: dict[str, int] = {}
    while len(steps_to_first) < 2:
        turn(h)
        for r in h.scheduler._running:
            if r.decodes and r.request.request_id in ("long", "short"):
                steps_to_first.setdefault(r.request.request_id, len(ends) - start)
    chunks = h.engine.prefills[before:]
    assert sum(chunks) == 2048 + 19
    gaps = np.diff(ends[start - 1 :])
    assert gaps.mean() <= 1.8 * step + max(map(cost.seconds, chunks)) / len(gaps)
    longest = max(step, 2 * cost.fixed, cost.seconds(SMALLEST_CHUNK))
    assert gaps[1:].max() <= step + 1.3 * longest
    assert gaps[0] <= step + 1.5 * longest  # all that was known then were chunks of 39 tokens
    # The time left for it is used, and the short one that came later is not kept waiting.
    assert steps_to_first["long"] * step * 0.8 <= 1.3 * sum(map(cost.seconds, chunks))
    assert steps_to_first["short"] < steps_to_first["long"] / 4
    for name in [f"r{i}" for i in range(3)]:
        h.scheduler.cancel(name)
    drain(h)
    found = h.collect(5)
    assert found["long"][0] == greedy(long, 5) and found["short"][0] == greedy([7] * 20, 5)
    stats = found["long"][1].stats
    assert stats.prefill_seconds == pytest.approx(
        steps_to_first["long"] * step + sum(map(cost.seconds, chunks)), rel=0.2
    )
    assert stats.queue_seconds + stats.prefill_seconds + stats.decode_seconds <= clock.now
