"""The administrators' port of a real process: off by default, its own key, live settings, draining and back."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from redis_server import RedisServer, eventually
from server_process import ServerProcesses, health, post, read_line

from ecospec_orchestrator.api.admin import Control, create_admin
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.live import LIVE, LiveSettings, changed_settings
from ecospec_orchestrator.settings import Settings

KEY = "an-administrators-long-key"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerProcesses]:
    processes = ServerProcesses(tmp_path)
    yield processes
    processes.close()


class Admin:
    def __init__(self, start: ServerProcesses, **settings: Any) -> None:
        self.port = free_port()
        self.child, self.url = start(admin_port=self.port, admin_key=KEY, **settings)
        self.ready_line = read_line(self.child)

    def __call__(self, method: str, path: str, key: str | None = KEY, **options: Any) -> httpx.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.request(
            method,
            f"http://127.0.0.1:{self.port}/admin/{path}",
            headers=headers,
            trust_env=False,
            timeout=20,
            **options,
        )


def test_settings_change_live_and_a_bad_change_changes_nothing(start: ServerProcesses) -> None:
    admin = Admin(start, gamma=4)
    assert admin("GET", "status").json()["settings"]["gamma"] == 4
    answer = admin("PATCH", "settings", json={"gamma": 6, "policy": "ecospec", "key_requests_per_minute": 2})
    assert answer.status_code == 200, answer.text
    assert answer.json()["shared"] is False and answer.json()["settings"]["gamma"] == 6
    assert answer.json()["changed"] == {"gamma": 6, "policy": "ecospec", "key_requests_per_minute": 2}
    assert read_line(admin.child) == "now ecospec 6\n"
    assert [post(admin.url, prompt="a", max_tokens=1).status_code for _ in range(3)] == [200, 200, 429]
    for changes, named in (
        ({"gamma": 7, "eps": 0}, "eps"),
        ({"gamma": 7, "port": 1}, "'port' cannot be changed"),
        ({"gamma": 7, "api_keys": "x"}, "'api_keys' cannot be changed"),
        ({"gamma": 7, "nonsense": None}, "'nonsense' cannot be changed"),
        ({"gamma": "many"}, "gamma"),
        ({"max_running": 9}, "at most 8"),
    ):
        answer = admin("PATCH", "settings", json=changes)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert admin("GET", "status").json()["settings"]["gamma"] == 6
    for raw in (b"", b"[]", b"{", b'{"gamma": NaN}', b"\xff"):
        assert admin("PATCH", "settings", content=raw).status_code == 400
    assert admin("PATCH", "settings", content=b" " * 2**17).status_code == 413
    answer = admin("PATCH", "settings", json={"gamma": None, "policy": None, "key_requests_per_minute": 0})
    assert answer.json()["settings"]["gamma"] == 4 and answer.json()["changed"] == {"key_requests_per_minute": 0}
    assert read_line(admin.child) == "now goodput 4\n"
    assert post(admin.url, prompt="a", max_tokens=1).status_code == 200


def test_draining_and_back_and_not_while_it_stops(start: ServerProcesses) -> None:
    admin = Admin(start, drain_seconds=10)
    body = {"prompt": "abc", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{admin.url}/v1/completions", json=body, trust_env=False, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert admin("POST", "drain").json()["state"] == "draining"
        assert health(admin.url) == "draining" and post(admin.url, prompt="a").status_code == 503
        status = admin("GET", "status").json()
        assert (status["state"], status["running"], status["model"]) == ("draining", 1, "echo")
        assert admin("DELETE", "drain").json()["state"] == "ok"
        assert post(admin.url, prompt="a", max_tokens=1).status_code == 200
        admin.child.send_signal(signal.SIGTERM)
        eventually(lambda: health(admin.url) == "draining")
        assert admin("DELETE", "drain").status_code == 503, "what has begun to stop takes nothing new"
        assert health(admin.url) == "draining"
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert admin.child.wait(20) == 0


def test_only_the_own_key_opens(start: ServerProcesses) -> None:
    admin = Admin(start, api_keys="a-users-key-of-some-length")
    for path, method in (("status", "GET"), ("settings", "PATCH"), ("drain", "POST"), ("drain", "DELETE")):
        for key in (None, "a-users-key-of-some-length", KEY[:-1], KEY + "x"):
            assert admin(method, path, key, json={}).status_code == 401
        assert httpx.get(f"{admin.url}/admin/{path}", trust_env=False).status_code == 401, "not on the users' port"
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{admin.url}/v1/models", headers=headers, trust_env=False).status_code == 401
    assert health(admin.url) == "ok"


@pytest.mark.parametrize("key", ["", "short"])
def test_a_port_without_a_good_key_stops_the_start(start: ServerProcesses, key: str) -> None:
    child, _ = start(admin_port=free_port(), admin_key=key, model="slow")
    line = read_line(child)
    assert "admin_key" in line and "24 characters" in line and child.wait(20) == 2


def test_a_taken_port_and_missing_keys_stop_the_start(start: ServerProcesses, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        child, _ = start(admin_port=taken.getsockname()[1], admin_key=KEY, model="slow")
        assert "--admin-port" in read_line(child) and child.wait(20) == 2
    child, _ = start(api_keys_file=tmp_path / "nowhere.json", model="slow")
    assert "cannot be read" in read_line(child) and child.wait(20) == 2


def test_while_loading_there_is_a_status_and_nothing_to_change(byte_tokenizer: Any) -> None:
    from ecospec_orchestrator.accounting.ledger import Ledger
    from ecospec_orchestrator.api.auth import KeyRing
    from ecospec_orchestrator.api.service import Service

    control = Control(Service(Settings(), Ledger()), KeyRing([]))
    assert control.state()["state"] == "loading" and control.state()["settings"] is None
    create_admin(control, KEY)


def test_a_change_reaches_every_replica_and_one_that_starts_later(start: ServerProcesses) -> None:
    with RedisServer() as redis:
        one, two = Admin(start, state_store_url=redis.url), Admin(start, state_store_url=redis.url)
        assert one("PATCH", "settings", json={"gamma": 6}).json()["shared"] is True
        assert read_line(two.child) == "now goodput 6\n"
        assert two("PATCH", "settings", json={"max_waiting": 3}).json()["settings"]["gamma"] == 6
        eventually(lambda: one("GET", "status").json()["settings"]["max_waiting"] == 3)
        three = Admin(start, state_store_url=redis.url)
        eventually(lambda: three("GET", "status").json()["changed"] == {"gamma": 6, "max_waiting": 3})
        redis.kill()
        answer = one("PATCH", "settings", json={"gamma": 8})
        assert answer.status_code == 200 and answer.json()["shared"] is False
        assert answer.json()["settings"]["gamma"] == 8 and two("GET", "status").json()["settings"]["gamma"] == 6


class Recorded:
    """A store that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def share_settings(self, changes: Any) -> bool:
        self.told.append(changes)
        return True

    def follow_settings(self, changed: Any) -> None:
        self.changed = changed


