"""The seam that says which experts draft nodes will use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core import DraftTree, Footprints


@dataclass(frozen=True)
class TreeContext:
    """context_tokens: the tokens up to and including the root, oldest first (a tail is enough)."""

    context_tokens: Sequence[int]
    tree: DraftTree


class FootprintUnavailableError(Exception):
    """No prediction for this step. reason: "unavailable", "deadline", "mismatch" or "error" (a metric label)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class FootprintSource(Protocol):
    def predict(self, trees: Sequence[TreeContext]) -> list[Footprints]:
        """Called from the scheduler's thread; blocks at most until its deadline. Raises FootprintUnavailableError."""
        ...

    def close(self) -> None: ...
