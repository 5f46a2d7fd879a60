"""Live settings that all replicas of a target share: one Redis hash, whose revision grows with every change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)
REVISION = "revision"
MAX_FIELDS, MAX_CHARACTERS = 100, 1000  # beyond them it is not what was written here


@dataclass(frozen=True)
class Shared:
    revision: int = 0
    values: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def decode(cls, found: Mapping[bytes, bytes]) -> Shared:
        """Raises ValueError."""
        if len(found) > MAX_FIELDS or any(len(name) + len(value) > MAX_CHARACTERS for name, value in found.items()):
            raise ValueError("it is larger than any that was written here")
        values = {name.decode(): value.decode() for name, value in found.items()}
        return cls(int(values.pop(REVISION, "0")), values)


class RedisSettings:
    """look() and change() may be called from different threads."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._known = Shared()
        self._changed: Callable[[Mapping[str, str]], None] | None = None
        self._lock, self._telling = threading.Lock(), threading.Lock()  # the first is never held while calling out
        self._invalid_told = False

    def follow(self, changed: Callable[[Mapping[str, str]], None]) -> None:
        self._changed = changed
        self._tell()

    def look(self, client: redis.Redis) -> None:
        """Raises RedisError."""
        known = self._known
        found: Any = client.hgetall(self._key)
        try:
            stored = Shared.decode(found)
            # Of the same revision and not the same: written back by a replica that had not heard the last change.
            if stored.revision < known.revision or (stored.revision == known.revision and stored != known):
                log.warning("The state store has lost live settings; revision %d is written back.", known.revision)
                self.change(client, {})
        except ValueError as error:
            if not self._invalid_told:
                log.error("The live settings %s in the state store are passed over: %s.", self._key, error)
            self._invalid_told = True
            return
        self._learn(stored)

    def change(self, client: redis.Redis, changes: Mapping[str, str | None]) -> None:
        """Raises RedisError and ValueError."""

        def write(pipe: Any) -> Shared:
            stored, known = Shared.decode(pipe.hgetall(self._key)), self._known
            newest = stored if stored.revision > known.revision else known  # the server may have been emptied
            merged = {**newest.values, **changes}
            values = {name: value for name, value in merged.items() if value is not None}
            fresh = Shared(newest.revision + 1, values)
            pipe.multi()
            pipe.delete(self._key)
            pipe.hset(self._key, mapping={**values, REVISION: str(fresh.revision)})
            return fresh

        transaction: Any = client.transaction
        fresh: Shared = transaction(write, self._key, value_from_callable=True)  # again if another was faster
        self._learn(fresh)

    def _learn(self, newer: Shared) -> None:
        with self._lock:
            if newer.revision <= self._known.revision:
                return
            self._known = newer
        self._tell()

    def _tell(self) -> None:
        """What is known now, so that the last call tells the newest, whichever threads are at it."""
        with self._telling:
            if self._changed is not None and self._known.revision:
                self._changed(self._known.values)
