"""Sampled routes are those of the rows that the engine verified, at no more than the rate that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import LAYERS, TOP_K, VOCABULARY, ChainEngine, experts_of, greedy
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import Harness

from ecospec_orchestrator.core import Request, RequestStats, SettingsError
from ecospec_orchestrator.engine.base import Verified, VerifyItem
from ecospec_orchestrator.quotas import TokenBucket
from ecospec_orchestrator.running import Running
from ecospec_orchestrator.state.route_sampler import (
    CONTEXT_TOKENS,
    PIECE_ROWS,
    SHORTEST_TOKENS,
    RouteSampler,
)
from ecospec_orchestrator.verification.accept import Acceptance
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument
from ecospec_proto.trace_record import decode_record

GEOMETRY = ChainEngine.geometry


class Sampled:
    """A harness whose scheduler samples; records are made once they are read."""

    def __init__(self, policy: str = "likelihood", rate: float = 1e6, **options: Any) -> None:
        self.harness = Harness(policy, **options)
        self.made: list[Callable[[], bytes]] = []
        self.rows, self.now = 0, 0.0
        self.sampler = RouteSampler(GEOMETRY, rate, self.made.append, self._count, lambda: self.now)
        self.harness.scheduler.on_verified = self.sampler.observe

    def _count(self, rows: int) -> None:
        self.rows += rows

    def run(self, requests: int, tokens: int, **fields: Any) -> dict[str, Any]:
        for i in range(requests):
            self.harness.submit(f"r{i}", (3, 4, 5 + i), tokens, **fields)
        self.harness.scheduler.start()
        ended = self.harness.collect(requests)
        self.harness.scheduler.stop()
        return ended

    def records(self) -> list[TraceDocument]:
        return [decode_record(make(), GEOMETRY) for make in self.made]


@pytest.mark.parametrize("policy", ["none", "likelihood", "ecospec", "goodput"])
def test_a_record_is_what_the_target_did(policy: str) -> None:
    run = Sampled(policy)
    run.run(requests=4, tokens=40)
    records = run.records()
    assert len(records) == 4 and len({r.document_id for r in records}) == 4
    assert run.rows == sum(int((r.routes >= 0).any((1, 2)).sum()) for r in records)
    prompts = []
    for record in records:
        routed = (record.routes >= 0).all((1, 2))
        assert routed.argmax() == 2 and routed[2:].all(), "two tokens of the prompt lie before the first root"
        for token, routes in zip(record.tokens[2:], record.routes[2:], strict=True):
            np.testing.assert_array_equal(routes, experts_of(int(token)))
        chain = record.tokens[record.accepted].tolist()
        prompts.append(chain[2])
        prompt = chain[:3]
        assert chain == prompt + greedy(prompt, len(chain) - 3)
        assert record.positions[record.accepted].tolist() == list(range(len(chain)))
    assert sorted(prompts) == [5, 6, 7, 8]
    if policy == "likelihood":
        assert any(not r.accepted.all() for r in records), "drafts are rejected now and then, and recorded"


def test_a_piece_ends_after_its_rows_and_a_request_is_sampled_once() -> None:
    run = Sampled("none", max_context_tokens=300, pages=100)
    run.harness.engine.max_context_tokens = 300
    run.run(requests=1, tokens=200)
    (record,) = run.records()
    assert (record.routes >= 0).all((1, 2)).sum() == PIECE_ROWS == run.rows


def one_row(token: int) -> tuple[VerifyItem, Verified, Acceptance]:
    """A step without drafts."""
    item = VerifyItem(None, np.array([token]), np.array([-1]))
    accepted = Acceptance(np.array([0]), np.array([1]), np.array([1.0]))
    return item, Verified(np.zeros((1, VOCABULARY), np.float32), None, experts_of(token)[None]), accepted


def running(name: str, tokens: list[int]) -> Running:
    request = Request(name, tuple(tokens), 50)
    return Running(request, lambda _: None, None, None, 0, tokens[-1], lambda _: 0.0, RequestStats(), tokens, 0.0)


def test_the_context_is_a_tail_of_the_text_and_a_cancelled_request_is_handed_over() -> None:
    made: list[Callable[[], bytes]] = []
    sampler = RouteSampler(GEOMETRY, 1.0, made.append, lambda _: None)
    text = [i % VOCABULARY for i in range(CONTEXT_TOKENS + 9)]
    item, verified, accepted = one_row(text[-1])
    sampler.observe([running("a", text)], [item], [verified], [accepted])
    assert not made
    sampler.observe([], [], [], [])
    (record,) = (decode_record(make(), GEOMETRY) for make in made)
    assert record.tokens.tolist() == text[8 - len(text) :]
    assert record.positions.tolist() == list(range(8, len(text)))
    assert (record.routes[:-1] == -1).all() and (record.routes[-1] == experts_of(text[-1])).all()


@pytest.mark.parametrize("policy", ["none", "likelihood"])
@pytest.mark.parametrize("at", [5, 6, 7])
def test_a_stop_token_ends_a_piece(policy: str, at: int) -> None:
    run, answer = Sampled(policy), greedy((3, 4, 5), 10)
    run.run(requests=1, tokens=40, stop_token_ids=frozenset([answer[at]]))
    end = 3 + answer.index(answer[at])
    (record,) = run.records()
    chain = record.tokens[record.accepted].tolist()
    assert chain == ([3, 4, 5] + answer)[: len(chain)]
    assert len(chain) == end if policy == "none" else end <= len(chain) <= end + 1, "a stop token may have been drafted"


def test_without_credit_nothing_is_sampled_and_time_brings_it_back() -> None:
    run = Sampled("none", rate=1.0)
    run.run(requests=6, tokens=40)
    assert len(run.made) == 1 and run.rows == 40, "88 of 128 rows came back, which are too few for another piece"

    later = Sampled("none", rate=1.0)
    later.sampler._bucket.take(PIECE_ROWS, 0.0)
    later.now = PIECE_ROWS - 1.0
    assert later.run(requests=1, tokens=9) and not later.made
    again = Sampled("none", rate=1.0)
    again.sampler._bucket.take(PIECE_ROWS, 0.0)
    again.now = float(PIECE_ROWS)
    assert again.run(requests=1, tokens=9) and len(again.made) == 1


@given(
    st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 300), st.floats(0, 1)), max_size=60),
)
def test_a_bucket_never_gives_more_than_its_rate(rate: float, asks: list[tuple[float, float, float]]) -> None:
    capacity = max(PIECE_ROWS, rate)
    bucket, now, used = TokenBucket(rate, capacity, capacity, 0.0), 0.0, 0.0
    for wait, tokens, unused_share in asks:
        now += wait
        if bucket.take(tokens, now):
            used += tokens * (1 - unused_share)
            bucket.settle(tokens * unused_share)
        assert used <= capacity + rate * now + 1e-6 * (1 + used)
    assert not bucket.take(capacity * 1.01 + 1, now + 1e6)


def test_a_clock_that_jumps_back_takes_nothing_away() -> None:
    bucket = TokenBucket(1.0, 10.0, 0.0, 100.0)
    assert not bucket.take(1, 50.0) and not bucket.take(1, 100.5) and bucket.take(1, 101.0)


def test_a_probe_is_not_sampled() -> None:
    run = Sampled("none")
    run.run(requests=3, tokens=1)
    assert not run.made
    run = Sampled("none")
    run.run(requests=1, tokens=SHORTEST_TOKENS)
    assert len(run.made) == 1


def test_close_hands_over_what_is_unfinished() -> None:
    made: list[Callable[[], bytes]] = []
    sampler = RouteSampler(GEOMETRY, 1.0, made.append, lambda _: None)
    item, verified, accepted = one_row(4)
    sampler.observe([running("a", [3, 4])], [item], [verified], [accepted])
    sampler.close()
    assert len(made) == 1 and decode_record(made[0](), GEOMETRY).tokens.tolist() == [3, 4]


def test_sampling_does_not_change_an_answer() -> None:
    plain = Harness("likelihood")
    plain.submit("r0", (3, 4, 5), 40)
    plain.scheduler.start()
    expected = plain.collect(1)["r0"][0]
    plain.scheduler.stop()
    assert Sampled().run(requests=1, tokens=40)["r0"][0] == expected


def test_a_target_beyond_int16_is_refused() -> None:
    wide = TargetGeometry("wide", "test", VOCABULARY, 4, LAYERS, 40_000, TOP_K)
    with pytest.raises(SettingsError, match=r"trace_rate_tokens_per_second is 5.*40000.*32768"):
        RouteSampler(wide, 5.0, lambda _: None, lambda _: None)
