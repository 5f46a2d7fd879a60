"""One HTTP request in the scheduler: submit its choices, turn token events into text, cancel what is left."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ecospec_proto.trace_document import TraceDocument

from .. import tracing
from ..accounting.ledger import Ledger
from ..core import EcoSpecError, Grammar, Request, RequestStats, SamplingParams, StepEvent, TokenEvent, TokenLogprob
from .base import SchedulerLike
from .errors import DeadlineError, EngineError
from .limits import current_ticket
from .text import TextAssembler
from .tools import ToolCallParser

POLL_SECONDS = 0.5  # how often a waiting request looks whether the step loop still lives
STATS_SECONDS = 2.0  # how long a cancelled choice may take to report its statistics
MAX_WAITING_STEPS = 256  # step events of one HTTP request that its client has not taken; later ones are left out


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
    """A token with its log-probability, which the first one of a prompt has not, and the offset of its text in the choice's
    text, in characters."""

    token: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(frozen=True)
class Echo:
    """The prompt as part of the answer. offsets: one per prompt token, where log-probabilities are asked for."""

    text: str
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Update:
    """What one event added to one choice."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    calls: tuple[dict[str, Any], ...] = ()  # of tools, as the API tells them
    finish_reason: str | None = None
    step: StepEvent | None = None
    pieces: tuple[str, ...] = ()  # with step: what each of its tokens added to the text


@dataclass
class Choice:
    request: Request
    prompt: int  # index of its prompt
    assembler: TextAssembler
    echo: Echo | None = None
    tools: ToolCallParser | None = None  # None: calls are text like any other
    tokens: int = 0
    finish_reason: str | None = None
    stats: RequestStats | None = None
    routes: TraceDocument | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    ended: bool = False  # the scheduler has sent its last event
    last_event: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def take(self, event: TokenEvent) -> Update:
        """Append an event's tokens, one by one, up to a stop string."""
        pieces, scored = [], []
        echoed = 0 if self.echo is None else len(self.echo.text)
        for at, token in enumerate(event.tokens):
            if at < len(event.logprobs):
                scored.append(ScoredToken(token, event.logprobs[at], echoed + self.assembler.characters))
            pieces.append(self.assembler.push(token))
            if self.assembler.stopped:
                break
        text, used = "".join(pieces), len(pieces)
        if event.finish_reason is not None and not self.assembler.stopped:
            text += self.assembler.flush()
        self.finish_reason = "stop" if self.assembler.stopped else event.finish_reason
        self.tokens += used
        calls: tuple[dict[str, Any], ...] = ()
        shown_reason = self.finish_reason
        if self.tools is not None:
            text, found = self.tools.push(text)
            calls = tuple(found)
            if self.finish_reason is not None:
                text += self.tools.flush()
            if self.finish_reason == "stop" and self.tools.calls:
                shown_reason = "tool_calls"
        return Update(0, text, event.tokens[:used], tuple(scored), calls, shown_reason, event.step, tuple(pieces))

    def echoed(self) -> Update:
        """The prompt, as the first thing to show."""
        assert self.echo is not None
        scored: tuple[ScoredToken, ...] = ()
        if self.request.logprobs is not None:
            every = (None, *self.prompt_logprobs)
            tokens = self.request.prompt_tokens
            scored = tuple(map(ScoredToken, tokens, every, self.echo.offsets))
        return Update(0, self.echo.text, scored=scored)


