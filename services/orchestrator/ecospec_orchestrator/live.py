"""The settings that may change while the server runs, here or at another replica."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .core import SettingsError
from .settings import Settings, load_settings
from .state.base import StateStore

log = logging.getLogger(__name__)
POLICY = ("policy", "gamma", "eps", "seed_root", "expert_buffer", "probe_share", "max_slowdown")
LIVE = (
    *POLICY,
    "max_running",
    "max_waiting",
    "prefill_share",
    "key_requests_per_minute",
    "key_tokens_per_minute",
    "key_tokens_per_day",
    "key_max_concurrent",
    "max_prompt_tokens",
    "max_request_seconds",
    "max_body_bytes",
    "log_level",
)


def changed_settings(start: Settings, changes: Mapping[str, Any]) -> Settings:
    """start with the changes. Raises SettingsError for one that is unknown, not live, or not allowed."""
    for name in changes:
        if name not in LIVE:
            raise SettingsError(
                f"Setting {name!r:.60} cannot be changed while the server runs; allowed: {', '.join(LIVE)}."
            )
    settings = load_settings({**start.model_dump(), **changes}, {})
    if settings.max_running > start.max_running:  # what was compiled and allocated is for so many
        raise SettingsError(
            f"Setting max_running is {settings.max_running}; while the server runs, at most {start.max_running} are allowed, with "
            "which it was started."
        )
    return settings


class LiveSettings:
    """apply gets the new settings and those before, and must either use them or raise SettingsError and leave all as it was; it is called by one thread
    at a time, which may be the store's. Thread-safe; may wait for what applies."""

    def __init__(self, start: Settings, apply: Callable[[Settings, Settings], None], store: StateStore | None) -> None:
        self._start, self._apply, self._store = start, apply, store
        self._changes: dict[str, Any] = {}
        self._now = start
        self._lock = threading.Lock()  # never held while the store is asked
        if store is not None:
            store.follow_settings(self._follow)

    def shown(self) -> dict[str, Any]:
        return {name: getattr(self._now, name) for name in LIVE}

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the start by a change."""
        return dict(self._changes)

    def change(self, changes: Mapping[str, Any]) -> bool:
        """None: back to the value of the start. Whether all replicas are told. Raises SettingsError, and then nothing has changed."""
        with self._lock:
            merged = {**self._changes, **changes}
            self._use({name: value for name, value in merged.items() if value is not None or name not in LIVE})
        if self._store is None:
            return False
        return self._store.share_settings(
            {name: None if value is None else json.dumps(value) for name, value in changes.items()}
        )

    def _follow(self, shared: Mapping[str, str]) -> None:
        """What another replica has changed. One that this version does not know must not stop the others."""
        changes = {}
        for name, text in shared.items():
            try:
                changes[name] = json.loads(text)
                changed_settings(self._start, {name: changes[name]})
            except (ValueError, SettingsError) as error:
                changes.pop(name, None)
                log.error("A live setting from the state store is passed over: %s", error)
        with self._lock:
            try:
                self._use(changes)
            except SettingsError as error:
                log.error("Live settings from the state store are passed over: %s", error)

    def _use(self, changes: dict[str, Any]) -> None:
        settings = changed_settings(self._start, changes)
        if settings != self._now:
            before = self._now
            self._apply(settings, before)
            told = [f"{n} {getattr(settings, n)}" for n in LIVE if getattr(settings, n) != getattr(before, n)]
            log.info("Settings changed while serving: %s.", ", ".join(told))
        self._now, self._changes = settings, changes
