"""Micro-batching: one worker thread runs the model on everything that waits, whoever asked for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from ecospec_proto.codec import encode_experts

from .base import ExpertModel, Query
from .errors import Refused
from .metrics import Metrics

log = logging.getLogger(__name__)
CLOSE_SECONDS = 5.0  # a model that hangs longer is left to the end of the process


@dataclass(frozen=True)
class Answer:
    """experts: the bytes of each tree, expert_dtype [1 + nodes, moe_layers, top_k]."""

    experts: list[bytes]
    expert_dtype: int
    model_nanoseconds: int


Outcome = Answer | Refused


class Job:
    """One request in the queue. deadline: time.monotonic() seconds."""

    def __init__(self, queries: Sequence[Query], deadline: float | None, done: Callable[[Outcome], None]) -> None:
        self.queries, self.deadline, self.done = queries, deadline, done
        self.rows = sum(1 + len(query.draft_tokens) for query in queries)
        self.arrived = time.monotonic()
        self.cancelled = False  # set on the loop, read by the worker

    def expired(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


class Batcher:
    """Create and use it on the event loop; `done` callbacks run there too."""

    def __init__(
        self, model: ExpertModel, metrics: Metrics, max_queue: int, max_trees: int, window_seconds: float
    ) -> None:
        self._model, self._metrics = model, metrics
        self._max_queue, self._max_trees, self._window = max_queue, max_trees, window_seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="expert-model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests in the queue; what runs now is not among them."""
        return len(self._waiting)

    def submit(self, queries: Sequence[Query], deadline: float | None, done: Callable[[Outcome], None]) -> Job:
        """Queue a request of at most max_trees queries; done is called once, unless cancel() comes first. Raises Refused."""
        job = Job(queries, deadline, done)
        if job.expired(job.arrived):
            raise _late()
        if len(self._waiting) >= self._max_queue:
            self._drop_late(job.arrived)
        with self._changed:
            if self._closed:
                raise _stopping()
            if len(self._waiting) >= self._max_queue:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"The queue already holds {len(self._waiting)} requests and max_queue is {self._max_queue}; try again later.",
                )
            self._waiting.append(job)
            self._changed.notify()
        return job

    def _drop_late(self, now: float) -> None:
        """What nobody waits for any more holds no place in a full queue."""
        with self._changed:
            late = [job for job in self._waiting if job.expired(now)]
            self._waiting = deque(job for job in self._waiting if not job.expired(now))
        self._deliver([(job, _late()) for job in late])

    def cancel(self, job: Job) -> None:
        """The caller has gone: the job leaves the queue, and `done` is not called any more."""
        job.cancelled = True
        with self._changed:
            try:
                self._waiting.remove(job)
            except ValueError:  # the worker has it already, or is done with it
                pass

    async def close(self, finish: bool = False) -> None:
        """Take nothing new, refuse what waits (finish: run it), let the running batch end, and end the worker."""
        with self._changed:
            self._closed = True
            rest = [] if finish else list(self._waiting)
            if not finish:
                self._waiting.clear()
            self._changed.notify()
        self._deliver([(job, _stopping()) for job in rest])
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _work(self) -> None:
        while True:
            batch = self._take()
            if batch is None:
                return
            now = time.monotonic()
            live = [job for job in batch if not job.cancelled and not job.expired(now)]
            outcomes: list[tuple[Job, Outcome]] = [(job, _late()) for job in batch if job.expired(now)]
            started = time.perf_counter_ns()
            if live:
                outcomes += zip(live, self._run(live), strict=True)
            seconds = (time.perf_counter_ns() - started) / 1e9
            if outcomes:
                self._loop.call_soon_threadsafe(self._finish, outcomes, live, now, seconds)

    def _take(self) -> list[Job] | None:
        """Wait for work and take what fits into one run, oldest first; None when closed and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._window and self._waiting:
                left = self._waiting[0].arrived + self._window - time.monotonic()
                self._changed.wait_for(lambda: self._closed or self._fills_a_run(), max(left, 0.0))
            if not self._waiting:
                return None
            batch = [self._waiting.popleft()]
            trees, rows = len(batch[0].queries), batch[0].rows
            while self._waiting:
                trees, rows = trees + len(self._waiting[0].queries), rows + self._waiting[0].rows
                if trees > self._max_trees or rows > self._model.max_rows:
                    break
                batch.append(self._waiting.popleft())
            return batch

    def _fills_a_run(self) -> bool:
        trees, rows = sum(len(job.queries) for job in self._waiting), sum(job.rows for job in self._waiting)
        return trees >= self._max_trees or rows >= self._model.max_rows

    def _run(self, jobs: list[Job]) -> list[Outcome]:
        started = time.perf_counter_ns()
        try:
            queries = [query for job in jobs for query in job.queries]
            arrays = self._model.predict(queries)
            nanoseconds = time.perf_counter_ns() - started
            encoded = []
            geometry = self._model.geometry
            for array, query in zip(arrays, queries, strict=True):
                expected = (1 + len(query.draft_tokens), geometry.moe_layers, geometry.top_k)
                if array.shape != expected:
                    raise ValueError(f"the model answered with shape {array.shape} where {expected} was asked for")
                encoded.append(encode_experts(array))
        except Exception:
            log.exception("The model failed on a batch of %d requests.", len(jobs))
            refused = Refused(grpc.StatusCode.INTERNAL, "The prediction failed; the cause is in the predictor's log.")
            return [refused] * len(jobs)
        answers: list[Outcome] = []
        at = 0
        for job in jobs:
            mine = encoded[at : at + len(job.queries)]
            at += len(job.queries)
            answers.append(Answer([data for data, _ in mine], mine[0][1], nanoseconds))
        return answers

    def _finish(
        self, outcomes: list[tuple[Job, Outcome]], ran: list[Job], started: float, model_seconds: float
    ) -> None:
        self._deliver(outcomes)
        if (
            ran
        ):  # counted on the loop, once the answers are on their way: the worker would hold the interpreter meanwhile
            self._loop.call_soon(self._observe, ran, started, model_seconds)

    def _observe(self, jobs: list[Job], started: float, model_seconds: float) -> None:
        self._metrics.batch_trees.observe(sum(len(job.queries) for job in jobs))
        self._metrics.model_seconds.observe(model_seconds)
        for job in jobs:
            self._metrics.queue_seconds.observe(started - job.arrived)

    def _deliver(self, outcomes: list[tuple[Job, Outcome]]) -> None:
        now = time.monotonic()
        for job, outcome in outcomes:
            if not job.cancelled:
                job.done(_late() if isinstance(outcome, Answer) and job.expired(now) else outcome)


def _late() -> Refused:
    return Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "The deadline passed before the prediction was ready.")


def _stopping() -> Refused:
    return Refused(grpc.StatusCode.UNAVAILABLE, "The predictor is stopping; connect to another one or try again later.")
