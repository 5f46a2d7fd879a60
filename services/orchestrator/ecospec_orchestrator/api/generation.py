"""One HTTP request in the scheduler: submit its choices, turn token events into text, cancel what is left."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ecospec_proto.trace_document import TraceDocument

from ..accounting.ledger import Ledger
from ..core import Request, RequestStats, SamplingParams, TokenEvent, TokenLogprob
from .base import SchedulerLike
from .errors import DeadlineError, EngineError
from .limits import current_ticket
from .text import TextAssembler

POLL_SECONDS = 0.5  # how often a waiting request looks whether the step loop still lives
STATS_SECONDS = 2.0  # how long a cancelled choice may take to report its statistics


def choice_seed(seed: int | None, choice: int) -> int | None:
    """Seed of the n-th choice of one prompt, 0 to 2**63 - 1.

    Choice 0 has the request's own seed, so n=1 and the first of n=4 agree; choice i > 0 has the first 63 bits of
    sha256("seed:i"). Every prompt of a list counts from 0: it gets what it would get alone. Without a seed every choice
    draws a fresh one.
    """
    if seed is None:
        return None
    if choice == 0:
        return seed % 2**63
    return int.from_bytes(hashlib.sha256(f"{seed}:{choice}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class ScoredToken:
    """A token with its log-probability and the offset of its text in the choice's text, in characters."""

    logprob: TokenLogprob
    offset: int


@dataclass(frozen=True)
class Update:
    """What one event added to one choice."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


@dataclass
class Choice:
    request: Request
    prompt: int  # index of its prompt
    assembler: TextAssembler
    tokens: int = 0
    finish_reason: str | None = None
    stats: RequestStats | None = None
    routes: TraceDocument | None = None
    ended: bool = False  # the scheduler has sent its last event
    last_event: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def take(self, event: TokenEvent) -> Update:
        """Append an event's tokens, one by one, up to a stop string."""
        text, used, scored = "", 0, []
        for at, token in enumerate(event.tokens):
            if at < len(event.logprobs):
                scored.append(ScoredToken(event.logprobs[at], self.assembler.characters))
            text += self.assembler.push(token)
            used += 1
            if self.assembler.stopped:
                break
        if event.finish_reason is not None and not self.assembler.stopped:
            text += self.assembler.flush()
        if self.assembler.stopped:
            self.finish_reason = "stop"
        else:
            self.finish_reason = event.finish_reason
        self.tokens += used
        return Update(0, text, event.tokens[:used], tuple(scored), self.finish_reason)