class Generation:
    """Runs the choices of one HTTP request. Always call close(): it frees the scheduler's slots at once."""

    def __init__(self, scheduler: SchedulerLike, ledger: Ledger, choices: Sequence[Choice]) -> None:
        self.scheduler = scheduler
        self._ledger = ledger
        self.choices = list(choices)
        self._events: asyncio.Queue[tuple[int, TokenEvent]] = asyncio.Queue()
        self._submitted = 0
        self.reasons: dict[int, str] = {}  # how the choices that have ended did
        self._steps_in = self._steps_out = 0  # written by the step thread, and by the event loop
        self._ticket = current_ticket()
        self.span = choices[0].request.span if choices else None

    def submit(self) -> None:
        """All choices or none. Raises what the scheduler raises."""
        loop = asyncio.get_running_loop()

        def sink(index: int) -> Any:
            def on_event(event: TokenEvent) -> None:
                if event.step is not None:
                    if self._steps_in - self._steps_out < MAX_WAITING_STEPS:
                        self._steps_in += 1
                    else:  # a slow reader misses steps, never text
                        event = replace(event, step=None)
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
        for index, choice in enumerate(self.choices):
            if choice.echo is not None and choice.request.prompt_logprobs is None:
                yield replace(choice.echoed(), choice=index)
        while not all(choice.finish_reason for choice in self.choices):
            index, event = await self._next()
            self._steps_out += event.step is not None
            choice = self.choices[index]
            self._record_end(choice, event)
            if choice.finish_reason is not None:
                continue
            if event.prompt_logprobs is not None:
                choice.prompt_logprobs = event.prompt_logprobs
                if choice.echo is not None:
                    yield replace(choice.echoed(), choice=index)
            if event.finish_reason == "error":
                self._finish(index, "error")
                raise self._told(EngineError(event.error or "The engine failed on this request."))
            if event.tokens:
                self._observe_tokens(choice, len(event.tokens))
            update = choice.take(event)
            if choice.finish_reason is not None:
                if not choice.ended:
                    self.scheduler.cancel(choice.request.request_id)
                self._finish(index, choice.finish_reason)
            if update.text or update.tokens or update.finish_reason or update.step:
                yield replace(update, choice=index)

    async def settle(self) -> None:
        """Wait shortly for the statistics of choices that a stop string ended before the scheduler did."""
        deadline = time.perf_counter() + STATS_SECONDS
        while not all(choice.ended for choice in self.choices) and time.perf_counter() < deadline:
            try:
                async with asyncio.timeout(deadline - time.perf_counter()):
                    index, event = await self._events.get()
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
                    raise self._told(EngineError("The engine has stopped; the server must be restarted.")) from None

    def _check_deadline(self) -> None:
        """Raises DeadlineError."""
        try:
            self._ticket.check_deadline()
        except DeadlineError as error:
            self._ledger.guard.deadlines_exceeded.inc()
            raise self._told(error) from None

    def _told(self, error: EcoSpecError) -> EcoSpecError:
        """The error, once the request's span knows of it."""
        tracing.fail(self.span, str(error), type(error).__name__)
        return error

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
        if index in self.reasons:
            return
        self.reasons[index] = reason
        choice = self.choices[index]
        seconds = time.perf_counter() - choice.started
        self._ledger.observe_request_finish(reason, seconds, choice.tokens)


def make_choices(
    prompts: Sequence[Sequence[int]],
    *,
    public_id: str,
    n: int,
    max_tokens: Sequence[int],
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
    record_routes: bool,
    policy: str | None,
    step_events: bool,
    assembler: Callable[[], TextAssembler],
    echoes: Sequence[Echo | None],
    tools: bool,
    span: Any = None,
) -> list[Choice]:
    """n choices for each prompt, in the order of the API: choice index = prompt index * n + i. max_tokens and echoes: one per
    prompt; sampling: with the request's seed; tools: whether to look for calls."""
    choices = []
    for at, prompt in enumerate(prompts):
        for i in range(n):
            request = Request(
                request_id=f"{public_id}-{at * n + i}",
                prompt_tokens=tuple(prompt),
                max_tokens=max_tokens[at],
                sampling=replace(sampling, seed=choice_seed(sampling.seed, i)),
                stop_token_ids=stop_token_ids,
                logprobs=logprobs,
                record_routes=record_routes,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
                span=span,
                policy=policy,
                step_events=step_events,
            )
            choices.append(Choice(request, at, assembler(), echoes[at], ToolCallParser() if tools else None))
    return choices
