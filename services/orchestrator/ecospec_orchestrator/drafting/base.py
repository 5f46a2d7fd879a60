"""The seam that proposes tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..core import DraftTree


class Drafter(Protocol):
    """state is the drafter's own per-request memory (for EAGLE-3 the head's KV cache)."""

    max_levels: int  # draft forwards of a full draft call
    max_nodes: int  # of the largest tree that draft() returns; no more rows than that lie behind a state's decided ones

    def bytes_read(self, levels: int, fed: bool) -> int:
        """Weight bytes that a step reads which drafts `levels` levels (0: none), after feeding or not."""
        ...

    def new_state(self) -> Any: ...

    def release(self, state: Any) -> None:
        """Give back what the state holds; it is not used again."""
        ...

    def check_idle(self) -> str | None:
        """No state is in use. Returns what is wrong with the drafter's own cache, in numbers, after emptying it; None when all
        is well or there is none."""
        ...

    def extend(self, states: Sequence[Any], features: Sequence[Any], next_tokens: Sequence[Any]) -> None:
        """Feed what the target has decided: features float32 [n, feature_size] of n committed positions and, for each, the
        token that follows it, int64 [n]. The last next token is the coming step's root."""
        ...

    def join(self, features: Sequence[Any]) -> Any:
        """Features of consecutive positions as one: [n1, feature_size], [n2, feature_size], ... -> [n1 + n2 + ..., feature_size]."""
        ...

    def draft(
        self, states: Sequence[Any], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        """One tree per request, rooted at the last token fed, level after level. Deterministic: never depends on the
        target's draw. another_level(trees so far, levels so far) is asked after every level but the last; False ends it.
        """
        ...
