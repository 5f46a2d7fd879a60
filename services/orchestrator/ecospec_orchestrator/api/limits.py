"""What one caller may use: requests and tokens per time, requests at a time, length of prompts, time. Guard is passed before every
handler; a handler tells the ticket in current_ticket() what it needs and what it has used."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core import EcoSpecError, InvalidRequestError
from ..keys import Key
from ..quotas import Charge, Limit
from ..settings import Settings
from .auth import ANONYMOUS, KeyRing
from .errors import AuthenticationError, DeadlineError, RateLimitError, body_of, headers_of, status_of

if TYPE_CHECKING:
    from .service import Service

# For probes, scrapers and the playground, whose page asks for the key itself; all else needs one.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics"})
DEADLINE_HEADER = "X-Request-Timeout-Seconds"
MAX_DEADLINE_SECONDS = 86_400.0
MINUTE, DAY = 60.0, 86_400.0
REQUESTS = "requests_per_minute"
TOKENS = {"tokens_per_minute": MINUTE, "tokens_per_day": DAY}
# A client that leaves is gone; whoever is over a number of requests at a time may try again as soon as one of them ends.
CONCURRENCY_RETRY_SECONDS = 1


def limit_of(key: Key, settings: Settings, name: str, period_seconds: float) -> Limit | None:
    """The key's own limit, else that of the settings, where 0 is none."""
    own: int | None = getattr(key.limits, name)
    amount = getattr(settings, f"key_{name}") if own is None else own
    return Limit(float(amount), period_seconds) if amount else None


def token_charges(key: Key, settings: Settings, tokens: int) -> list[Charge]:
    found = [(name, limit_of(key, settings, name, period)) for name, period in TOKENS.items()]
    return [Charge(f"{name}:{key.name}", limit, float(tokens)) for name, limit in found if limit is not None]


def deadline_seconds(header: str | None, most: float) -> float | None:
    """Of the header and of the settings (0: none), the shorter. Raises InvalidRequestError."""
    if header is None:
        return most or None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_SECONDS:  # false for nan, too
        raise InvalidRequestError(
            f"Header {DEADLINE_HEADER} is {header!r:.40}; allowed: seconds above 0, at most {MAX_DEADLINE_SECONDS:g}."
        )
    return min(seconds, most or seconds)


@dataclass
class Ticket:
    """One request's way through. seconds: from its arrival until its deadline; None: it has none."""

    key: Key = ANONYMOUS
    seconds: float | None = None
    guard: Guard | None = None
    began: float = field(default_factory=time.monotonic)
    reserved: Sequence[Charge] = ()
    unused: int = 0  # tokens that were reserved and not used

    def check_deadline(self) -> None:
        """Raises DeadlineError."""
        if self.seconds is not None and time.monotonic() - self.began >= self.seconds:
            raise DeadlineError(f"The request was not finished within its {self.seconds:g} seconds; it is cancelled.")

    def at_most(self, seconds: float) -> float:
        """seconds, or less until the deadline; never negative."""
        if self.seconds is None:
            return seconds
        return max(0.0, min(seconds, self.began + self.seconds - time.monotonic()))

    async def reserve(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], choices: int) -> None:
        """Before generating: one entry per prompt, each with as many answers. Raises InvalidRequestError and RateLimitError."""
        if self.guard is not None:
            await self.guard.reserve(self, prompts, max_tokens, choices)

    def settle(self, prompt_tokens: int, generated: int) -> None:
        """After generating, however it ended: what was not used is given back."""
        if self.guard is not None:
            self.guard.settle(self, prompt_tokens, generated)


_current: ContextVar[Ticket | None] = ContextVar("ticket", default=None)


def current_ticket() -> Ticket:
    """Of the request that is being handled; outside of one there are no limits."""
    return _current.get() or Ticket()


