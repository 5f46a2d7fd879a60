"""Connections of clients that send or read too slowly, or are too many: none holds a slot, a buffer or a socket for ever.

A request's headers and body must be there within read_seconds of its first byte. Whoever lets more than the buffers of an answer wait
for write_seconds is cut off, which cancels the request like any disconnect. Between requests uvicorn's keep-alive time counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BUFFER_BYTES = 2**16  # of an answer, in this process
SOCKET_BUFFER_BYTES = 2**18  # and in the kernel, which by itself would take megabytes
MESSAGE = "The request did not arrive in time; send its headers and body without pauses."


@dataclass(frozen=True)
class ConnectionLimits:
    """on_slow gets "headers", "body", "response" or "connections" for each connection that was ended."""

    read_seconds: float
    write_seconds: float
    max_connections: int
    on_slow: Callable[[str], None]


def bounded_protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """What uvicorn.Config takes as http."""
    kind: Any = type("Bounded", (BoundedProtocol,), {"limits": limits})
    return kind


class BoundedProtocol(H11Protocol):
    limits: ClassVar[ConnectionLimits]
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self.limits.on_slow("connections")
            transport.abort()
        else:
            self._expect_request()

    def data_received(self, data: bytes) -> None:
        self._received = True
        if self.conn.their_state is h11.IDLE:
            self._expect_request()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_seconds, self._taken_too_slowly)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            if self.transport.get_write_buffer_size():
                self.loop.call_later(
                    self.limits.write_seconds, self.transport.abort
                )  # else it waits to be read for ever
        elif self.conn.their_state is h11.SEND_BODY:  # the next request came with the one before
            self._expect_request()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._taken_too_slowly()
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        self._stop_writing()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.limits.read_seconds, self._read_too_slowly)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _taken_too_slowly(self) -> None:
        self.limits.on_slow("response")
        self.transport.abort()

    def _read_too_slowly(self) -> None:
        self._reading = None
        if self.transport.is_closing():
            return
        if not self._received:  # opened in advance, as browsers do
            self.transport.close()
            return
        self.limits.on_slow("body" if self.conn.their_state is h11.SEND_BODY else "headers")
        if self.conn.our_state is h11.SEND_RESPONSE:  # a handler waits for the body, which will not come
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is on its way already
            self._tell_too_slow()
        else:
            self.transport.abort()

    def _tell_too_slow(self) -> None:
        error = {"message": MESSAGE, "type": "timeout_error", "param": None, "code": "request_too_slow"}
        body = json.dumps({"error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = (h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"), h11.Data(data=body))
        try:
            for event in (*events, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:  # a HEAD request takes no body
            pass
        self.transport.close()
