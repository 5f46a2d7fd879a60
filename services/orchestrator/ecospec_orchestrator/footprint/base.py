"""The seam that says which experts draft nodes will use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..core import DraftTree, Footprints


@dataclass(frozen=True)
class TreeContext:
    """context_tokens: all decided tokens up to and including the root, oldest first; the request's own list, which grows
    when the step ends. sequence: the engine's handle of the request, for a source that asks the engine itself. request_id:
    whose text it is, for a source that keeps the context from step to step; a text without one is asked about once."""

    context_tokens: Sequence[int]
    tree: DraftTree
    sequence: Any = None
    request_id: str = ""


class FootprintUnavailableError(Exception):
    """No prediction for this step. reason: "unavailable", "deadline", "mismatch" or "error" (a metric label)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FootprintSource(Protocol):
    def begin(self, trees: Sequence[TreeContext]) -> Callable[[], list[Footprints]]:
        """Ask, and return a function that waits for the answer, at most until the source's deadline; call it once.

        Both are called from the scheduler's thread and raise FootprintUnavailableError. One question at a time.
        """
        ...

    def end(self, request_id: str) -> None:
        """The request has ended: nothing is asked about it any more. Must not block; unknown ones are fine."""
        return None

    def close(self) -> None: ...
