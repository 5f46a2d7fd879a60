"""The seam between HTTP and the step loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..core import Request, TokenEvent


class SchedulerLike(Protocol):
    """A running step loop. Every method may be called from any thread."""

    @property
    def running(self) -> int:
        """Requests in the current batch."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def alive(self) -> bool:
        """False when the step loop has not started, has stopped or has crashed."""
        ...

    def start(self) -> None: ...

    def submit(self, request: Request, on_event: Callable[[TokenEvent], None]) -> None:
        """Queue a request. on_event is called from the scheduler's thread and must return at once.

        Raises QueueFullError, InvalidRequestError, ShuttingDownError.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request early; unknown and finished ids are ignored. A request that was alive gets one last event with
        finish_reason "abort" and its stats."""
        ...

    def stop(self) -> None:
        """End the step loop; requests that are alive get a last event with finish_reason "abort"."""
        ...