class Generation:
    """Runs the choices of one HTTP request. Always call close(): it frees the scheduler's slots at once."""

    def __init__(self, scheduler: SchedulerLike, ledger: Ledger, choices: Sequence[Choice]) -> None:
        self.scheduler = scheduler
        self._ledger = ledger
        self.choices = list(choices)
        self._events: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()
        self._submitted = 0
        self._observed: set[int] = set()
        self._ticket = current_ticket()

    def submit(self) -> None:
        """All choices or none. Raises what the scheduler raises."""
        loop = asyncio.get_running_loop()

        def sink(index: int) -> Any:
            def on_event(event: TokenEvent) -> None:
                try:
                    loop.call_soon_threadsafe(self._events.put_nowait, (index, event))
                except RuntimeError:  # the server has stopped and its loop is closed: nobody is left to tell
                    pass

            return on_event

        try:
            for index, choice in enumerate(self.choices):
                self.scheduler.submit(choice.request, sink(index))
                self._submitted += 1
        except BaseException:
            for choice in self.choices[: self._submitted]:
                self.scheduler.cancel(choice.request.request_id)
            self._submitted = 0
            raise
        counted: set[int] = set()
        for choice in self.choices:  # a prompt is read once per choice, but counted once, like in `usage`
            self._ledger.observe_request_start(0 if choice.prompt in counted else len(choice.request.prompt_tokens))
            counted.add(choice.prompt)

    async def updates(self) -> AsyncIterator[Update]:
        """Text as it comes, until every choice has a finish reason. Raises EngineError."""
        while not all(choice.finish_reason for choice in self.choices):
            index, event = await self._next()
            choice = self.choices[index]
            self._record_end(choice, event)
            if choice.finish_reason is not None:
                continue
            if event.finish_reason == "error":
                self._finish(index, "error")
                raise EngineError(event.error or "The engine failed on this request.")
            if event.tokens:
                self._observe_tokens(choice, len(event.tokens))
            update = choice.take(event)
            if choice.finish_reason is not None:
                if not choice.ended:
                    self.scheduler.cancel(choice.request.request_id)
                self._finish(index, choice.finish_reason)
            if update.text or update.tokens or update.finish_reason:
                yield Update(index, update.text, update.tokens, update.scored, update.finish_reason)

    async def settle(self) -> None:
        """Wait shortly for the statistics of choices that a stop string ended before the scheduler did."""
        deadline = time.perf_counter() + STATS_SECONDS
        while not all(choice.ended for choice in self.choices) and time.perf_counter() < deadline:
            try:
                index, event = await asyncio.wait_for(self._events.get(), deadline - time.perf_counter())
            except TimeoutError:
                return
            self._record_end(self.choices[index], event)

    def close(self) -> None:
        """Cancel what still runs; safe to call twice."""
        for index, choice in enumerate(self.choices[: self._submitted]):
            if not choice.ended and choice.finish_reason is None:
                self.scheduler.cancel(choice.request.request_id)
            self._finish(index, choice.finish_reason or "abort")

    async def _next(self) -> tuple[int, TokenEvent]:
        while True:
            self._check_deadline()
            try:
                # wait_for() would swallow a cancellation while events keep coming, and a client that left would hold its slot.
                async with asyncio.timeout(self._ticket.at_most(POLL_SECONDS)):
                    return await self._events.get()
            except TimeoutError:
                if not self.scheduler.alive and self._events.empty():
                    for index, choice in enumerate(self.choices):
                        self._finish(index, choice.finish_reason or "error")
                    raise EngineError("The engine has stopped; the server must be restarted.") from None

    def _check_deadline(self) -> None:
        """Raises DeadlineError."""
        try:
            self._ticket.check_deadline()
        except DeadlineError:
            self._ledger.guard.deadlines_exceeded.inc()
            raise

    def _record_end(self, choice: Choice, event: TokenEvent) -> None:
        if event.finish_reason is not None:
            choice.ended = True
            choice.stats, choice.routes = event.stats, event.routes
            if event.stats is not None:
                self._ledger.observe_request_stats(event.stats)

    def _observe_tokens(self, choice: Choice, tokens: int) -> None:
        now = time.perf_counter()
        if not choice.last_event:
            self._ledger.observe_first_token(now - choice.started)
        else:
            self._ledger.observe_inter_token(now - choice.last_event, tokens)
        choice.last_event = now

    def _finish(self, index: int, reason: str) -> None:
        if index in self._observed:
            return
        self._observed.add(index)
        choice = self.choices[index]
        seconds = time.perf_counter() - choice.started
        self._ledger.observe_request_finish(reason, seconds, choice.tokens)


def make_choices(
    prompts: Sequence[Sequence[int]],
    *,
    public_id: str,
    n: int,
    max_tokens: Sequence[int],
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop_token_ids: frozenset[int],
    logprobs: int | None,
    tokenizer: Any,
    stops: Sequence[str],
    skip_special_tokens: bool,
    record_routes: bool = False,
) -> list[Choice]:
    """n choices for each prompt, in the order of the API: choice index = prompt index * n + i."""
    choices = []
    for at, prompt in enumerate(prompts):
        for i in range(n):
            request = Request(
                request_id=f"{public_id}-{at * n + i}",
                prompt_tokens=tuple(prompt),
                max_tokens=max_tokens[at],
                sampling=SamplingParams(temperature, top_p, max(0, top_k), choice_seed(seed, i)),
                stop_token_ids=stop_token_ids,
                logprobs=logprobs,
                record_routes=record_routes,
            )
            choices.append(Choice(request, at, TextAssembler(tokenizer, stops, skip_special_tokens)))
    return choices
