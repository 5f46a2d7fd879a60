"""Scores the models that are served on the live routes in the state store, without making a caller wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from ecospec_proto.codec import decode_experts
from ecospec_proto.shared_state import TRACE_FIELD, StoreAddress, connect_async, traces_key
from ecospec_proto.trace_document import TraceDocument, TraceError
from ecospec_proto.trace_record import decode_record

from ..base import ExpertModel
from ..batching import Batcher, Outcome
from ..catalogue import Served
from ..errors import Refused
from .drift import Counts, Rolling, count, observe
from .metrics import LiveMetrics
from .questions import Question, questions_of

if TYPE_CHECKING:
    import redis.asyncio

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 5.0
LOOK_SECONDS = 0.5  # between looks at a stream that has nothing new
BUSY_SECONDS = 0.02  # between looks at a queue that is not empty
BACKOFF_SECONDS = (0.5, 10.0)


@dataclass(eq=False)
class _Target:
    """What is known of one target's model. seen: the stream's entry that was scored last."""

    version: str
    state: Rolling
    seen: bytes | None


class LiveScorer:
    """Takes the newest record each time, so that what it shows is about now, however many records it has no time for.

    served: what is served now. tokens_per_second bounds the rows that it asks about; a question goes into the model's ordinary
    queue, alone and only when nobody waits there, so that a caller waits for one tree at most. Use it on the event loop."""

    def __init__(
        self,
        address: StoreAddress,
        served: Callable[[], Sequence[Served]],
        baseline_of: Callable[[ExpertModel], float | None],
        metrics: LiveMetrics,
        tokens_per_second: float,
        margin: float,
        max_nodes: int,
    ) -> None:
        self._address, self._served, self._baseline_of, self._metrics = address, served, baseline_of, metrics
        self._rate, self._margin, self._max_nodes = tokens_per_second, margin, max_nodes
        self._targets: dict[str, _Target] = {}
        self._free_at = time.monotonic()
        self._problem: str | None = None

    async def run(self) -> None:
        """Until it is cancelled."""
        pause = BACKOFF_SECONDS[0]
        while True:
            try:
                async with connect_async(self._address, TIMEOUT_SECONDS) as client:
                    while True:
                        busy = False
                        for served in self._served():
                            busy |= await self._look(client, served)
                        self._told("")
                        pause = BACKOFF_SECONDS[0]
                        if not busy:
                            await asyncio.sleep(LOOK_SECONDS)
            except (RedisError, OSError) as error:
                self._told(f"{type(error).__name__}: {error}")
            except Exception as error:  # a bug here must cost figures, never the task that makes the next ones
                log.exception("Scoring a live record failed.")
                self._told(repr(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def _look(self, client: redis.asyncio.Redis, served: Served) -> bool:
        """Score the target's newest record; False when there is nothing new."""
        await asyncio.sleep(self._free_at - time.monotonic())
        model = served.model
        fingerprint = model.geometry.fingerprint
        target = self._target(fingerprint, model)
        key = traces_key(fingerprint)
        oldest = b"-" if target.seen is None else b"(" + target.seen
        entries: Any = await client.xrevrange(key, "+", oldest, count=1)  # type: ignore[arg-type]  # ids are bytes
        if not entries:
            return False
        target.seen, fields = entries[0]
        try:
            # In a thread: for a large target this takes longer than a caller should wait.
            record = await asyncio.to_thread(decode_record, fields.get(TRACE_FIELD, b""), model.geometry)
        except TraceError as error:
            self._metrics.records_refused.inc()
            log.warning("An entry of %s in the state store is passed over: %s", key, error)
            return True
        await self._score(served, target, record)
        return True

    def _target(self, fingerprint: str, model: ExpertModel) -> _Target:
        """The figures of one model say nothing of the next."""
        target = self._targets.get(fingerprint)
        if target is None or target.version != model.version:
            state = Rolling(Counts.none(model.geometry.moe_layers))
            seen = None if target is None else target.seen
            target = self._targets[fingerprint] = _Target(model.version, state, seen)
            baseline = self._baseline_of(model)
            self._metrics.show(fingerprint, state, baseline)
            if baseline is None:
                log.warning(
                    "Model %s for %s tells no held-out accuracy in its config.json, so that drift raises no alarm.",
                    model.version,
                    model.geometry.name,
                )
        return target

    async def _score(self, served: Served, target: _Target, record: TraceDocument) -> None:
        model, drifted = served.model, target.state.drifts
        baseline = self._baseline_of(model)
        for question in questions_of(record, model.max_context_tokens, self._max_nodes):
            answer = await self._ask(served.batcher, question)
            rows = len(question.rows)
            self._free_at = max(self._free_at, time.monotonic()) + rows / self._rate
            if isinstance(answer, Refused):  # the model is replaced, or fails, which the batcher has logged
                return
            geometry = model.geometry
            predicted = decode_experts(
                answer.experts[0], answer.expert_dtype, rows, geometry.moe_layers, geometry.top_k
            )
            used = record.routes[question.rows]
            scored = int((used >= 0).any((1, 2)).sum())
            target.state = observe(target.state, count(predicted, used), scored, baseline, self._margin)
            self._metrics.scored_tokens.inc(scored)
            await asyncio.sleep(self._free_at - time.monotonic())
        self._metrics.show(model.geometry.fingerprint, target.state, baseline)
        if target.state.drifts != drifted:
            self._tell_drift(model, target.state, baseline)

    def _tell_drift(self, model: ExpertModel, state: Rolling, baseline: float | None) -> None:
        now = f"{state.counts.accuracy:.3f} on live text, {baseline:.3f} when it was trained"
        if state.drifts:
            log.warning("Model %s for %s drifts: top-k accuracy %s.", model.version, model.geometry.name, now)
        else:
            log.info("Model %s for %s drifts no more: top-k accuracy %s.", model.version, model.geometry.name, now)

    async def _ask(self, batcher: Batcher, question: Question) -> Outcome:
        while batcher.waiting:
            await asyncio.sleep(BUSY_SECONDS)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        try:
            job = batcher.submit([question.query], None, future.set_result)
        except Refused as refused:
            return refused
        try:
            return await future
        except asyncio.CancelledError:
            batcher.cancel(job)
            raise

    def _told(self, problem: str) -> None:
        """Says what changed, once per change."""
        self._metrics.store_up.set(problem == "")
        if problem and not self._problem:
            log.warning("Live routes cannot be read from the state store at %s (%s).", self._address, problem)
        elif not problem and self._problem:
            log.info("Live routes are read from the state store at %s again.", self._address)
        self._problem = problem