def test_what_another_replica_says_is_checked(caplog: pytest.LogCaptureFixture) -> None:
    applied: list[int] = []
    store: Any = Recorded()
    live = LiveSettings(Settings(), lambda now, _: applied.append(now.gamma), store)
    store.changed({"gamma": "9"})
    assert live.shown()["gamma"] == 9 and applied == [9]
    store.changed({"gamma": "0", "port": "1", "eps": "{", "max_slowdown": "2.5", "policy": '"magic"'})
    assert live.changes == {"max_slowdown": 2.5} and applied == [9, 4]
    assert sum("passed over" in r.getMessage() for r in caplog.records) == 4
    store.changed({"max_slowdown": "2.5"})
    assert applied == [9, 4], "nothing new, nothing done"
    live.change({"gamma": 5, "seed_root": False})
    assert store.told == [{"gamma": "5", "seed_root": "false"}]


def test_what_cannot_be_applied_changes_nothing() -> None:
    def refuse(now: Settings, before: Settings) -> None:
        raise SettingsError("No profile.")

    live = LiveSettings(Settings(), refuse, None)
    with pytest.raises(SettingsError, match="No profile"):
        live.change({"gamma": 5})
    assert live.shown()["gamma"] == 4 and not live.changes


def test_every_live_setting_is_one() -> None:
    assert set(LIVE) <= set(Settings.model_fields) and changed_settings(Settings(), {}) == Settings()
