"""Quotas and live settings in a real Redis: shared by replicas, and local while it is gone, full or hung."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis_server import RedisServer, eventually

from ecospec_orchestrator.accounting.state_metrics import StateMetrics
from ecospec_orchestrator.quotas import Buckets, Charge, Limit
from ecospec_orchestrator.state import redis as redis_store
from ecospec_orchestrator.state import redis_quotas
from ecospec_orchestrator.state.redis import RedisStore
from ecospec_orchestrator.state.redis_quotas import RedisQuotas
from ecospec_proto.shared_state import StoreAddress, quota_key, settings_key

FINGERPRINT = "f" * 16
AGE = 1e9  # seconds of a period in which nothing worth mentioning comes back
TEN = Limit(10.0, AGE)


class Replica:
    """A store with its metrics."""

    def __init__(self, url: str) -> None:
        self.registry = CollectorRegistry()
        self.store = RedisStore(StoreAddress.parse(url), FINGERPRINT, 10, StateMetrics(self.registry))

    def __call__(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"ecospec_{name}")

    async def take(self, tokens: float, bucket: str = "a", limit: Limit = TEN) -> float:
        return await self.store.take([Charge(bucket, limit, tokens)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "BACKOFF_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(redis_store, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(redis_quotas, "RETRY_SECONDS", 0.1)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def replica(server: RedisServer) -> Iterator[Any]:
    made: list[Replica] = []

    def make() -> Replica:
        made.append(Replica(server.url))
        return made[-1]

    yield make
    for each in made:
        each.store.close()


async def test_replicas_draw_on_one_bucket(replica: Any) -> None:
    one, two = replica(), replica()
    assert await one.take(6) == 0.0 and await two.take(4) == 0.0
    wait = await one.take(1)
    assert wait == pytest.approx(AGE / 10, rel=1e-3)
    two.store.give_back([Charge("a", TEN, 3)])
    wait_until_given = time.monotonic() + 10
    while await one.take(3):
        assert time.monotonic() < wait_until_given
        await asyncio.sleep(0.01)
    assert one("quotas_degraded") == 0 and one("quota_local_decisions_total") == 0


async def test_the_script_decides_as_the_buckets_do(server: RedisServer, replica: Any) -> None:
    """A period of an age: then both clocks stand still for what is compared."""
    pick, shared, own = random.Random(3), replica().store, Buckets(lambda: 0.0)
    refused = 0
    for _ in range(300):
        charges = [
            Charge(name, Limit(amount, AGE), pick.uniform(0, amount / 3))
            for name, amount in (("x", 10.0), ("y", 25.0), ("z", 3.0))
            if pick.random() < 0.6
        ]
        if pick.random() < 0.4:
            own.add(charges)
            shared._quotas._ask([Charge(c.bucket, c.limit, -c.tokens) for c in charges])  # give_back() does not wait
            continue
        expected, got = own.take(charges), await shared.take(charges)
        refused += expected > 0
        assert got == pytest.approx(expected, rel=1e-3, abs=60)
        assert (got == 0.0) == (expected == 0.0)
    assert 10 < refused < 250
    with server.client() as client:
        assert client.ttl(quota_key(FINGERPRINT, "x")) > 0, "what nobody asks for is forgotten"


async def test_a_clock_that_was_set_back_neither_fills_nor_blocks(server: RedisServer, replica: Any) -> None:
    one, minute = replica(), Limit(10.0, 10.0)
    assert await one.take(10, limit=minute) == 0.0
    with server.client() as client:
        client.hset(quota_key(FINGERPRINT, "a"), "at", time.time() + 1e6)  # as the server's clock was before
    assert 0 < await one.take(1, limit=minute) <= 1.01
    await asyncio.sleep(1.1)
    assert await one.take(1, limit=minute) == 0.0


async def test_a_server_that_dies_leaves_local_limits_and_says_so(
    server: RedisServer, replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, two = replica(), replica()
    assert await one.take(6) == 0.0
    server.kill()
    assert await one.take(4) == 0.0, "what this replica had taken is taken, and no more"
    assert await one.take(1) > 0
    assert await two.take(10) == 0.0, "each replica by itself"
    assert one("quotas_degraded") == 1 and one("quota_local_decisions_total") == 2
    one.store.give_back([Charge("a", TEN, 2)])
    assert await one.take(2) == 0.0
    server.start()
    await asyncio.sleep(0.2)
    assert await one.take(10) == 0.0, "an empty server has full buckets"
    assert await two.take(1) > 0
    assert one("quotas_degraded") == 0
    told = [r.getMessage() for r in caplog.records if "Quotas" in r.getMessage()]
    assert len(told) == 4 and sum("each replica applies them" in t for t in told) == 2  # of two replicas


async def test_a_full_server_leaves_local_limits(server: RedisServer, replica: Any) -> None:
    one = replica()
    with server.client() as client:
        client.config_set("maxmemory", "1")
        assert await one.take(10) == 0.0 and await one.take(1) > 0
        assert one("quotas_degraded") == 1
        client.config_set("maxmemory", "0")
    await asyncio.sleep(0.2)
    assert await one.take(1) == 0.0 and one("quotas_degraded") == 0


async def test_a_hung_server_holds_up_few_and_shortly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:  # takes connections, never answers
        quotas = RedisQuotas(
            StoreAddress.parse(f"redis://127.0.0.1:{hung.getsockname()[1]}"),
            FINGERPRINT,
            StateMetrics(CollectorRegistry()),
        )
        began = time.monotonic()
        waits = await asyncio.gather(*(quotas.take([Charge("a", TEN, 1)]) for _ in range(100)))
        assert sum(wait == 0.0 for wait in waits) == 10
        assert time.monotonic() - began < 15  # one after the other they would take 25 s
        quotas.close()


async def test_a_bucket_of_nonsense_does_not_refuse(server: RedisServer, replica: Any) -> None:
    with server.client() as client:
        client.set(quota_key(FINGERPRINT, "a"), "nonsense")
        client.hset(quota_key(FINGERPRINT, "b"), "filled", "many")
    one = replica()
    assert await one.take(1) == 0.0 and await one.take(1, "b") == 0.0
    assert one("quotas_degraded") == 1


def test_live_settings_outlive_a_server_that_forgets(
    server: RedisServer, replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = replica(), replica()
    seen: dict[str, Any] = {}
    two.store.follow_settings(lambda values: seen.update(now=dict(values)))
    assert one.store.share_settings({"gamma": "5", "eps": "2.0"})
    eventually(lambda: seen.get("now") == {"gamma": "5", "eps": "2.0"})
    assert two.store.share_settings({"eps": None, "max_waiting": "7"})
    assert seen["now"] == {"gamma": "5", "max_waiting": "7"}
    server.kill()
    assert not one.store.share_settings({"gamma": "6"})
    server.start()  # without any memory
    with server.client() as client:
        eventually(lambda: client.hget(settings_key(FINGERPRINT), "gamma") == b"5")
    assert seen["now"] == {"gamma": "5", "max_waiting": "7"}
    assert any("written back" in r.getMessage() for r in caplog.records)
    late = replica()
    late.store.follow_settings(lambda values: seen.update(late=dict(values)))
    eventually(lambda: seen.get("late") == {"gamma": "5", "max_waiting": "7"})


def test_live_settings_of_nonsense_are_told_once(
    server: RedisServer, replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, seen = replica(), []
    one.store.follow_settings(seen.append)
    with server.client() as client:
        client.hset(settings_key(FINGERPRINT), mapping={"revision": "many", "gamma": "5"})
        eventually(lambda: any("passed over" in r.getMessage() for r in caplog.records))
        time.sleep(0.3)
        assert sum("passed over" in r.getMessage() for r in caplog.records) == 1 and not seen
        assert one("state_store_up") == 1
        client.delete(settings_key(FINGERPRINT))
        client.hset(settings_key(FINGERPRINT), mapping={"revision": "1", "gamma": "5"})
    eventually(lambda: seen == [{"gamma": "5"}])
