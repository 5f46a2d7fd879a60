"""One gRPC stream to the expert predictor, held by a thread of its own, which connects again whenever it ends.

How the scheduler's thread reaches the stream was chosen by measurement (round trip of a 60-node tree's message over
loopback, service in another process, two busy cores; median milliseconds): call_soon_threadsafe + Event 0.33 to 0.35,
the same with a bare Lock 0.34, run_coroutine_threadsafe 0.36, the synchronous stream with a reader thread 0.35. The
differences are noise, so the plainest is used; and an asyncio stream makes reconnecting, cancelling and closing simple.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import grpc
import numpy as np
import uvloop

from ecospec_proto import predictor_pb2, predictor_pb2_grpc
from ecospec_proto.codec import CodecError, pack_bitsets
from ecospec_proto.geometry import TargetGeometry

from .base import FootprintUnavailableError
from .calls import Call, Failure, Link, Part
from .channel import ClientTls, channel

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0  # one attempt, which ends at once with the reason when the service cannot be reached
BACKOFF_SECONDS = (0.1, 2.0)  # first and longest pause between attempts
RECHECK_SECONDS = 2.0  # between looks at a service that predicts for another target
CLOSE_SECONDS = 5.0
END_SECONDS = 0.05  # a question within this time takes the news of an ended request along
LOST = grpc.StatusCode.NOT_FOUND.value[0]
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_SECONDS[0] * 1000)),
    ("grpc.min_reconnect_backoff_ms", 1000),  # in truth the least time that one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", int(BACKOFF_SECONDS[1] * 1000)),
    ("grpc.max_receive_message_length", 256 << 20),  # the default of 4 MiB is 90 trees of 60 nodes at 94 layers
    ("grpc.use_local_subchannel_pool", 1),  # another source's back-off is not ours
]
_REASONS = {  # code of a StreamError -> reason; every other code is "error"
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: "deadline",
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: "mismatch",
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: "unavailable",
    grpc.StatusCode.UNAVAILABLE.value[0]: "unavailable",
}


class PredictorStream:
    """address: "host:port". on_version is told the model's version when it is another than before, on_resend of every context that the
    service had lost, both in the stream's thread. What is public is written by that thread only.

    link: the open stream; None while there is none, and then `down` says why. contexts_resent: contexts that were sent again.
    """

    def __init__(
        self,
        address: str,
        geometry: TargetGeometry,
        tls: ClientTls | None = None,
        on_version: Callable[[str], None] | None = None,
        on_resend: Callable[[], None] | None = None,
    ) -> None:
        self._address, self._geometry, self._tls = address, geometry, tls
        self._on_version, self._on_resend = on_version, on_resend
        self._fingerprint = geometry.fingerprint
        self.link: Link | None = None
        self.down: Failure = ("unavailable", f"The predictor at {address} is not connected yet.")
        self.contexts_resent = 0
        self._request_id = 0
        self._call: Call | None = None  # the question that waits
        self._pending: dict[int, Part] = {}  # its messages that are not answered
        self._logged = ""  # the reason that was logged last
        self._version = ""  # of the model that answered last
        self._stop = asyncio.Event()
        self._loop = uvloop.new_event_loop()  # a call costs a tenth less than on the standard loop
        self._thread = threading.Thread(target=self._run, name="predictor-client", daemon=True)
        self._thread.start()

    # From any thread.

    def send(self, call: Call) -> None:
        """Ends call.done when it is answered or has failed. Raises RuntimeError when the stream is closed."""
        self._loop.call_soon_threadsafe(self._send, call)

    def end(self, request_id: str) -> None:
        """The service may forget the request's context; it is told with the next question, or soon."""
        with contextlib.suppress(RuntimeError):  # closed, and every session with it
            self._loop.call_soon_threadsafe(self._end, request_id)

    def close(self) -> None:
        """Ends the stream and its thread; a waiting call fails with "unavailable". Safe twice."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_SECONDS)

    # The stream's thread.

    def _run(self) -> None:
        for dtype in (np.uint8, np.uint16):  # compiles the kernel now, not within the first deadline
            pack_bitsets(np.zeros((1, 1, 1), dtype), 1)
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        connecting = asyncio.create_task(self._keep_connected())
        await self._stop.wait()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        self._drop_link(("unavailable", f"The client of the predictor at {self._address} is closed."))

    async def _keep_connected(self) -> None:
        pause = BACKOFF_SECONDS[0]
        while True:
            try:
                # A channel of its own for every try: it reads the TLS files again.
                async with channel(self._address, self._tls, CHANNEL_OPTIONS) as opened:
                    stub = predictor_pb2_grpc.ExpertPredictorServiceStub(opened)
                    question = predictor_pb2.GetModelInfoRequest(target_fingerprint=self._fingerprint)
                    info = await stub.GetModelInfo(question, timeout=CONNECT_SECONDS)
                    if info.target_fingerprint == self._fingerprint:
                        failure = await self._serve_link(
                            Link(stub.PredictStream(), info.max_context_tokens, info.max_trees), info.model_version
                        )
                        pause = BACKOFF_SECONDS[0]  # it was up, so the first try comes soon
                    else:
                        failure = self._mismatch(info)
            except FootprintUnavailableError as error:
                failure = (error.reason, str(error))
            except grpc.aio.AioRpcError as error:
                detail = f"{error.code().name}, {error.details()}"
                reason = "mismatch" if error.code() == grpc.StatusCode.FAILED_PRECONDITION else "unavailable"
                failure = (reason, f"The predictor at {self._address} cannot be reached ({detail}).")
            except Exception as error:  # a bug here must cost predictions, never the thread that looks for them
                failure = ("error", f"The client of the predictor at {self._address} failed: {error!r}")
            self._drop_link(failure)
            if failure[0] != self._logged:  # once per change, however often the service is tried
                logger.warning("%s Drafts are chosen without predictions until it is back.", failure[1])
                self._logged = failure[0]
            if failure[0] == "mismatch":
                await asyncio.sleep(RECHECK_SECONDS)
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, BACKOFF_SECONDS[1])

    async def _serve_link(self, link: Link, version: str) -> Failure:
        """Hands answers to their calls until the stream ends; returns why it ended."""
        try:
            self.link, self._logged = link, ""
            logger.info("The predictor at %s is connected (model %s).", self._address, version)
            self._saw_version(version)
            while True:
                answer = await link.stream.read()
                if answer is grpc.aio.EOF:
                    return ("unavailable", f"The predictor at {self._address} ended the stream.")
                part = self._pending.pop(answer.request_id, None)  # None: late, its caller has gone on
                if answer.WhichOneof("result") == "response":
                    self._saw_version(answer.response.model_version)
                    self._accept(part, answer.response)
                elif answer.error.code == LOST:
                    self._send_again(link, part, answer.error)
                else:
                    failure = self._refusal(answer.error)
                    if part is not None:
                        self._fail(failure)
                    if failure[0] == "mismatch":
                        return failure
        except grpc.aio.AioRpcError as error:
            return (
                "unavailable",
                f"The connection to the predictor at {self._address} was lost ({error.code().name}).",
            )
        finally:
            link.stream.cancel()

    def _saw_version(self, version: str) -> None:
        if version in ("", self._version):  # it need not tell one
            return
        if self._version:
            logger.info(
                "The predictor at %s answers with model %s instead of %s.", self._address, version, self._version
            )
        self._version = version
        if self._on_version is not None:
            self._on_version(version)

    def _mismatch(self, info: predictor_pb2.GetModelInfoResponse) -> Failure:
        geometry = self._geometry
        return (
            "mismatch",
            f"The predictor at {self._address} was trained for {info.target_name} revision {info.target_revision} "
            f"(fingerprint {info.target_fingerprint}); this target is {geometry.name} revision {geometry.revision} "
            f"(fingerprint {self._fingerprint}). Serve a model trained for this target.",
        )

    def _refusal(self, error: predictor_pb2.StreamError) -> Failure:
        reason = _REASONS.get(error.code, "error")
        return reason, f"The predictor at {self._address} refused: {error.message} (code {error.code})."

    def _drop_link(self, failure: Failure) -> None:
        self.down = failure  # before the link goes: begin() reads them in the other order
        self.link = None
        self._fail(failure)

    def _accept(self, part: Part | None, response: predictor_pb2.PredictResponse) -> None:
        if part is None or self._call is None:
            return
        part.response = response
        if not self._pending:
            call, self._call = self._call, None
            call.finish()

    def _fail(self, failure: Failure) -> None:
        call, self._call = self._call, None
        self._pending = {}
        if call is not None:
            call.finish(failure)

    def _send(self, call: Call) -> None:
        link = self.link
        if link is not call.link:
            call.finish(self.down)
        elif link.write is not None and not link.write.done():
            call.finish(("deadline", f"The predictor at {self._address} takes no requests."))
        else:
            self._call, self._pending = call, {}  # an older one has timed out: its answer comes too late
            self._write(link, call, call.parts)

    def _send_again(self, link: Link, part: Part | None, error: predictor_pb2.StreamError) -> None:
        """The service has lost a context of this part: it is sent whole, once."""
        call = self._call
        if part is None or call is None:
            return
        for asked in part.asked:
            link.contexts.forget(asked.request_id)
        if part.resent:
            self._fail(self._refusal(error))
        elif time.monotonic() < call.deadline:
            part.resent = True
            self.contexts_resent += 1
            if self._on_resend is not None:
                self._on_resend()
            self._write(link, call, [part])

    def _write(self, link: Link, call: Call, parts: Sequence[Part]) -> None:
        try:
            messages = [self._message(link, part, call) for part in parts]
        except CodecError as error:
            self._fail(("error", f"The draft tree cannot be sent to the predictor: {error}"))
            return
        link.write = self._loop.create_task(self._write_all(link, messages))

    def _message(self, link: Link, part: Part, call: Call) -> predictor_pb2.PredictStreamRequest:
        self._request_id += 1
        self._pending[self._request_id] = part
        trees = [link.contexts.query(asked) for asked in part.asked]
        request = predictor_pb2.PredictRequest(
            target_fingerprint=self._fingerprint, trees=trees, end_sessions=link.contexts.take_ended()
        )
        timeout = min(max(1, int((call.deadline - time.monotonic()) * 1e6)), 2**32 - 1)
        return predictor_pb2.PredictStreamRequest(
            request_id=self._request_id,
            request=request,
            timeout_microseconds=timeout,
            traceparent=call.traceparent,
        )

    async def _write_all(self, link: Link, messages: Sequence[predictor_pb2.PredictStreamRequest]) -> None:
        try:
            async with link.turn:
                for message in messages:
                    await link.stream.write(message)
        except Exception:  # the reader learns why the stream broke and ends it; the call need not wait for that
            if link is self.link:
                self._fail(("unavailable", f"The connection to the predictor at {self._address} was lost."))

    def _end(self, request_id: str) -> None:
        link = self.link
        if link is None:
            return
        link.contexts.end(request_id)
        if link.ending is None or link.ending.done():
            link.ending = self._loop.create_task(self._tell_ended(link))

    async def _tell_ended(self, link: Link) -> None:
        await asyncio.sleep(END_SECONDS)
        async with link.turn:
            if ended := link.contexts.take_ended():  # else a question took them along
                self._request_id += 1
                request = predictor_pb2.PredictRequest(target_fingerprint=self._fingerprint, end_sessions=ended)
                message = predictor_pb2.PredictStreamRequest(request_id=self._request_id, request=request)
                with contextlib.suppress(Exception):  # the stream broke: the reader learns why
                    await link.stream.write(message)
