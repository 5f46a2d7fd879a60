"""The seam that proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..core import DraftTree


class Drafter(Protocol):
    """state is the drafter's own per-request memory (for EAGLE-3 the head's KV cache)."""

    bytes_per_step: int  # weight bytes that one draft call reads

    def new_state(self) -> Any: ...

    def extend(self, states: Sequence[Any], features: Sequence[Any], next_tokens: Sequence[Any]) -> None:
        """Feed what the target has decided: features float32 [n, feature_size] of n committed positions and, for each, the
        token that follows it, int64 [n]. The last next token is the coming step's root."""
        ...

    def draft(self, states: Sequence[Any]) -> list[DraftTree]:
        """One tree per request, rooted at the last token fed. Deterministic: never depends on the target's draw."""
        ...
