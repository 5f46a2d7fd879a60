"""The state store against real Redis servers: gone, back, full, locked, encrypted; serving never waits for it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from ports import free_port
from prometheus_client import CollectorRegistry
from redis_server import RedisServer, eventually

from ecospec_orchestrator.accounting.state_metrics import StateMetrics
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.settings import load_settings
from ecospec_orchestrator.state import redis as redis_store
from ecospec_orchestrator.state.memory import MemoryStore
from ecospec_orchestrator.state.redis import QUEUE_RECORDS, RedisStore
from ecospec_orchestrator.state.sharing import open_sharing
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.predictor_version import PredictorVersion
from ecospec_proto.shared_state import (
    TRACE_FIELD,
    VERSION_FIELD,
    StateStoreError,
    StoreAddress,
    traces_key,
    versions_key,
)

GEOMETRY = TargetGeometry("fake", "r1", 1000, 8, 3, 32, 4)
FINGERPRINT = GEOMETRY.fingerprint


class Seen:
    """Metrics as a monitoring system reads them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = StateMetrics(self.registry)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"ecospec_{name}", labels)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "BACKOFF_SECONDS", (0.02, 0.1))
    monkeypatch.setattr(redis_store, "LOOK_SECONDS", 0.05)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def open_store(url: str, seen: Seen, max_records: int = 1000, password: str = "") -> RedisStore:
    return RedisStore(StoreAddress.parse(url, password), FINGERPRINT, max_records, seen.metrics)


def store_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "state-store"]


def number(i: int) -> Any:
    return lambda: b"%d" % i


def test_memory_keeps_the_newest_in_order(seen: Seen) -> None:
    store = MemoryStore(5, seen.metrics)
    for i in range(8):
        store.append_trace(number(i))
    assert store.read_traces(10) == [b"3", b"4", b"5", b"6", b"7"] and store.read_traces(2) == [b"6", b"7"]
    assert store.published_version() is None and seen("trace_records_written_total") == 8
    store.close()
    assert store.read_traces(10) == []


def test_redis_keeps_the_newest_in_order(server: RedisServer, seen: Seen) -> None:
    store = open_store(server.url, seen)
    for i in range(30):
        store.append_trace(number(i))
    store.close()
    store.close()
    assert store.read_traces(5) == [b"%d" % i for i in range(25, 30)] and len(store.read_traces(100)) == 30
    assert seen("trace_records_written_total") == 30 and seen("state_store_up") == 1
    with server.client() as client:
        assert client.xinfo_stream(traces_key(FINGERPRINT))["last-entry"][1] == {TRACE_FIELD: b"29"}


def test_the_stream_is_capped(server: RedisServer, seen: Seen) -> None:
    with server.client() as client:
        client.config_set("stream-node-max-entries", 10)
    store = open_store(server.url, seen, max_records=20)
    for i in range(100):
        store.append_trace(number(i))
        eventually(lambda i=i: seen("trace_records_written_total") == i + 1)
    store.close()
    kept = store.read_traces(1000)
    assert 20 <= len(kept) <= 30 and kept[-1] == b"99"


