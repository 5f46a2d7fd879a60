"""ExpertPredictorService: checks what arrives, asks the batcher, and shapes the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ecospec_proto import predictor_pb2
from ecospec_proto.codec import CodecError, decode_tree

from .base import ExpertModel, Query
from .batching import Answer, Batcher, Job, Outcome
from .errors import Refused
from .metrics import Metrics
from .settings import Settings

SERVICE_NAME = predictor_pb2.DESCRIPTOR.services_by_name["ExpertPredictorService"].full_name
M = TypeVar("M", bound=Message)


class ExpertPredictor:
    """The methods take raw messages: a message that does not parse is the caller's fault and must not read as ours."""

    def __init__(self, model: ExpertModel, batcher: Batcher, metrics: Metrics, settings: Settings) -> None:
        self._model, self._batcher, self._metrics, self._settings = model, batcher, metrics, settings
        self._fingerprint = model.geometry.fingerprint
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
        try:
            queries = self._queries(_parse(predictor_pb2.PredictRequest(), data))
            job = self._batcher.submit(queries, _deadline(context), future.set_result)
            try:
                outcome = await future
            except asyncio.CancelledError:  # the caller has gone
                self._batcher.cancel(job)
                self._count("cancelled")
                raise
            if isinstance(outcome, Refused):
                raise outcome
            self._count("ok")
            return self._response(outcome)
        except Refused as refused:
            self._count(refused.outcome)
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
                request_id, outcome = item
                if isinstance(outcome, Refused):
                    self._count(outcome.outcome)
                    error = predictor_pb2.StreamError(code=outcome.number, message=outcome.message)
                    yield predictor_pb2.PredictStreamResponse(request_id=request_id, error=error)
                else:
                    self._count("ok")
                    yield predictor_pb2.PredictStreamResponse(request_id=request_id, response=self._response(outcome))
                stream.answered()
        finally:
            self._streams.discard(stream)
            reader.cancel()
            for job in stream.jobs:  # empty unless the caller has gone
                self._batcher.cancel(job)
                self._count("cancelled")

    async def get_model_info(
        self, data: bytes, context: grpc.aio.ServicerContext
    ) -> predictor_pb2.GetModelInfoResponse:
        try:
            _parse(predictor_pb2.GetModelInfoRequest(), data)
        except Refused as refused:
            await context.abort(refused.code, refused.message)
        geometry = self._model.geometry
        return predictor_pb2.GetModelInfoResponse(
            model_version=self._model.version,
            target_name=geometry.name,
            target_revision=geometry.revision,
            target_fingerprint=self._fingerprint,
            vocab_size=geometry.vocab_size,
            hidden_size=geometry.hidden_size,
            moe_layers=geometry.moe_layers,
            experts=geometry.experts,
            top_k=geometry.top_k,
            max_context_tokens=self._model.max_context_tokens,
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
        try:
            message = _parse(predictor_pb2.PredictStreamRequest(), data)
            request_id = message.request_id
            deadline = stream_deadline
            if message.timeout_microseconds:
                own = arrived + message.timeout_microseconds / 1e6
                deadline = own if deadline is None else min(own, deadline)
            queries = self._queries(message.request)

            def done(outcome: Outcome) -> None:
                stream.jobs.discard(job)
                stream.answers.put_nowait((request_id, outcome))

            job = self._batcher.submit(queries, deadline, done)
            stream.jobs.add(job)
        except Refused as refused:
            stream.answers.put_nowait((request_id, refused))

    def _queries(self, request: predictor_pb2.PredictRequest) -> list[Query]:
        """Checks everything that the model relies on. Raises Refused."""
        if request.target_fingerprint != self._fingerprint:
            geometry = self._model.geometry
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"target_fingerprint is {request.target_fingerprint[:64]!r}, but this predictor was trained for "
                f"'{self._fingerprint}' ({geometry.name}, revision {geometry.revision}); use the predictor of your target.",
            )
        limit = self._settings.max_trees
        if not 1 <= len(request.trees) <= limit:
            raise _invalid(f"trees holds {len(request.trees)} trees; 1 to {limit} are allowed in one request.")
        vocabulary, nodes = self._model.geometry.vocab_size, self._settings.max_nodes_per_tree
        context_bytes, context_tokens = self._settings.max_context_bytes, self._model.max_context_tokens
        queries = []
        for at, tree in enumerate(request.trees):
            if len(tree.context_tokens) > context_bytes:
                raise _invalid(
                    f"trees[{at}].context_tokens has {len(tree.context_tokens)} bytes; at most {context_bytes} are allowed, and "
                    f"the last {context_tokens} tokens are enough."
                )
            try:
                arrays = decode_tree(
                    tree.context_tokens, tree.draft_tokens, tree.parents, vocabulary, nodes, context_tokens
                )
            except CodecError as error:
                raise _invalid(f"trees[{at}].{error}") from None
            queries.append(Query(*arrays))
        return queries

    def _response(self, answer: Answer) -> predictor_pb2.PredictResponse:
        return predictor_pb2.PredictResponse(
            expert_dtype=answer.expert_dtype,  # type: ignore[arg-type]  # the enum's number
            trees=[predictor_pb2.TreePrediction(experts=data) for data in answer.experts],
            model_version=self._model.version,
            model_nanoseconds=answer.model_nanoseconds,
        )

    def _count(self, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()


class _Stream:
    """What one stream owes: at most `limit` requests are accepted and not yet answered, then reading waits."""

    def __init__(self, limit: int) -> None:
        self.answers: asyncio.Queue[tuple[int, Outcome] | None] = asyncio.Queue()  # None ends the stream
        self.jobs: set[Job] = set()
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


def _parse(message: M, data: bytes) -> M:
    try:
        message.ParseFromString(data)
    except DecodeError:
        name = message.DESCRIPTOR.name
        raise _invalid(f"The message of {len(data)} bytes is no {name}; send one encoded by predictor.proto.") from None
    return message


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _invalid(message: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)
