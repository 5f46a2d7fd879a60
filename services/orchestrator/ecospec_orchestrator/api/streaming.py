"""Answers that notice at once when the client goes away: server-sent events, and waiting for a whole answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import body_of, status_of
from .generation import Generation
from .responses import Shape, usage_body
from .schemas import StreamOptions

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed its connection; nobody reads the answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client disconnects. Raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """text/event-stream of JSON objects: `data: {json}` and an empty line for each, `data: [DONE]` always last.

    A failure in mid-stream becomes one `data: {"error": ...}` before [DONE]. on_end runs however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._pump(send))
        except (ClientGoneError, OSError):
            log.info("A client left in mid-stream; its request is cancelled.")
        finally:
            self._on_end()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def line(data: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

        try:
            async for event in self._events:
                await line(json.dumps(event, ensure_ascii=False, separators=(",", ":")))
        except OSError:
            raise
        except Exception as error:
            if status_of(error) == 500:
                log.exception("A stream failed.")
            await line(json.dumps(body_of(error), separators=(",", ":")))
        await line("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_chunks(generation: Generation, shape: Shape, options: StreamOptions) -> AsyncIterator[dict[str, Any]]:
    """Chunks of one request in order. With include_usage every chunk has `usage`, null until the last one, unless
    continuous_usage_stats asks for the count so far in each."""

    def with_usage(chunk: dict[str, Any]) -> dict[str, Any]:
        if options.continuous_usage_stats:
            chunk["usage"] = usage_body(generation.choices)
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    opened: set[int] = set()
    async for update in generation.updates():
        first = update.choice not in opened
        opened.add(update.choice)
        if shape.chat and first:
            yield with_usage(shape.role_chunk(update.choice))
        if (
            update.text
            or update.calls
            or update.finish_reason
            or first
            or shape.alternatives is not None
            or shape.token_ids
        ):
            yield with_usage(shape.chunk(update, first))
    await generation.settle()
    if options.include_usage:
        yield shape.usage_chunk(generation.choices)
