"""Continuous batching: requests join and leave between steps; one thread owns the engine."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .accounting.ledger import Ledger
from .admission import check_policy, check_queue, check_request, fits, worst_case_pages
from .core import (
    InvalidRequestError,
    Request,
    RequestStats,
    ShuttingDownError,
    StepEvent,
    StepReport,
    TokenEvent,
    TokenLogprob,
)
from .drafting.base import Drafter
from .engine.base import Engine, Verified, VerifyItem
from .footprint.base import FootprintSource
from .prefill import Prefiller
from .recording import RouteRecorder, check_recordable, record_step
from .running import OnEvent, Running
from .selection.base import SelectionPolicy
from .step import Drafted, StepInputs, account, choose_nodes, draft, outcome, subtree, verify_item, view
from .step_events import step_events
from .tracing import traced_step
from .verification.accept import Acceptance, accept
from .verification.processing import processor_for
from .verification.sampling import logprobs, seeded_uniform
from .wishes import PLAIN, policy_of_step

log = logging.getLogger(__name__)
OnVerified = Callable[[Sequence[Running], Sequence[VerifyItem], Sequence[Verified], Sequence[Acceptance]], None]


@dataclass(frozen=True)
class Limits:
    """prefill_share: time for new prompts over time for decode steps while both are there."""

    max_running: int
    max_waiting: int
    max_context_tokens: int
    prefill_share: float = 0.8


@dataclass
class _Waiting:
    request: Request
    on_event: OnEvent
    since: float = field(default_factory=lambda: time.monotonic())


class Scheduler:
    """Thread-safe submit and cancel; everything else happens in the step thread.

    on_event is called from the step thread and must not block. footprint_source and other_policies, which requests may wish for and
    which need a policy that keeps the drafter up to date, may be replaced between steps; see also change().
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        footprint_source: FootprintSource | None,
        policy: SelectionPolicy,
        limits: Limits,
        ledger: Ledger,
    ) -> None:
        self.engine, self.drafter, self.footprint_source = engine, drafter, footprint_source
        self.policy, self.limits, self.ledger = policy, limits, ledger
        self.other_policies: Mapping[str, SelectionPolicy] = {}
        self.on_step: Callable[[StepReport], None] | None = None
        self.on_verified: OnVerified | None = None  # after the decision, before the tokens join their requests
        self._waiting: deque[_Waiting] = deque()
        self._running: list[Running] = []
        self._cancelled: set[str] = set()
        self._lock = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="scheduler", daemon=True)
        self._crash: BaseException | None = None
        self._next_policy: SelectionPolicy | None = None
        self._prefiller = Prefiller(engine, drafter, limits.prefill_share)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._crash is None and not self._stopping

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request. Raises InvalidRequestError, QueueFullError, ShuttingDownError."""
        check_request(request, self.limits.max_context_tokens, self.engine.geometry.vocab_size)
        cache = self.engine.cache_use()
        if (pages := self._worst_case_pages(request)) > cache.pages:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_tokens)} tokens and max_tokens is {request.max_tokens}, which may need "
                f"{pages} pages of the KV cache of {cache.page_tokens} tokens each; it has {cache.pages}: shorten one of them.",
                "max_tokens",
            )
        own = self._next_policy or self.policy  # the one of the next step, which other_policies are beside
        check_policy(request, [PLAIN, own.name, *self.other_policies])
        if request.record_routes:
            check_recordable(request, self._max_nodes, self.engine.geometry)
        with self._lock:
            if self._stopping or self._crash is not None:
                raise ShuttingDownError("the engine takes no new requests because it is stopping; try another replica.")
            check_queue(len(self._running), len(self._waiting), self.limits.max_running, self.limits.max_waiting)
            self._waiting.append(_Waiting(request, on_event))
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a request at the next step boundary; unknown ids are fine."""
        with self._lock:
            self._cancelled.add(request_id)
            self._lock.notify_all()

    def change(self, limits: Limits, policy: SelectionPolicy | None) -> None:
        """From any thread. The limits count at once, the policy, unless it is None, decides from the next step on."""
        self.limits = limits
        self._prefiller.pace.share = limits.prefill_share
        self._next_policy = policy or self._next_policy

    def stop(self) -> None:
        """End the step thread; whatever still runs or waits is aborted."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if self.footprint_source is not None:
            self.footprint_source.close()

    def _loop(self) -> None:
        try:
            self.engine.enter_thread()
            while self._wait_for_work():
                self._drop_cancelled()
                self._admit()
                self._prefiller.turn(self._running, self.ledger)
                if any(r.decodes for r in self._running):
                    traced_step(self.step, self._running)
        except BaseException as error:
            self._crash = error
            log.exception("the step loop crashed; running requests fail")
            self._end_all("error", "the engine failed while this request ran; see the server's log.")
        else:
            self._end_all("abort", None)

    def _wait_for_work(self) -> bool:
        if not self._running:
            self._check_caches()
        with self._lock:
            while not (self._waiting or self._running or self._stopping):
                self._cancelled.clear()
                self._lock.wait()
            return not self._stopping

    def _end_all(self, reason: str, message: str | None) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for entry in waiting:
            stats = RequestStats(prompt_tokens=len(entry.request.prompt_tokens))
            entry.on_event(TokenEvent(entry.request.request_id, finish_reason=reason, error=message, stats=stats))
        while self._running:
            running = self._running.pop()
            try:
                self._finish(running, reason, error=message)
            except Exception:  # after a crash, what else is broken must not keep the others from being told
                log.exception("request %s could not be ended in order", running.request.request_id)

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [w for w in self._waiting if w.request.request_id in cancelled]
            self._waiting = deque(w for w in self._waiting if w.request.request_id not in cancelled)
        for entry in dropped:
            stats = RequestStats(
                prompt_tokens=len(entry.request.prompt_tokens), queue_seconds=time.monotonic() - entry.since
            )
            entry.on_event(TokenEvent(entry.request.request_id, finish_reason="abort", stats=stats))
        for running in [r for r in self._running if r.request.request_id in cancelled]:
            self._running.remove(running)
            self._finish(running, "abort")

    @property
    def _max_nodes(self) -> int:
        return self.drafter.max_nodes if self.drafter is not None else 0

    def _worst_case_pages(self, request: Request) -> int:
        return worst_case_pages(request, self._max_nodes, self.engine.cache_use().page_tokens)

    def _admit(self) -> None:
        """First come, first served: where the next one does not fit, those behind it wait as well, however small."""
        while len(self._running) < self.limits.max_running:
            with self._lock:
                if not self._waiting:
                    return
                entry = self._waiting[0]
                worst_case = self._worst_case_pages(entry.request)
                if not fits(worst_case, [r.worst_case_pages for r in self._running], self.engine.cache_use().pages):
                    return
                self._running.append(self._admitted(entry, worst_case))
                self._waiting.popleft()

    def _admitted(self, entry: _Waiting, worst_case: int) -> Running:
        prompt, seed = entry.request.prompt_tokens, entry.request.sampling.seed
        return Running(
            entry.request,
            entry.on_event,
            self.engine.new_sequence(),
            self.drafter.new_state() if self.drafter is not None else None,
            worst_case,
            prompt[-1],
            seeded_uniform(secrets.randbits(63) if seed is None else seed),
            RequestStats(prompt_tokens=len(prompt)),
            list(prompt),
            entry.since,
            RouteRecorder(self.engine.geometry) if entry.request.record_routes else None,
            processor_for(entry.request),
            None if entry.request.prompt_logprobs is None else [],
        )

    def _check_caches(self) -> None:
        """Nothing runs, so every page must be back."""
        owners: list[tuple[str, Engine | Drafter]] = [("target", self.engine)]
        if self.drafter is not None:
            owners.append(("drafter", self.drafter))
        for name, owner in owners:
            if (problem := owner.check_idle()) is not None:
                log.error("the %s's KV cache was not in order when idle and starts afresh: %s", name, problem)
                self.ledger.observe_cache_violation()

    def step(self) -> StepReport:
        """Draft, predict, price and choose, verify, accept, account."""
        self.policy = self._next_policy or self.policy
        batch = [r for r in self._running if r.decodes]
        policy = policy_of_step([r.request.policy for r in batch], self.policy, self.other_policies)
        times = [time.perf_counter()]

        def mark() -> None:
            times.append(time.perf_counter())

        seen = view(batch)
        wanted = policy.begin_step(seen) & seen.may_draft
        drafted = draft(policy, self.drafter, self.footprint_source, batch, wanted)
        mark()
        choice = choose_nodes(policy, self.footprint_source, batch, drafted, mark)
        chosen = [subtree(tree, nodes) for tree, nodes in zip(drafted.trees, choice.nodes, strict=True)]
        items = [verify_item(r.sequence, r.last_token, t) for r, t in zip(batch, chosen, strict=True)]
        verified = self.engine.verify(items)
        accepted = [self._accept(r, i, v) for r, i, v in zip(batch, items, verified, strict=True)]
        record_step(batch, items, verified, accepted)
        self._commit(batch, accepted, verified)
        mark()
        decision = policy.end_step(outcome(drafted, choice, verified, accepted, times))
        mark()
        inputs = StepInputs(batch, chosen, verified, accepted, choice, times, self._draft_bytes(drafted), decision)
        report = account(self.engine, inputs)
        self._prefiller.pace.observe_step(report.step_seconds)
        if self.on_verified is not None:
            self.on_verified(batch, items, verified, accepted)
        steps = step_events(batch, drafted, choice, verified, accepted, report, self.engine.geometry.experts)
        self._emit(batch, verified, accepted, steps)
        self.ledger.observe_step(report)
        if self.on_step is not None:
            self.on_step(report)
        return report

    def _draft_bytes(self, drafted: Drafted) -> int:
        return self.drafter.bytes_read(drafted.levels, drafted.fed_rows > 0) if self.drafter is not None else 0

    def _accept(self, running: Running, item: VerifyItem, verified: Verified) -> Acceptance:
        request = running.request
        return accept(
            verified.logits,
            item.tokens,
            item.parents,
            request.sampling,
            running.uniform,
            running.output_tokens,
            request.stop_token_ids,
            running.processor,
        )

    def _commit(self, batch: Sequence[Running], accepted: Sequence[Acceptance], verified: Sequence[Verified]) -> None:
        for r, a, v in zip(batch, accepted, verified, strict=True):
            self.engine.commit(r.sequence, a.rows)
            if self.drafter is not None and self.policy.needs_drafts and r.request.policy != PLAIN:
                r.unfed.append((v.features[a.rows], a.tokens))

    def _emit(
        self,
        batch: Sequence[Running],
        verified: Sequence[Verified],
        accepted: Sequence[Acceptance],
        steps: Sequence[StepEvent | None],
    ) -> None:
        for r, v, a, step in zip(batch, verified, accepted, steps, strict=True):
            if r.processor is not None and r.processor.error is not None:
                self._running.remove(r)
                self._finish(r, "error", error=r.processor.error)
                continue
            tokens, reason = a.tokens.tolist()[: r.remaining], None
            stop_at = next((i for i, t in enumerate(tokens) if t in r.request.stop_token_ids), None)
            r.last_token = int(a.tokens[-1])
            r.tokens += tokens
            if stop_at is not None:
                tokens, reason = tokens[:stop_at], "stop"
            elif len(tokens) == r.remaining:
                reason = "length"
            r.output_tokens += len(tokens)
            found: tuple[TokenLogprob, ...] = ()
            if r.request.logprobs is not None:
                found = tuple(
                    logprobs(v.logits[row], token, r.request.logprobs)
                    for row, token in zip(a.rows, tokens, strict=False)
                )
            if reason is not None:
                self._running.remove(r)
                self._finish(r, reason, tuple(tokens), found, step=step)
            elif tokens:
                r.on_event(TokenEvent(r.request.request_id, tuple(tokens), found, step=step))

    def _finish(
        self,
        running: Running,
        reason: str,
        tokens: tuple[int, ...] = (),
        found: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        step: StepEvent | None = None,
    ) -> None:
        now, stats = time.monotonic(), running.stats
        prefill_began = now if running.prefill_began is None else running.prefill_began
        decode_began = now if running.decode_began is None else running.decode_began
        stats.output_tokens = running.output_tokens
        stats.queue_seconds = prefill_began - running.submitted
        stats.prefill_seconds = decode_began - prefill_began
        stats.decode_seconds = now - decode_began
        try:
            self.engine.release(running.sequence)
            if self.drafter is not None:
                self.drafter.release(running.draft_state)
            if self.footprint_source is not None:
                self.footprint_source.end(running.request.request_id)
        finally:
            routes = None if running.recorder is None else running.recorder.document(running.request.request_id)
            running.on_event(
                TokenEvent(running.request.request_id, tokens, found, reason, stats, error, routes, step=step)
            )
