"""Client of the expert predictor: what a caller sees of its stream, and when it is left alone for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ecospec_proto import telemetry
from ecospec_proto.codec import CodecError
from ecospec_proto.geometry import TargetGeometry

from ..core import Footprints
from ..tracing import end_prediction, prediction_span
from .base import FootprintSource, FootprintUnavailableError, TreeContext
from .calls import Call, Link, Part
from .channel import ClientTls
from .contexts import Asked
from .stream import PredictorStream

logger = logging.getLogger(__name__)

PAUSE_SECONDS = (0.1, 2.0)  # first and longest, for a service that misses its deadlines
MISSES_BEFORE_PAUSE = 3


class RemoteFootprintSource(FootprintSource):
    """Footprints from the predictor service at address ("host:port").

    deadline_seconds bounds every call. on_call is told the seconds of every call that got a prediction, from begin to the
    answer's arrival, in the caller's thread; on_version the model's version when it is another than before, in the stream's
    thread. The context of a request is sent once and then only what is new; a context that the service has lost is sent
    again, within the deadline of the same call (contexts_resent counts them, and on_resend is told in the stream's thread).

    Neither the constructor nor begin waits for a connection; begin and the function that it returns raise
    FootprintUnavailableError with reason "unavailable" (not connected, overloaded, closed), "deadline" (no answer in time,
    or calls pause after several misses), "mismatch" (the service predicts for another target) or "error" (it refused the
    question, or its answer is malformed).
    """

    def __init__(
        self,
        address: str,
        geometry: TargetGeometry,
        deadline_seconds: float,
        on_call: Callable[[float], None] | None = None,
        tls: ClientTls | None = None,
        on_version: Callable[[str], None] | None = None,
        on_resend: Callable[[], None] | None = None,
    ) -> None:
        self._address, self._geometry, self._deadline, self._on_call = address, geometry, deadline_seconds, on_call
        self._misses = 0
        self._wrong = False  # the last answer, and it was told
        self._pause = PAUSE_SECONDS[0]
        self._resume_at = 0.0
        self._asked: Link | None = None  # the link of the last question: a new one starts without misses
        self._stream = PredictorStream(address, geometry, tls, on_version, on_resend)

    @property
    def contexts_resent(self) -> int:
        return self._stream.contexts_resent

    def begin(self, trees: Sequence[TreeContext]) -> Callable[[], list[Footprints]]:
        """Sends the question. The returned function gives one Footprints per tree, all known: uint64 [1 + N, layers, words];
        it returns at most about deadline_seconds after begin. One question at a time: the next one abandons it."""
        if not trees:
            return lambda: []
        start = time.monotonic()
        link = self._stream.link
        if link is None:
            raise FootprintUnavailableError(*self._stream.down)
        if link is not self._asked:
            self._asked = link
            self._answered()
        if start < self._resume_at:
            raise FootprintUnavailableError(
                "deadline", f"Calls to the predictor at {self._address} pause after {self._misses} misses."
            )
        asked = [Asked.of(item, link.max_context_tokens) for item in trees]
        size = link.max_trees or len(asked)
        parts = [Part(asked[at : at + size]) for at in range(0, len(asked), size)]
        span = prediction_span(self._address, len(trees))
        call = Call(parts, link, start + self._deadline)
        if span is not None:
            call.traceparent = telemetry.traceparent(span)
        try:
            self._stream.send(call)
        except RuntimeError:  # it was closed meanwhile
            end_prediction(span, self._stream.down)
            raise FootprintUnavailableError(*self._stream.down) from None
        return lambda: self._wait(call, start, span)

    def _wait(self, call: Call, start: float, span: Any | None) -> list[Footprints]:
        if not call.done.wait(max(0.0, call.deadline - time.monotonic())):
            call.failure = (
                "deadline",
                f"The predictor at {self._address} did not answer within {self._deadline * 1e3:g} ms.",
            )
        end_prediction(span, call.failure)
        if call.failure is not None:
            if call.failure[0] == "deadline":
                self._missed()
            else:
                self._answered()
            if call.failure[0] == "error":
                self._tell_wrong(call.failure[1])
            raise FootprintUnavailableError(*call.failure)
        self._answered()
        if self._on_call is not None:
            self._on_call(call.answered_at - start)
        found = [footprints for part in call.parts for footprints in self._decode(part)]
        self._wrong = False
        return found

    def end(self, request_id: str) -> None:
        """The service may forget the request's context; it is told with the next question, or soon."""
        self._stream.end(request_id)

    def close(self) -> None:
        """Ends the stream and its thread; a waiting call fails with "unavailable". Safe twice and from any thread."""
        self._stream.close()

    def _decode(self, part: Part) -> list[Footprints]:
        try:
            return part.footprints(self._geometry)
        except CodecError as error:
            problem = f"The answer of the predictor at {self._address} is malformed: {error}"
            self._tell_wrong(problem)
            raise FootprintUnavailableError("error", problem) from error

    def _tell_wrong(self, problem: str) -> None:
        """Once until an answer is right again."""
        if not self._wrong:
            logger.warning("%s Drafts are chosen without predictions while this lasts.", problem)
        self._wrong = True

    def _missed(self) -> None:
        self._misses += 1
        if self._misses == MISSES_BEFORE_PAUSE:
            logger.warning(
                "The predictor at %s missed %d deadlines in a row; calls to it pause.", self._address, self._misses
            )
        if self._misses >= MISSES_BEFORE_PAUSE:  # a hung service then costs one deadline per pause
            self._resume_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, PAUSE_SECONDS[1])

    def _answered(self) -> None:
        if self._misses >= MISSES_BEFORE_PAUSE:
            logger.info("The predictor at %s is called again.", self._address)
        self._misses, self._pause, self._resume_at = 0, PAUSE_SECONDS[0], 0.0
