"""Token buckets that all replicas share in Redis, and this process's own ones for while Redis does not answer."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from redis.exceptions import RedisError

from ecospec_proto.shared_state import StoreAddress, connect, quota_key

from ..accounting.state_metrics import StateMetrics
from ..quotas import Buckets, Charge
from .base import QuotaStore

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 0.25  # of one call: a request waits for it
RETRY_SECONDS = 1.0  # between looks whether the server answers again
THREADS = 4  # that wait for the server at a time

# KEYS: buckets. ARGV: amount, amount per second and tokens of each; tokens below 0 are given back. What Buckets.take() and add() do,
# in one step for all replicas, by the server's clock: when that was set back, nothing comes back for the step, and no more is lost.
# A bucket that nobody asks for is forgotten once it is full.
SCRIPT = """
local now = redis.call('TIME')
now = now[1] + now[2] / 1000000
local filled, wait = {}, 0
for i, key in ipairs(KEYS) do
  local amount, rate, tokens = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  local state = redis.call('HMGET', key, 'filled', 'at')
  local have, at = tonumber(state[1] or amount), tonumber(state[2] or now)
  have = math.min(amount, have + rate * math.max(0, now - at))
  if at > now then redis.call('HSET', key, 'filled', string.format('%.17g', have), 'at', string.format('%.17g', now)) end
  filled[i] = have - tokens
  if tokens > have and tokens > 0 then wait = math.max(wait, (tokens - have) / rate) end
end
if wait > 0 then return string.format('%.17g', wait) end
for i, key in ipairs(KEYS) do
  local amount, rate = tonumber(ARGV[3 * i - 2]), tonumber(ARGV[3 * i - 1])
  redis.call('HSET', key, 'filled', string.format('%.17g', filled[i]), 'at', string.format('%.17g', now))
  redis.call('PEXPIRE', key, math.ceil(1000 * math.max(0, amount - filled[i]) / rate) + 1000)
end
return '0'
"""


class RedisQuotas(QuotaStore):
    """What is taken from the shared buckets is taken from the process's own ones, too: with Redis gone these do not start full. The
    fall back and the return are each told once; meanwhile every replica grants the full limits by itself."""

    def __init__(self, address: StoreAddress, fingerprint: str, metrics: StateMetrics) -> None:
        self._address, self._fingerprint, self._metrics = address, fingerprint, metrics
        self._own = Buckets()
        self._client = connect(address, TIMEOUT_SECONDS)
        self._script = self._client.register_script(SCRIPT)
        self._lock = threading.Lock()
        self._down, self._retry_at = False, 0.0
        self._pool = ThreadPoolExecutor(THREADS, "quotas")

    async def take(self, charges: Sequence[Charge]) -> float:
        if not charges:
            return 0.0
        if not self._worth_asking():  # without a thread: there may be many requests and a server that hangs
            return self._take_here(charges)
        wait = await asyncio.get_running_loop().run_in_executor(self._pool, self._ask, charges)
        if wait is None:
            return self._take_here(charges)
        if wait == 0.0:
            self._own.add(_negated(charges))
        return wait

    def give_back(self, charges: Sequence[Charge]) -> None:
        self._own.add(charges)
        try:
            self._pool.submit(self._ask, _negated(charges))
        except RuntimeError:  # closed: the buckets fill by themselves
            pass

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _take_here(self, charges: Sequence[Charge]) -> float:
        self._metrics.quota_local_decisions.inc()
        return self._own.take(charges)

    def _worth_asking(self) -> bool:
        return not self._down or time.monotonic() >= self._retry_at

    def _ask(self, charges: Sequence[Charge]) -> float | None:
        """None when the server does not answer as it should."""
        with self._lock:
            if not self._worth_asking():
                return None
            if self._down:
                self._retry_at = time.monotonic() + RETRY_SECONDS  # one call finds out for all
        keys = [quota_key(self._fingerprint, charge.bucket) for charge in charges]
        arguments = [n for c in charges for n in (c.limit.amount, c.limit.per_second, c.tokens)]
        try:
            wait = float(self._script(keys, arguments))
        except (RedisError, OSError, ValueError, TypeError) as error:
            self._told(f"{type(error).__name__}: {error}")
            return None
        self._told(None)
        return wait

    def _told(self, problem: str | None) -> None:
        with self._lock:
            before, self._down = self._down, problem is not None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._metrics.quotas_degraded.set(self._down)
        if problem is not None and not before:
            log.warning(
                "Quotas cannot be shared through the state store at %s (%s); each replica applies them by itself.",
                self._address,
                problem,
            )
        elif problem is None and before:
            log.info("Quotas are shared through the state store at %s again.", self._address)


def _negated(charges: Sequence[Charge]) -> list[Charge]:
    return [replace(charge, tokens=-charge.tokens) for charge in charges]
