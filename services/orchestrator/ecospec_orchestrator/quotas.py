"""Token buckets: how much of something may be used at once, and how fast that comes back. No I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class TokenBucket:
    """Up to `capacity` tokens, which come back at per_second. now: seconds of any clock that never goes back."""

    per_second: float
    capacity: float
    filled: float
    at: float

    def refill(self, now: float) -> None:
        self.filled = min(self.capacity, self.filled + self.per_second * max(0.0, now - self.at))
        self.at = max(self.at, now)

    def take(self, tokens: float, now: float) -> bool:
        """Whether there were as many; then they are gone."""
        self.refill(now)
        if self.filled < tokens:
            return False
        self.filled -= tokens
        return True

    def settle(self, tokens: float) -> None:
        """Give back what was taken and not used; below 0: more was used."""
        self.filled += tokens

    def wait_seconds(self, tokens: float) -> float:
        """Until there are as many, as of the last refill; 0 when there are."""
        return max(0.0, tokens - self.filled) / self.per_second


@dataclass(frozen=True)
class Limit:
    """At most `amount`, all at once if need be, in the long run per period_seconds. Both above 0."""

    amount: float
    period_seconds: float

    @property
    def per_second(self) -> float:
        return self.amount / self.period_seconds


@dataclass(frozen=True)
class Charge:
    """tokens of the bucket of that name, which holds what `limit` says."""

    bucket: str
    limit: Limit
    tokens: float


class Buckets:
    """Buckets by name, full when first named; thread-safe. There are as many as keys and kinds of limits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self._lock = threading.Lock()

    def take(self, charges: Sequence[Charge]) -> float:
        """0.0: all are taken. Else none is, and in so many seconds all could be, if nobody else takes them."""
        with self._lock:
            found = self._found(charges)
            wait = max((bucket.wait_seconds(tokens) for bucket, tokens in found), default=0.0)
            if wait == 0.0:
                for bucket, tokens in found:
                    bucket.settle(-tokens)
            return wait

    def add(self, charges: Sequence[Charge]) -> None:
        """Give tokens back; below 0: take them, whether they are there or not."""
        with self._lock:
            for bucket, tokens in self._found(charges):
                bucket.settle(tokens)

    def _found(self, charges: Sequence[Charge]) -> list[tuple[TokenBucket, float]]:
        now, found = self._clock(), []
        for charge in charges:
            limit = charge.limit
            bucket = self._buckets.get(charge.bucket)
            if bucket is None:
                bucket = self._buckets[charge.bucket] = TokenBucket(limit.per_second, limit.amount, limit.amount, now)
            bucket.per_second, bucket.capacity = limit.per_second, limit.amount  # may have been changed meanwhile
            bucket.refill(now)
            found.append((bucket, charge.tokens))
        return found
