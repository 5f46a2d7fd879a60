"""Requests through TensorRT-LLM, which batches them itself: what the HTTP layer asks of a scheduler, on LLM.generate_async.

One thread owns an event loop, on which every request is a task: the LLM makes a request's queue for the loop that runs when it
is submitted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...accounting.ledger import Ledger
from ...admission import check_queue, check_request
from ...core import Request, RequestStats, ShuttingDownError, TokenEvent, TokenLogprob
from .collector import StatisticsCollector
from .requests import arguments_of, finish_reason_of, logprobs_of, until_stop
from .statistics import add_request_metrics

log = logging.getLogger(__name__)
ABORT_SECONDS = 10.0  # within which the engine has to confirm that a request was aborted
STOPPED = "the engine takes no new requests because it is stopping; try another replica."
FAILED = "the engine failed while this request ran; see the server's log."


class LlmLike(Protocol):
    """What is used of tensorrt_llm.LLM."""

    def generate_async(self, inputs: list[int], sampling_params: Any, *, streaming: bool) -> Any:
        """An object to iterate over asynchronously, which is also its own item; it has outputs, finished and abort()."""
        ...

    def get_stats(self, timeout: float) -> list[dict[str, Any]]: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class BackendLimits:
    """nodes: draft tokens of one request in a step, at most; 0: the engine does not draft. varying: it may be fewer."""

    max_running: int
    max_waiting: int
    max_context_tokens: int
    vocab_size: int
    nodes: int
    varying: bool = False


@dataclass(eq=False)
class _Job:
    """One request in the engine. ended: its last event was sent; it stays here until the engine has let go of it."""

    request: Request
    on_event: Callable[[TokenEvent], None]
    stats: RequestStats
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    taken: int = 0  # tokens of the engine's output that were looked at
    ended: bool = False
    result: Any = None  # None until the engine has it
    patience: asyncio.Timeout | None = None


class TensorRtBackend:
    """Thread-safe. on_event is called from the loop's thread and must not block."""

    def __init__(
        self,
        llm: LlmLike,
        sampling_params: Callable[..., Any],
        limits: BackendLimits,
        ledger: Ledger,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """poll: called once in a while, from a thread where it may wait; it must not raise."""
        self._llm, self._sampling_params, self.limits, self._ledger = llm, sampling_params, limits, ledger
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps only weak references
        self._stop_loop = asyncio.Event()
        self._stopping = self._has_shut_down = False
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm", daemon=True)
        self._collector = StatisticsCollector(lambda timeout: llm.get_stats(timeout=timeout), ledger, self._bind, poll)

    @property
    def running(self) -> int:
        """The engine takes the first max_running of what was submitted, fewer when its KV cache is full."""
        return min(len(self._jobs), self.limits.max_running)

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self.limits.max_running)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._crash is None and not self._stopping and self._healthy()

    def start(self) -> None:
        self._thread.start()
        self._collector.start()

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        """Hand a request to the engine. Raises InvalidRequestError, QueueFullError, ShuttingDownError."""
        limits = self.limits
        check_request(request, limits.max_context_tokens, limits.vocab_size)
        arguments = arguments_of(request, limits.nodes > 0)
        job = _Job(request, on_event, RequestStats(prompt_tokens=len(request.prompt_tokens)))
        with self._lock:
            if self._stopping or self._crash is not None or not self._thread.is_alive():
                raise ShuttingDownError(STOPPED)
            check_queue(self.running, self.waiting, limits.max_running, limits.max_waiting)
            self._jobs[request.request_id] = job
            self._loop.call_soon_threadsafe(self._begin, job, arguments)

    def change(self, max_waiting: int) -> None:
        """For requests that come from now on."""
        self.limits = replace(self.limits, max_waiting=max_waiting)

    def cancel(self, request_id: str) -> None:
        """End a request at once; unknown ids are fine. The engine may go on with it for an iteration."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._abort, job)

    def stop(self) -> None:
        """Abort what is left, end both threads and the engine."""
        with self._lock:
            self._stopping = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._stop_loop.set)
        if self._thread.ident is None:
            self._loop.close()
        elif threading.current_thread() is not self._thread:
            self._thread.join(3 * ABORT_SECONDS)
        self._collector.stop()
        if not self._has_shut_down:
            self._has_shut_down = True
            self._llm.shutdown()

    def _bind(self) -> None:
        self._ledger.bind(lambda: self.running, lambda: self.waiting, self._collector.cache_use)

    def _healthy(self) -> bool:
        """As the LLM says, where its version says it."""
        check = getattr(self._llm, "_check_health", None)
        try:
            return True if check is None else bool(check())
        except Exception as error:  # whatever it is, an engine that cannot tell is not well
            log.warning("TensorRT-LLM could not say whether it is well: %s", error)
            return False

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._crash = error
            log.exception("the loop of TensorRT-LLM's requests crashed; running requests fail")
        finally:
            with self._lock:  # nobody adds to the jobs or to the loop from here on
                self._stopping = True
                self._loop.close()
                jobs, self._jobs = list(self._jobs.values()), {}
            for job in jobs:
                self._end(job, *(("abort", None) if self._crash is None else ("error", FAILED)))

    async def _serve(self) -> None:
        await self._stop_loop.wait()
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._abort(job)
        if self._tasks and self._healthy():  # a dead engine confirms nothing
            await asyncio.wait(self._tasks, timeout=ABORT_SECONDS)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _begin(self, job: _Job, arguments: dict[str, Any]) -> None:
        task = self._loop.create_task(self._generate(job, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, job: _Job, arguments: dict[str, Any]) -> None:
        try:
            if job.ended:  # cancelled before the engine had it
                return
            async with asyncio.timeout(None) as job.patience:
                job.result = self._llm.generate_async(
                    list(job.request.prompt_tokens), self._sampling_params(**arguments), streaming=True
                )
                async for output in job.result:
                    self._take(job, output)
            self._end(job, "error", FAILED)  # unless it has ended, as it should
        except asyncio.CancelledError:
            self._end(job, "abort")
            raise
        except Exception as error:
            self._failed(job, error)
        finally:
            with self._lock:
                if self._jobs.get(job.request.request_id) is job:
                    del self._jobs[job.request.request_id]

    def _failed(self, job: _Job, error: Exception) -> None:
        name = job.request.request_id
        if not job.ended:
            log.error("TensorRT-LLM failed on request %s", name, exc_info=error)
            self._end(job, "error", f"the engine failed on this request: {' '.join(str(error).split())[:500]}")
        elif isinstance(error, TimeoutError):
            log.warning("TensorRT-LLM did not confirm within %g s that request %s was aborted", ABORT_SECONDS, name)
        else:  # an aborted request may end in an exception
            log.debug("request %s, which had ended, failed: %s", name, error)

    def _take(self, job: _Job, output: Any) -> None:
        """One response of the engine: what one iteration added to the request."""
        if job.ended:
            return
        completion, request = output.outputs[0], job.request
        begin, job.taken = job.taken, max(job.taken, len(completion.token_ids))
        fresh = completion.token_ids[begin:]
        self._count(job, len(fresh))
        tokens, stopped = until_stop(fresh, request.stop_token_ids)
        tokens = tokens[: request.max_tokens - job.stats.output_tokens]
        job.stats.output_tokens += len(tokens)
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.logprobs is not None and completion.logprobs:
            logprobs = logprobs_of(tokens, completion.logprobs[begin:], request.logprobs)
        if output.finished or stopped:
            add_request_metrics(job.stats, completion.request_perf_metrics)
            reason = "stop" if stopped else finish_reason_of(completion.finish_reason)
            message = f"the engine ended this request: {completion.finish_reason}." if reason == "error" else None
            self._end(job, reason, message, tokens, logprobs)
            if not output.finished:
                self._let_go(job)
        elif tokens:
            job.on_event(TokenEvent(request.request_id, tokens, logprobs))

    def _count(self, job: _Job, fresh: int) -> None:
        """The first response is the prompt's own token; every later one is a step, of which all but one token were drafted."""
        now, stats, nodes = time.monotonic(), job.stats, self.limits.nodes
        if not fresh:
            return
        if job.first_token is None:
            job.first_token, stats.prefill_seconds = now, now - job.submitted
            return
        stats.steps += 1
        stats.decode_seconds = now - job.first_token
        if not nodes:
            stats.steps_not_speculated += 1
            return
        accepted = fresh - 1
        stats.accepted_tokens += accepted
        stats.acceptance_histogram[accepted] = stats.acceptance_histogram.get(accepted, 0) + 1
        self._ledger.observe_accepted_path(accepted)
        if not self.limits.varying:
            stats.draft_tokens += nodes
            by_length = stats.acceptance_histogram_by_draft_length.setdefault(nodes, {})
            by_length[accepted] = by_length.get(accepted, 0) + 1

    def _abort(self, job: _Job) -> None:
        """On the loop. The client is told at once; the engine's slot is free when it confirms."""
        if not job.ended:
            self._end(job, "abort")
            self._let_go(job)

    def _let_go(self, job: _Job) -> None:
        if job.result is None:  # its task, which comes next, sees that it has ended
            return
        if job.patience is not None:
            job.patience.reschedule(self._loop.time() + ABORT_SECONDS)
        try:
            job.result.abort()
        except Exception as error:
            log.warning("TensorRT-LLM could not abort request %s: %s", job.request.request_id, error)

    def _end(
        self,
        job: _Job,
        reason: str,
        message: str | None = None,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Send the last event, once."""
        if job.ended:
            return
        job.ended = True
        job.on_event(TokenEvent(job.request.request_id, tuple(tokens), tuple(logprobs), reason, job.stats, message))
