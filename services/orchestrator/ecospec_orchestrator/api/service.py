"""From a parsed request to a running generation: tokens, limits, stop tokens, ids."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..accounting.ledger import Ledger
from ..admission import check_queue
from ..core import (
    Grammar,
    InvalidRequestError,
    QueueFullError,
    Request,
    SamplingParams,
    ShuttingDownError,
    TokenEvent,
)
from ..settings import Settings
from ..state.base import QuotaStore
from ..state.memory import MemoryQuotas
from ..tracing import end_request
from .base import SchedulerLike
from .errors import NotReadyError, UnknownModelError
from .fields import shorten
from .generation import Echo, Generation, make_choices
from .grammar import GrammarCompiler, needs_grammar
from .limits import current_ticket
from .prompts import chat_prompt, check_ids, completion_prompts, echo_of
from .responses import Shape
from .schemas import ChatRequest, CompletionRequest
from .scores import check_scores
from .text import TextAssembler

Result = TypeVar("Result")

READY_CACHE_SECONDS = 1.0
READY_TIMEOUT_SECONDS = 10.0
READY_POLL_SECONDS = 0.1  # how often a waiting probe looks whether others get tokens


@dataclass
class Service:
    """What the handlers need. scheduler and tokenizer are None while the model loads."""

    settings: Settings
    ledger: Ledger
    scheduler: SchedulerLike | None = None
    tokenizer: Any = None
    model_id: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    active: dict[str, Generation] = field(default_factory=dict)  # requests in flight by public id
    posts: int = 0  # POST requests whose answer is not finished; the event loop's own
    quotas: QuotaStore = field(default_factory=MemoryQuotas)

    def __post_init__(self) -> None:
        # One thread: a long prompt does not hold up the streams, and the tokenizer is never entered twice.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._compiling = ThreadPoolExecutor(1, "compiling")  # a schema may take long, too
        self._compiler: GrammarCompiler | None = None  # made by the first request that needs it
        # Requests that they are busy with or that wait for them; the event loop's own.
        self._preparing: Counter[ThreadPoolExecutor] = Counter()
        self._ready_lock = asyncio.Lock()
        self._ready_checked = -READY_CACHE_SECONDS
        self._ready_error: Exception | None = None

    def close(self) -> None:
        for threads in (self._tokenizing, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)

    def health(self) -> str:
        """ "ok", "loading", "draining" or "dead"."""
        if self.draining:
            return "draining"
        if self.scheduler is None:
            return "loading"
        return "ok" if self.scheduler.alive else "dead"

    def require_scheduler(self) -> SchedulerLike:
        """Raises ShuttingDownError or NotReadyError."""
        state = self.health()
        if state == "draining":
            raise ShuttingDownError("The server is shutting down and takes no new requests; try another one.")
        if state == "loading":
            raise NotReadyError("The model is still loading; try again when /ready answers 200.")
        if state == "dead":
            raise NotReadyError("The engine has stopped; the server must be restarted.")
        assert self.scheduler is not None
        return self.scheduler

    async def begin(self, request: CompletionRequest | ChatRequest, span: Any = None) -> tuple[Generation, Shape]:
        """Check, tokenize and submit. Call end() with the same shape when done, whatever happened. span: see request_span()."""
        scheduler = self.require_scheduler()
        self.check_model(request.model)
        chat = isinstance(request, ChatRequest)
        prompts, echoes = await self.in_thread(self._prompts, request)
        budgets = [self._budget(request, len(prompt), "messages" if chat else "prompt") for prompt in prompts]
        check_scores(request, prompts, budgets)
        sampling, stop_token_ids = self._sampling(request), self._stop_tokens(request)
        grammar = await self._grammar(request)
        await current_ticket().reserve(prompts, budgets, request.n)
        public_id = f"{'chatcmpl' if chat else 'cmpl'}-{request.request_id or uuid.uuid4().hex}"
        if public_id in self.active:
            raise InvalidRequestError(
                f"Field 'request_id' is '{request.request_id}', which is already running; use a new one.", "request_id"
            )
        calls = isinstance(request, ChatRequest) and request.choice_of_tools.mode != "none"
        # The tags of calls may be special tokens; a grammar of tools lets no other one through.
        skip = request.skip_special_tokens and not calls
        choices = make_choices(
            prompts,
            public_id=public_id,
            n=request.n,
            max_tokens=budgets,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            logprobs=request.alternatives,
            prompt_logprobs=request.prompt_alternatives,
            grammar=grammar,
            record_routes=request.return_routed_experts,
            policy=request.ecospec.policy,
            step_events=request.ecospec.steps,
            assembler=lambda: TextAssembler(self.tokenizer, request.stop, skip, request.min_tokens),
            echoes=echoes,
            tools=calls,
            span=span,
        )
        generation = Generation(scheduler, self.ledger, choices)
        generation.submit()
        self.active[public_id] = generation
        shape = Shape(
            chat=chat,
            public_id=public_id,
            created=int(time.time()),
            model=self.model_id,
            tokenizer=self.tokenizer,
            token_ids=request.return_token_ids,
            alternatives=request.alternatives,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            n=request.n,
            routed_experts=request.return_routed_experts,
            prompt_logprobs=request.prompt_logprobs,
        )
        return generation, shape

    def end(self, generation: Generation, shape: Shape) -> None:
        generation.close()
        prompt = sum(map(len, shape.prompts))
        generated = sum(choice.tokens for choice in generation.choices)
        current_ticket().settle(prompt, generated)
        self.active.pop(shape.public_id, None)
        stats = [choice.stats for choice in generation.choices if choice.stats is not None]
        end_request(generation.span, shape.public_id, prompt, generated, list(generation.reasons.values()), stats)

    def cancel_all(self) -> None:
        """End every request in flight; each answers with what it has and finish_reason "abort"."""
        for generation in list(self.active.values()):
            for choice in generation.choices:
                generation.scheduler.cancel(choice.request.request_id)

    def check_model(self, model: str | None) -> None:
        """Raises UnknownModelError."""
        if model not in (None, self.model_id):
            raise UnknownModelError(
                f"Field 'model' is {shorten(model)}, which is not served here; allowed: '{self.model_id}'.", "model"
            )

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Whatever enters the tokenizer. Raises QueueFullError."""
        return await self._prepared(self._tokenizing, work, *arguments)

    async def _prepared(self, threads: ThreadPoolExecutor, work: Callable[..., Result], *arguments: Any) -> Result:
        """Before the scheduler's queue there is one for each of these threads, in which no more may wait. Raises QueueFullError."""
        check_queue(0, self._preparing[threads], self.settings.max_running, self.settings.max_waiting)
        self._preparing[threads] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)
        finally:
            self._preparing[threads] -= 1

    def _prompts(self, request: CompletionRequest | ChatRequest) -> tuple[list[list[int]], list[Echo | None]]:
        """Tokens and what to repeat of them, one entry per prompt. Raises InvalidRequestError."""
        if isinstance(request, ChatRequest):
            return [chat_prompt(self.tokenizer, request)], [None]
        prompts = completion_prompts(self.tokenizer, request)
        if not request.echo:
            return prompts, [None] * len(prompts)
        skip, scored = request.skip_special_tokens, request.logprobs is not None
        return prompts, [
            echo_of(self.tokenizer, sent, tokens, skip, scored)
            for sent, tokens in zip(request.prompts, prompts, strict=True)
        ]

    async def _grammar(self, request: CompletionRequest | ChatRequest) -> Grammar | None:
        """Raises InvalidRequestError and QueueFullError."""
        if not needs_grammar(request):
            return None
        return await self._prepared(self._compiling, self._compile, request)

    def _compile(self, request: CompletionRequest | ChatRequest) -> Grammar | None:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self.tokenizer, self._ends)
        return self._compiler.compile(request)

    def _sampling(self, request: CompletionRequest | ChatRequest) -> SamplingParams:
        """Raises InvalidRequestError."""
        check_ids(self.tokenizer, [token for token, _ in request.logit_bias], "logit_bias")
        return SamplingParams(
            temperature=float(request.temperature),
            top_p=float(request.top_p),
            top_k=max(0, request.top_k),
            seed=request.seed,
            min_p=float(request.min_p),
            presence_penalty=float(request.presence_penalty),
            frequency_penalty=float(request.frequency_penalty),
            repetition_penalty=float(request.repetition_penalty),
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
        )

    def _budget(self, request: CompletionRequest | ChatRequest, prompt: int, field_name: str) -> int:
        """Tokens that may be generated; a chat request that names none gets the rest of the context."""
        limit = self.settings.max_context_tokens
        wanted = request.max_tokens
        if isinstance(request, ChatRequest):
            wanted = request.max_completion_tokens or request.max_tokens or max(1, limit - prompt)
        assert wanted is not None
        if prompt + wanted > limit:
            raise InvalidRequestError(
                f"Field '{field_name}' has {prompt} tokens and {wanted} more are requested, {prompt + wanted} in all; "
                f"the context holds at most {limit}: shorten the prompt or lower max_tokens.",
                field_name,
            )
        if request.min_tokens > wanted:
            raise InvalidRequestError(
                f"Field 'min_tokens' is {request.min_tokens}, but at most {wanted} may be generated; lower it or raise"
                " max_tokens.",
                "min_tokens",
            )
        return wanted

    @property
    def _ends(self) -> list[int]:
        """The tokens that end an answer of this model."""
        own: Sequence[int] = self.info.get("eos_token_ids") or [self.tokenizer.eos_token_id]
        return [token for token in own if token is not None]

    def _stop_tokens(self, request: CompletionRequest | ChatRequest) -> frozenset[int]:
        """Raises InvalidRequestError."""
        check_ids(self.tokenizer, request.stop_token_ids, "stop_token_ids")
        return frozenset([*request.stop_token_ids, *([] if request.ignore_eos else self._ends)])

    async def check_ready(self) -> None:
        """Generate one token, unless requests have just got some; the verdict is kept for a second. Raises NotReadyError or
        ShuttingDownError."""
        scheduler = self.require_scheduler()
        async with self._ready_lock:
            if time.monotonic() - self._ready_checked >= READY_CACHE_SECONDS:
                try:
                    if not self._generated_since(time.perf_counter() - READY_CACHE_SECONDS):
                        await self._probe(scheduler)
                    self._ready_error = None
                except Exception as error:
                    self._ready_error = NotReadyError(f"A test token could not be generated: {error}")
                self._ready_checked = time.monotonic()
            if self._ready_error is not None:
                raise self._ready_error

    def _generated_since(self, when: float) -> bool:
        """Whether a request in flight has got tokens since then, a time.perf_counter()."""
        return any(choice.last_event >= when for each in self.active.values() for choice in each.choices)

    async def _probe(self, scheduler: SchedulerLike) -> None:
        """Returns with the test token, or as soon as others get theirs: it must not wait behind them. Raises NotReadyError."""
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        done: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def on_event(event: TokenEvent) -> None:
            try:
                loop.call_soon_threadsafe(done.put_nowait, event)
            except RuntimeError:  # the loop is closed: the server has stopped
                pass

        prompt = tuple(self.tokenizer.encode("Hello", add_special_tokens=True))
        request = Request(f"ready-{uuid.uuid4().hex}", prompt, 1)
        with contextlib.suppress(QueueFullError):  # then those who fill the queue show whether tokens come
            scheduler.submit(request, on_event)
        try:
            while time.perf_counter() - began < READY_TIMEOUT_SECONDS:
                try:
                    async with asyncio.timeout(READY_POLL_SECONDS):
                        event = await done.get()
                except TimeoutError:
                    if self._generated_since(began):
                        return
                    if not scheduler.alive:
                        raise NotReadyError("the engine has stopped.") from None
                    continue
                if event.finish_reason in ("error", "abort"):
                    raise NotReadyError(event.error or "the request was aborted.")
                if event.tokens:
                    return
            raise NotReadyError(f"none came within {READY_TIMEOUT_SECONDS:.0f} seconds.")
        finally:
            scheduler.cancel(request.request_id)
