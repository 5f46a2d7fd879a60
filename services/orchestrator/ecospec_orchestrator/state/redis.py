"""State shared through Redis 6.2 or newer. One thread of its own talks to the server; serving never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from ecospec_proto.predictor_version import PredictorVersion, PredictorVersionError
from ecospec_proto.shared_state import (
    TRACE_FIELD,
    VERSION_FIELD,
    StateStoreError,
    StoreAddress,
    connect,
    settings_key,
    traces_key,
    versions_key,
)

from ..accounting.state_metrics import StateMetrics
from ..quotas import Charge
from .base import StateStore
from .redis_quotas import RedisQuotas
from .redis_settings import RedisSettings

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 2.0  # of one call
BACKOFF_SECONDS = (0.1, 5.0)  # first and longest pause between tries
LOOK_SECONDS = 2.0  # between looks at the registry, which also show whether the server still answers
QUEUE_RECORDS = 64  # that wait for the server
CLOSE_SECONDS = 2.0


class RedisStore(StateStore):
    """The constructor does not wait for the server, and of what serving calls only take() does, for a moment. While it is down, which
    is said once, records wait in a bounded queue that drops its oldest. A record whose answer was lost may be sent twice: readers tell by its id."""

    def __init__(self, address: StoreAddress, fingerprint: str, max_records: int, metrics: StateMetrics) -> None:
        self._address, self._max_records, self._metrics = address, max_records, metrics
        self._quotas = RedisQuotas(address, fingerprint, metrics)
        self._settings = RedisSettings(settings_key(fingerprint))
        self._traces_key, self._versions_key = traces_key(fingerprint), versions_key(fingerprint)
        self._waiting: deque[Callable[[], bytes]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._problem: str | None = None  # that was told last; "" after it was told that all is well
        self._invalid_told = False
        self._published: PredictorVersion | None = None
        self._seen: bytes | None = None  # the registry's entry that was looked at last
        self._thread = threading.Thread(target=self._run, name="state-store", daemon=True)
        self._thread.start()

    def append_trace(self, encode: Callable[[], bytes]) -> None:
        with self._changed:
            if len(self._waiting) >= QUEUE_RECORDS:
                self._waiting.popleft()
                self._metrics.records_dropped.labels("queue_full").inc()
            self._waiting.append(encode)
            self._changed.notify()

    def read_traces(self, limit: int) -> list[bytes]:
        """Asks the server in the caller's thread and waits for it."""
        try:
            with connect(self._address, TIMEOUT_SECONDS) as client:
                entries: Any = client.xrevrange(self._traces_key, count=limit)
        except (RedisError, OSError) as error:
            raise StateStoreError(f"The state store at {self._address} cannot be read: {error}") from None
        return [fields[TRACE_FIELD] for _, fields in reversed(entries) if TRACE_FIELD in fields]

    def published_version(self) -> PredictorVersion | None:
        return self._published

    async def take(self, charges: Sequence[Charge]) -> float:
        return await self._quotas.take(charges)

    def give_back(self, charges: Sequence[Charge]) -> None:
        self._quotas.give_back(charges)

    def share_settings(self, changes: Mapping[str, str | None]) -> bool:
        """Asks the server in the caller's thread and waits for it."""
        try:
            with connect(self._address, TIMEOUT_SECONDS) as client:
                self._settings.change(client, changes)
        except (RedisError, OSError, ValueError) as error:
            log.warning("Live settings could not be shared through the state store at %s: %s", self._address, error)
            return False
        return True

    def follow_settings(self, changed: Callable[[Mapping[str, str]], None]) -> None:
        self._settings.follow(changed)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS + 2 * TIMEOUT_SECONDS)
        self._quotas.close()

    # The store's own thread.

    def _run(self) -> None:
        pause = BACKOFF_SECONDS[0]
        while True:
            try:
                with connect(self._address, TIMEOUT_SECONDS) as client:
                    self._look(client)
                    self._send_next(client)  # before all is said to be well: a full server answers, but takes nothing
                    self._told("")
                    pause = BACKOFF_SECONDS[0]
                    self._serve(client)
                    break
            except (RedisError, OSError) as error:
                self._told(f"{type(error).__name__}: {error}")
            except Exception as error:  # a bug here must cost samples, never the thread that sends the next ones
                self._told(repr(error))
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause):
                    break
            pause = min(2 * pause, BACKOFF_SECONDS[1])
        with self._changed:
            if self._waiting:
                self._metrics.records_dropped.labels("closed").inc(len(self._waiting))
                log.warning("%d trace records were not sent to %s before the end.", len(self._waiting), self._address)
                self._waiting.clear()

    def _serve(self, client: redis.Redis) -> None:
        """Sends what comes until close(), and then what waits for a moment."""
        look_at, until = time.monotonic() + LOOK_SECONDS, float("inf")
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing, max(0.0, look_at - time.monotonic()))
                if self._closing:
                    until = min(until, time.monotonic() + CLOSE_SECONDS)
                    if not self._waiting or time.monotonic() >= until:
                        return
            self._send_next(client)
            if time.monotonic() >= look_at:
                self._look(client)
                look_at = time.monotonic() + LOOK_SECONDS

    def _send_next(self, client: redis.Redis) -> None:
        with self._changed:
            if not self._waiting:
                return
            encode = self._waiting.popleft()
        try:
            record = encode()
        except Exception as error:
            self._metrics.records_dropped.labels("invalid").inc()
            if not self._invalid_told:
                log.error("A trace record could not be made, which is a defect and is told once: %r", error)
                self._invalid_told = True
            return
        try:
            client.xadd(self._traces_key, {TRACE_FIELD: record}, maxlen=self._max_records, approximate=True)
        except BaseException:
            with self._changed:
                if len(self._waiting) < QUEUE_RECORDS:
                    self._waiting.appendleft(encode)
                else:
                    self._metrics.records_dropped.labels("queue_full").inc()
            raise
        self._metrics.records_written.inc()

    def _look(self, client: redis.Redis) -> None:
        self._settings.look(client)
        entries: Any = client.xrevrange(self._versions_key, count=1)
        if not entries or entries[0][0] == self._seen:
            return
        self._seen, fields = entries[0]
        try:
            self._published = PredictorVersion.decode(fields.get(VERSION_FIELD, b""))
        except PredictorVersionError as error:
            log.warning("The newest entry of %s in the state store is passed over: %s", self._versions_key, error)
            return
        self._metrics.observe_published_version(self._published.version)
        log.info("Predictor version %s is published for this target.", self._published.version)

    def _told(self, problem: str) -> None:
        """Says what changed, once per change."""
        self._metrics.store_up.set(problem == "")
        if problem and not self._problem:
            log.warning(
                "The state store at %s cannot be used (%s); serving goes on with what this process knows.",
                self._address,
                problem,
            )
        elif not problem and self._problem:
            log.info("The state store at %s is there again.", self._address)
        elif not problem and self._problem is None:
            log.info("The state store at %s is connected.", self._address)
        self._problem = problem