class Guard:
    """ASGI middleware: nothing but OPEN_PATHS is reached without a key, where there are keys."""

    def __init__(self, app: ASGIApp, service: Service, keys: KeyRing) -> None:
        self._app, self._service, self._keys = app, service, keys
        self._running: dict[str, int] = {}  # requests by name of key; the event loop's own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        counts = scope["method"] == "POST"
        try:
            ticket = self._identify(scope["headers"], counts)
            if counts:
                self._enter(ticket)
        except EcoSpecError as error:
            await self._refuse(error, scope, receive, send)
            return
        mark = _current.set(ticket)
        try:
            if counts and (over := await self._over_rate(ticket)) is not None:
                await self._refuse(over, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            _current.reset(mark)
            if counts:
                self._leave(ticket)

    def _identify(self, headers: Sequence[tuple[bytes, bytes]], counts: bool) -> Ticket:
        """Raises AuthenticationError and InvalidRequestError."""
        metrics = self._service.ledger.guard
        try:
            key = self._keys.check(_only(headers, "Authorization"))
        except AuthenticationError:
            metrics.auth_failures.inc()
            raise
        seconds = None
        if counts:
            seconds = deadline_seconds(_only(headers, DEADLINE_HEADER), self._service.settings.max_request_seconds)
        return Ticket(key, seconds, self)

    def _enter(self, ticket: Ticket) -> None:
        """Raises RateLimitError."""
        name, settings = ticket.key.name, self._service.settings
        own = ticket.key.limits.max_concurrent
        most = settings.key_max_concurrent if own is None else own
        if most and self._running.get(name, 0) >= most:
            self._count(name, "concurrency")
            raise RateLimitError(
                f"Too many requests: {most} of {_whose(ticket.key)} are running, which is all that may at a time; wait for one to end.",
                CONCURRENCY_RETRY_SECONDS,
            )
        self._running[name] = self._running.get(name, 0) + 1
        self._service.posts += 1

    def _leave(self, ticket: Ticket) -> None:
        name = ticket.key.name
        self._service.posts -= 1
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        self._give_back(ticket)  # what a request reserved that never began

    async def _over_rate(self, ticket: Ticket) -> RateLimitError | None:
        key = ticket.key
        limit = limit_of(key, self._service.settings, REQUESTS, MINUTE)
        if limit is not None:
            wait = await self._service.quotas.take([Charge(f"{REQUESTS}:{key.name}", limit, 1.0)])
            if wait:
                self._count(key.name, "rate")
                return RateLimitError(
                    f"Too many requests: {_whose(key)} may send {limit.amount:g} requests per minute; try again in {math.ceil(wait)} s.",
                    math.ceil(wait),
                )
        self._count(key.name, "admitted")
        return None

    async def reserve(
        self, ticket: Ticket, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], choices: int
    ) -> None:
        """See Ticket.reserve()."""
        key, settings = ticket.key, self._service.settings
        longest, most = max(map(len, prompts), default=0), settings.max_prompt_tokens
        if most and longest > most:
            raise InvalidRequestError(
                f"Field 'prompt' has {longest} tokens; at most {most} are allowed here: shorten it.", "prompt"
            )
        tokens = sum(map(len, prompts)) + choices * sum(max_tokens)
        charges = token_charges(key, settings, tokens)
        for charge in charges:
            if tokens > charge.limit.amount:
                raise InvalidRequestError(
                    f"Field 'max_tokens' lets prompt and answers need {tokens} tokens, and {_whose(key)} may use {charge.limit.amount:g} "
                    f"{_period(charge)}: lower max_tokens or shorten the prompt.",
                    "max_tokens",
                )
        wait = await self._service.quotas.take(charges)
        if wait:
            self._count(key.name, "quota")
            allowed = " and ".join(f"{charge.limit.amount:g} tokens {_period(charge)}" for charge in charges)
            raise RateLimitError(
                f"Too many tokens: {_whose(key)} may use {allowed}, and this request needs up to {tokens}; try again in {math.ceil(wait)} s.",
                math.ceil(wait),
            )
        ticket.reserved, ticket.unused = charges, tokens

    def settle(self, ticket: Ticket, prompt_tokens: int, generated: int) -> None:
        """See Ticket.settle()."""
        metrics, name = self._service.ledger.guard, ticket.key.name
        metrics.key_tokens.labels(name, "prompt").inc(prompt_tokens)
        metrics.key_tokens.labels(name, "generated").inc(generated)
        ticket.unused -= prompt_tokens + generated
        self._give_back(ticket)

    def _give_back(self, ticket: Ticket) -> None:
        charges, ticket.reserved = ticket.reserved, ()
        if charges and ticket.unused > 0:
            self._service.quotas.give_back([Charge(c.bucket, c.limit, float(ticket.unused)) for c in charges])

    def _count(self, name: str, outcome: str) -> None:
        self._service.ledger.guard.key_requests.labels(name, outcome).inc()

    async def _refuse(self, error: EcoSpecError, scope: Scope, receive: Receive, send: Send) -> None:
        status = status_of(error)
        self._service.ledger.observe_refused(status)
        await JSONResponse(body_of(error), status, headers_of(error))(scope, receive, send)


def _only(headers: Sequence[tuple[bytes, bytes]], name: str) -> str | None:
    """A header's value, decoded as latin-1. Whoever sends it twice may have a proxy and us read different ones. Raises
    InvalidRequestError."""
    found = [value for key, value in headers if key == name.lower().encode()]
    if len(found) > 1:
        raise InvalidRequestError(f"Header {name} was sent {len(found)} times; send it once.")
    return found[0].decode("latin-1") if found else None


def _whose(key: Key) -> str:
    return "all callers" if key is ANONYMOUS else f"key '{key.name}'"


def _period(charge: Charge) -> str:
    return "per minute" if charge.limit.period_seconds == MINUTE else "per day"