def test_a_server_that_is_gone_costs_samples_and_two_lines(
    server: RedisServer, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store(server.url, seen)
    eventually(lambda: seen("state_store_up") == 1)
    server.kill()
    eventually(lambda: seen("state_store_up") == 0)
    for i in range(QUEUE_RECORDS + 10):
        store.append_trace(number(i))
    eventually(lambda: (seen("trace_records_dropped_total", reason="queue_full") or 0) >= 9)
    server.start()
    eventually(lambda: seen("state_store_up") == 1)
    store.close()
    kept = store.read_traces(1000)
    # One record may have been at the server's door while others pushed it out of the queue, and have come back in front.
    assert kept[-1] == b"%d" % (QUEUE_RECORDS + 9) and len(kept) == QUEUE_RECORDS
    assert kept == sorted(kept, key=int)
    assert len(kept) + seen("trace_records_dropped_total", reason="queue_full") == QUEUE_RECORDS + 10  # type: ignore[operator]
    told = [r.getMessage() for r in caplog.records]
    assert [t.split(" (")[0] for t in told] == [
        f"The state store at {server.url} is connected.",
        f"The state store at {server.url} cannot be used",
        f"The state store at {server.url} is there again.",
    ]


def test_a_full_server_is_told_once_and_takes_records_again(
    server: RedisServer, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(server.url, seen)
    eventually(lambda: seen("state_store_up") == 1)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        store.append_trace(lambda: b"x" * 100)
        eventually(lambda: seen("state_store_up") == 0)
        eventually(lambda: client.info("stats")["total_error_replies"] >= 4)  # it has tried some more times
        assert seen("trace_records_written_total") == 0
        client.config_set("maxmemory", "0")
    eventually(lambda: seen("trace_records_written_total") == 1)
    store.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "maxmemory" in warnings[0]


def test_appending_does_not_wait_for_a_server_that_hangs(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:  # takes connections, never answers
        store = open_store(f"redis://127.0.0.1:{hung.getsockname()[1]}", seen)
        for i in range(QUEUE_RECORDS):
            store.append_trace(number(i))
        with pytest.raises(StateStoreError, match="cannot be read"):
            store.read_traces(1)
        store.close()
    assert not store._thread.is_alive()
    assert seen("trace_records_dropped_total", reason="closed") == QUEUE_RECORDS


def test_a_record_that_cannot_be_made_is_counted_and_the_next_one_goes(
    server: RedisServer, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bytes:
        raise ValueError("no such record")

    store = open_store(server.url, seen)
    for encode in (broken, broken, number(7)):
        store.append_trace(encode)
    store.close()
    assert store.read_traces(10) == [b"7"]
    assert seen("trace_records_dropped_total", reason="invalid") == 2
    assert [r.levelname for r in caplog.records if "no such record" in r.getMessage()] == ["ERROR"]


def test_the_password_opens_and_is_never_told(seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer(requirepass="hush-hush") as server:
        url = server.url.replace("redis://", "redis://:wrong-word@")
        shut = open_store(url, seen)
        eventually(lambda: any("cannot be used" in r.getMessage() for r in caplog.records))
        assert seen("state_store_up") == 0
        shut.close()
        store = open_store(url, seen, password="hush-hush")
        store.append_trace(number(1))
        store.close()
        assert seen("state_store_up") == 1 and store.read_traces(1) == [b"1"]
    text = "\n".join(r.getMessage() for r in caplog.records)
    assert "hush-hush" not in text and "wrong-word" not in text


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str, str]:
    """Key, certificate and authority."""
    authority, (key, crt, ca) = trustme.CA(), (str(tmp_path / f"{name}.pem") for name in ("key", "crt", "ca"))
    made = authority.issue_cert("127.0.0.1")
    made.private_key_pem.write_to_path(key)
    made.cert_chain_pems[0].write_to_path(crt)
    authority.cert_pem.write_to_path(ca)
    return key, crt, ca


def test_tls_checks_the_servers_certificate(
    certificate: tuple[str, str, str], seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    (key, crt, ca), port = certificate, free_port()
    options = {"tls_port": str(port), "tls_cert_file": crt, "tls_key_file": key, "tls_ca_cert_file": ca}
    with RedisServer(**options, tls_auth_clients="no"):
        store = open_store(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}", seen)
        store.append_trace(number(3))
        store.close()
        assert store.read_traces(1) == [b"3"]
        unknown = open_store(f"rediss://127.0.0.1:{port}/0", seen)
        eventually(lambda: any("CERTIFICATE_VERIFY_FAILED" in r.getMessage() for r in caplog.records))
        unknown.close()


def test_the_published_version_is_followed(server: RedisServer, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(server.url, seen)
    with server.client() as client:
        for name in ("1", "2"):
            entry = PredictorVersion(FINGERPRINT, name, "/models", "a" * 64, {}, 1.0)
            client.xadd(versions_key(FINGERPRINT), {VERSION_FIELD: entry.encode()})
            eventually(lambda name=name: (v := store.published_version()) is not None and v.version == name)
        client.xadd(versions_key(FINGERPRINT), {VERSION_FIELD: b"{"})
        eventually(lambda: any("passed over" in r.getMessage() for r in caplog.records))
    assert store.published_version() == entry
    eventually(lambda: seen("predictor_published_version_info", version="2") == 1)
    assert seen("predictor_published_version_info", version="1") is None
    store.close()


def test_the_version_in_use_has_one_series(seen: Seen) -> None:
    seen.metrics.observe_version_in_use("1")
    assert seen("predictor_version_info", version="1") == 1 and seen("predictor_version_changes_total") == 0
    seen.metrics.observe_version_in_use("v" * 100)
    assert seen("predictor_version_info", version="1") is None and seen("predictor_version_changes_total") == 1
    assert seen("predictor_version_info", version="v" * 64) == 1


@pytest.mark.parametrize(
    ("variables", "kind", "samples"),
    [
        ({}, MemoryStore, False),
        ({"ECOSPEC_TRACE_RATE_TOKENS_PER_SECOND": "5"}, MemoryStore, True),
        ({"ECOSPEC_STATE_STORE_URL": "redis://127.0.0.1:1"}, RedisStore, False),
    ],
)
def test_what_the_settings_share(
    variables: dict[str, str], kind: type, samples: bool, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = open_sharing(load_settings({}, variables), GEOMETRY, seen.metrics)
    assert type(sharing.store) is kind and (sharing.sampler is not None) is samples
    assert seen("state_store_up") == (kind is MemoryStore)
    sharing.close()
    assert not store_threads()


def test_a_target_that_cannot_be_sampled_stops_the_start(seen: Seen) -> None:
    settings = load_settings(
        {}, {"ECOSPEC_TRACE_RATE_TOKENS_PER_SECOND": "5", "ECOSPEC_STATE_STORE_URL": "redis://127.0.0.1:1"}
    )
    with pytest.raises(SettingsError, match="40000"):
        open_sharing(settings, TargetGeometry("wide", "r", 10, 8, 3, 40_000, 4), seen.metrics)
    assert not store_threads()
