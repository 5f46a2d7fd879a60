"""From a parsed request to a running generation: tokens, limits, stop tokens, ids."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from ..accounting.ledger import Ledger
from ..core import InvalidRequestError, Request, ShuttingDownError, TokenEvent
from ..settings import Settings
from ..state.base import QuotaStore
from ..state.memory import MemoryQuotas
from .base import SchedulerLike
from .errors import NotReadyError, UnknownModelError
from .fields import shorten
from .generation import Generation, make_choices
from .limits import current_ticket
from .responses import Shape
from .schemas import ChatRequest, CompletionRequest

READY_CACHE_SECONDS = 1.0
READY_TIMEOUT_SECONDS = 10.0


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
    quotas: QuotaStore = field(default_factory=MemoryQuotas)

    def __post_init__(self) -> None:
        # One thread: a long prompt does not hold up the streams, and the tokenizer is never entered twice.
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._ready_lock = asyncio.Lock()
        self._ready_checked = -READY_CACHE_SECONDS
        self._ready_error: Exception | None = None

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

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

    async def begin(self, request: CompletionRequest | ChatRequest) -> tuple[Generation, Shape]:
        """Check, tokenize and submit. Call end() with the same shape when done, whatever happened."""
        scheduler = self.require_scheduler()
        if request.model not in (None, self.model_id):
            raise UnknownModelError(
                f"Field 'model' is {shorten(request.model)}, which is not served here; allowed: '{self.model_id}'.",
                "model",
            )
        chat = isinstance(request, ChatRequest)
        loop = asyncio.get_running_loop()
        prompts = await loop.run_in_executor(self._tokenizing, self._tokenize, request)
        field_name = "messages" if chat else "prompt"
        budgets = [self._budget(request, len(prompt), field_name) for prompt in prompts]
        await current_ticket().reserve(prompts, budgets, request.n or 1)
        public_id = f"{'chatcmpl' if chat else 'cmpl'}-{request.request_id or uuid.uuid4().hex}"
        if public_id in self.active:
            raise InvalidRequestError(
                f"Field 'request_id' is '{request.request_id}', which is already running; use a new one.", "request_id"
            )
        n = request.n or 1
        choices = make_choices(
            prompts,
            public_id=public_id,
            n=n,
            max_tokens=budgets,
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=request.top_k or 0,
            seed=request.seed,
            stop_token_ids=self._stop_tokens(request),
            logprobs=request.alternatives,
            tokenizer=self.tokenizer,
            stops=request.stop,
            skip_special_tokens=request.skip_special_tokens is not False,
            record_routes=bool(request.return_routed_experts),
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
            token_ids=bool(request.return_token_ids),
            logprobs=request.alternatives is not None,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            n=n,
            routed_experts=bool(request.return_routed_experts),
        )
        return generation, shape

    def end(self, generation: Generation, shape: Shape) -> None:
        generation.close()
        generated = sum(choice.tokens for choice in generation.choices)
        current_ticket().settle(sum(map(len, shape.prompts)), generated)
        self.active.pop(shape.public_id, None)

    def cancel_all(self) -> None:
        """End every request in flight; each answers with what it has and finish_reason "abort"."""
        for generation in list(self.active.values()):
            for choice in generation.choices:
                generation.scheduler.cancel(choice.request.request_id)

    def _tokenize(self, request: CompletionRequest | ChatRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            return [self._tokenize_chat(request)]
        vocabulary = len(self.tokenizer)
        tokenized = []
        for prompt in request.prompts:
            tokens = prompt if isinstance(prompt, list) else self._encode(prompt, True)
            wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise InvalidRequestError(
                    f"Field 'prompt' holds token id {wrong}; allowed are 0 to {vocabulary - 1}.", "prompt"
                )
            if not tokens:
                raise InvalidRequestError("Field 'prompt' is empty; at least one token is needed.", "prompt")
            tokenized.append(list(tokens))
        return tokenized

    def _tokenize_chat(self, request: ChatRequest) -> list[int]:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise InvalidRequestError(
                f"Field 'messages' does not fit the chat template: {error}.", "messages"
            ) from error
        return self._encode(text, False)

    def _encode(self, text: str, special: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=special)

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
        return wanted

    def _stop_tokens(self, request: CompletionRequest | ChatRequest) -> frozenset[int]:
        vocabulary = len(self.tokenizer)
        for token in request.stop_token_ids or []:
            if token >= vocabulary:
                raise InvalidRequestError(
                    f"Field 'stop_token_ids' holds {token}; allowed are 0 to {vocabulary - 1}.", "stop_token_ids"
                )
        own: Sequence[int] = self.info.get("eos_token_ids") or [self.tokenizer.eos_token_id]
        ends = [] if request.ignore_eos else [token for token in own if token is not None]
        return frozenset([*(request.stop_token_ids or []), *ends])

    async def check_ready(self) -> None:
        """Generate one token; the verdict is kept for a second. Raises NotReadyError or ShuttingDownError."""
        scheduler = self.require_scheduler()
        async with self._ready_lock:
            if time.monotonic() - self._ready_checked >= READY_CACHE_SECONDS:
                try:
                    await self._probe(scheduler)
                    self._ready_error = None
                except Exception as error:
                    self._ready_error = NotReadyError(f"A test token could not be generated: {error}")
                self._ready_checked = time.monotonic()
            if self._ready_error is not None:
                raise self._ready_error

    async def _probe(self, scheduler: SchedulerLike) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[TokenEvent] = asyncio.Queue()

        def on_event(event: TokenEvent) -> None:
            try:
                loop.call_soon_threadsafe(done.put_nowait, event)
            except RuntimeError:  # the loop is closed: the server has stopped
                pass

        prompt = tuple(self.tokenizer.encode("Hello", add_special_tokens=True))
        request = Request(f"ready-{uuid.uuid4().hex}", prompt, 1)
        scheduler.submit(request, on_event)
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        try:
            while True:
                try:
                    event = await asyncio.wait_for(done.get(), deadline - time.monotonic())
                except TimeoutError:
                    raise NotReadyError(f"none came within {READY_TIMEOUT_SECONDS:.0f} seconds.") from None
                if event.finish_reason in ("error", "abort"):
                    raise NotReadyError(event.error or "the request was aborted.")
                if event.tokens:
                    return
        finally:
            scheduler.cancel(request.request_id)
