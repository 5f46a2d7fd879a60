"""Token buckets against a plain simulation: never more than the limit, all charges of a request or none, honest times to wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecospec_orchestrator.quotas import Buckets, Charge, Limit

MINUTE = Limit(10.0, 60.0)
DAY = Limit(15.0, 86_400.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def both(tokens: float) -> list[Charge]:
    return [Charge("minute", MINUTE, tokens), Charge("day", DAY, tokens)]


def test_all_is_taken_or_nothing_is() -> None:
    clock = Clock()
    buckets = Buckets(clock)
    assert buckets.take(both(10)) == 0.0
    clock.now = 60.0  # the minute's is full again, the day's has 5 and a bit
    wait = buckets.take(both(9))
    assert wait == pytest.approx((9 - 5 - 60 * DAY.per_second) / DAY.per_second)
    assert buckets.take(both(5)) == 0.0  # what was refused has taken nothing from the minute's
    assert buckets.take([Charge("minute", MINUTE, 5)]) == 0.0


def test_no_charge_is_free() -> None:
    assert Buckets().take([]) == 0.0


def test_what_is_given_back_can_be_taken_but_never_more_than_fits() -> None:
    buckets = Buckets(Clock())
    assert buckets.take([Charge("a", MINUTE, 8)]) == 0.0
    buckets.add([Charge("a", MINUTE, 100)])
    assert buckets.take([Charge("a", MINUTE, 10)]) == 0.0
    assert buckets.take([Charge("a", MINUTE, 0.5)]) > 0


def test_a_limit_that_is_changed_counts_at_once() -> None:
    buckets = Buckets(Clock())
    assert buckets.take([Charge("a", MINUTE, 1)]) == 0.0
    assert buckets.take([Charge("a", Limit(2.0, 60.0), 3)]) > 0
    assert buckets.take([Charge("a", Limit(2.0, 60.0), 2)]) == 0.0


def test_buckets_are_apart() -> None:
    buckets = Buckets(Clock())
    assert buckets.take([Charge("a", MINUTE, 10)]) == 0.0
    assert buckets.take([Charge("b", MINUTE, 10)]) == 0.0


@given(
    st.floats(1, 1000),
    st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1.5)), max_size=50),
)
def test_no_window_holds_more_than_the_limit_and_waiting_as_told_is_enough(
    amount: float, period: float, asks: list[tuple[float, float]]
) -> None:
    clock, limit = Clock(), Limit(amount, period)
    buckets, taken = Buckets(clock), []
    for pause, share in asks:
        clock.now += pause
        tokens = share * amount
        wait = buckets.take([Charge("a", limit, tokens)])
        if wait and tokens <= amount:
            clock.now += wait * (1 + 1e-9) + 1e-6
            wait = buckets.take([Charge("a", limit, tokens)])
            assert wait == 0.0
        if not wait:
            taken.append((clock.now, tokens))
    for i, (start, _) in enumerate(taken):  # whatever the window, at most a full bucket and what came back
        for j in range(i, len(taken)):
            within = sum(tokens for _, tokens in taken[i : j + 1])
            assert within <= amount + (taken[j][0] - start) * limit.per_second + 1e-5 * (1 + within)
