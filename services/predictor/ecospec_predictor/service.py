"""ExpertPredictorService: checks what arrives, asks the batcher, and shapes the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from ecospec_proto import predictor_pb2
from ecospec_proto.codec import CodecError, decode_tree

from .base import Query
from .batching import Answer, Batcher, Job, Outcome
from .catalogue import Catalogue, Served
from .errors import Refused
from .metrics import Metrics
from .settings import Settings
from .tracing import end_question, question_span

SERVICE_NAME = predictor_pb2.DESCRIPTOR.services_by_name["ExpertPredictorService"].full_name
MAX_ENDED_SESSIONS = 4096
M = TypeVar("M", bound=Message)


class ExpertPredictor:
    """The methods take raw messages: a message that does not parse is the caller's fault and must not read as ours."""

    def __init__(self, catalogue: Catalogue, metrics: Metrics, settings: Settings) -> None:
        self._catalogue, self._metrics, self._settings = catalogue, metrics, settings
        self._streams: set[_Stream] = set()
        self._draining = False

    def handler(self) -> grpc.GenericRpcHandler:
        """What add_generic_rpc_handlers() takes."""
        serialize = predictor_pb2.PredictResponse.SerializeToString
        stream_serialize = predictor_pb2.PredictStreamResponse.SerializeToString
        info_serialize = predictor_pb2.GetModelInfoResponse.SerializeToString
        methods = {
            "Predict": grpc.unary_unary_rpc_method_handler(self.predict, response_serializer=serialize),
            "PredictStream": grpc.stream_stream_rpc_method_handler(
                self.predict_stream, response_serializer=stream_serialize
            ),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                self.get_model_info, response_serializer=info_serialize
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def drain(self) -> None:
        """End every stream once its accepted requests are answered; new streams end at once."""
        self._draining = True
        for stream in self._streams:
            stream.end_of_requests()

    async def predict(self, data: bytes, context: grpc.aio.ServicerContext) -> predictor_pb2.PredictResponse:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        span = None
        try:
            request = _parse(predictor_pb2.PredictRequest(), data)
            span = question_span(_metadata(context), "Predict", len(request.trees))
            served = self._served(request.target_fingerprint)
            if any(tree.session_id for tree in request.trees) or request.end_sessions:
                raise _invalid("Predict was called with a session; sessions live on a PredictStream: use one.")
            job = served.batcher.submit(self._queries(request, served, None), _deadline(context), future.set_result)
            try:
                outcome = await future
            except asyncio.CancelledError:  # the caller has gone
                served.batcher.cancel(job)
                self._count("cancelled")
                raise
            if isinstance(outcome, Refused):
                raise outcome
            self._count("ok")
            end_question(span, outcome)
            return _response(outcome, served)
        except Refused as refused:
            self._count(refused.outcome)
            end_question(span, refused)
            await context.abort(refused.code, refused.message)
            raise  # abort() has raised already

    async def predict_stream(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[predictor_pb2.PredictStreamResponse]:
        stream = _Stream(2 * self._settings.max_queue)
        reader = asyncio.create_task(self._read(requests, stream, _deadline(context)))
        self._streams.add(stream)
        if self._draining:
            stream.end_of_requests()
        try:
            while (item := await stream.answers.get()) is not None:
                request_id, outcome, served = item
                if isinstance(outcome, Refused):
                    self._count(outcome.outcome)
                    error = predictor_pb2.StreamError(code=outcome.number, message=outcome.message)
                    yield predictor_pb2.PredictStreamResponse(request_id=request_id, error=error)
                else:
                    self._count("ok")
                    assert served is not None
                    response = _response(outcome, served)
                    yield predictor_pb2.PredictStreamResponse(request_id=request_id, response=response)
                stream.answered()
        finally:
            self._streams.discard(stream)
            reader.cancel()
            for job, batcher in stream.jobs.items():  # empty unless the caller has gone
                batcher.cancel(job)
                self._count("cancelled")
            for model in self._catalogue.all():
                model.sessions.end_caller(stream)

    async def get_model_info(
        self, data: bytes, context: grpc.aio.ServicerContext
    ) -> predictor_pb2.GetModelInfoResponse:
        try:
            asked = _parse(predictor_pb2.GetModelInfoRequest(), data).target_fingerprint
            only = self._any() if len(self._catalogue.all()) < 2 else None
            model = (self._catalogue.get(asked) or only or self._served(asked)).model
        except Refused as refused:
            await context.abort(refused.code, refused.message)
            raise  # abort() has raised already
        geometry = model.geometry
        return predictor_pb2.GetModelInfoResponse(
            model_version=model.version,
            target_name=geometry.name,
            target_revision=geometry.revision,
            target_fingerprint=geometry.fingerprint,
            vocab_size=geometry.vocab_size,
            hidden_size=geometry.hidden_size,
            moe_layers=geometry.moe_layers,
            experts=geometry.experts,
            top_k=geometry.top_k,
            max_context_tokens=model.max_context_tokens,
            max_nodes_per_tree=self._settings.max_nodes_per_tree,
            max_trees=self._settings.max_trees,
        )

    async def _read(self, requests: AsyncIterator[bytes], stream: _Stream, stream_deadline: float | None) -> None:
        try:
            async for data in requests:
                await stream.accept()
                if not stream.reading:  # draining: what comes now is for the next server
                    break
                self._start(data, stream, stream_deadline)
        finally:
            stream.end_of_requests()

    def _start(self, data: bytes, stream: _Stream, stream_deadline: float | None) -> None:
        arrived = time.monotonic()
        request_id = 0  # also of the answer to a message that does not parse
        span = None
        try:
            message = _parse(predictor_pb2.PredictStreamRequest(), data)
            request_id = message.request_id
            span = question_span({"traceparent": message.traceparent}, "PredictStream", len(message.request.trees))
            deadline = stream_deadline
            if message.timeout_microseconds:
                own = arrived + message.timeout_microseconds / 1e6
                deadline = own if deadline is None else min(own, deadline)
            served = self._served(message.request.target_fingerprint)
            queries = self._queries(message.request, served, stream)
            if not queries:  # it only ended sessions
                end_question(span, nothing := Answer([], 0, 0))
                stream.answers.put_nowait((request_id, nothing, served))
                return

            def done(outcome: Outcome) -> None:
                stream.jobs.pop(job, None)
                end_question(span, outcome)
                stream.answers.put_nowait((request_id, outcome, served))

            job = served.batcher.submit(queries, deadline, done)
            stream.jobs[job] = served.batcher
        except Refused as refused:
            end_question(span, refused)
            stream.answers.put_nowait((request_id, refused, None))

    def _served(self, fingerprint: str) -> Served:
        """Raises Refused for a target that nothing here was trained for."""
        if (served := self._catalogue.get(fingerprint)) is not None:
            return served
        self._any()
        geometries = [served.model.geometry for served in self._catalogue.all()]
        known = ", ".join(f"'{g.fingerprint}' ({g.name}, revision {g.revision})" for g in geometries)
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"target_fingerprint is {fingerprint[:64]!r}, but this predictor was trained for {known}; use the predictor of "
            "your target.",
        )

    def _any(self) -> Served:
        if not (served := self._catalogue.all()):
            raise Refused(grpc.StatusCode.UNAVAILABLE, "This predictor has no model loaded; try again later.")
        return served[0]

    def _queries(self, request: predictor_pb2.PredictRequest, served: Served, stream: _Stream | None) -> list[Query]:
        """Checks everything that the model relies on, then tells the stream's sessions what is new. Raises Refused."""
        limit, ended = self._settings.max_trees, request.end_sessions
        if len(ended) > MAX_ENDED_SESSIONS:
            raise _invalid(
                f"end_sessions holds {len(ended)} sessions; at most {MAX_ENDED_SESSIONS} are allowed at once."
            )
        if not (1 <= len(request.trees) <= limit or (ended and not request.trees)):
            raise _invalid(f"trees holds {len(request.trees)} trees; 1 to {limit} are allowed in one request.")
        trees = [self._decoded(tree, at, served) for at, tree in enumerate(request.trees)]
        if stream is None:
            return [Query(*arrays) for arrays in trees]
        served.sessions.end(stream, ended)
        # Every session takes its new tokens, also when another one of the request is lost or the queue is full.
        refused, queries = None, []
        for tree, arrays in zip(request.trees, trees, strict=True):
            if not tree.session_id:
                queries.append(Query(*arrays))
                continue
            try:
                sent = len(tree.context_tokens) // 4
                session = served.sessions.extend(stream, tree.session_id, tree.context_start, arrays[0], sent)
                queries.append(Query(session.tokens, arrays[1], arrays[2], session, session.length))
            except Refused as problem:
                refused = problem
        if refused is not None:
            raise refused
        return queries

    def _decoded(
        self, tree: predictor_pb2.TreeQuery, at: int, served: Served
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        limit, tail, geometry = self._settings.max_context_bytes, served.model.max_context_tokens, served.model.geometry
        if len(tree.context_tokens) > limit:
            raise _invalid(
                f"trees[{at}].context_tokens has {len(tree.context_tokens)} bytes; at most {limit} are allowed, and "
                f"the last {tail} tokens are enough."
            )
        needs_context = not (tree.session_id and tree.context_start)
        try:
            return decode_tree(
                tree.context_tokens,
                tree.draft_tokens,
                tree.parents,
                geometry.vocab_size,
                self._settings.max_nodes_per_tree,
                tail,
                needs_context,
            )
        except CodecError as error:
            raise _invalid(f"trees[{at}].{error}") from None

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()


class _Stream:
    """What one stream owes: at most `limit` requests are accepted and not yet answered, then reading waits."""

    def __init__(self, limit: int) -> None:
        self.answers: asyncio.Queue[tuple[int, Outcome, Served | None] | None] = asyncio.Queue()  # None ends the stream
        self.jobs: dict[Job, Batcher] = {}  # what is not answered yet, and where it waits
        self.reading = True
        self._slots = asyncio.Semaphore(limit)
        self._open = 0

    async def accept(self) -> None:
        await self._slots.acquire()
        if self.reading:
            self._open += 1

    def answered(self) -> None:
        self._open -= 1
        self._slots.release()
        self._end_if_done()

    def end_of_requests(self) -> None:
        if self.reading:
            self.reading = False
            self._end_if_done()

    def _end_if_done(self) -> None:
        if not self.reading and self._open == 0:
            self.answers.put_nowait(None)


def _response(answer: Answer, served: Served) -> predictor_pb2.PredictResponse:
    return predictor_pb2.PredictResponse(
        expert_dtype=answer.expert_dtype,  # type: ignore[arg-type]  # the enum's number
        trees=[predictor_pb2.TreePrediction(experts=data) for data in answer.experts],
        model_version=served.model.version,
        model_nanoseconds=answer.model_nanoseconds,
    )


def _parse(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.name
        raise _invalid(f"The message of {len(data)} bytes is no {name}; send one encoded by predictor.proto.") from None
    return message


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
