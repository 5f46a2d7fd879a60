"""The seam to the target model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ecospec_proto.geometry import TargetGeometry


@dataclass(frozen=True)
class StepBytes:
    """Fixed byte sizes of the target, as stored: what one forward reads."""

    per_expert: int
    attention: int
    shared: int  # shared experts, dense layers, routers, norms
    head: int
    kv_per_token: int


@dataclass(frozen=True)
class VerifyItem:
    """sequence: an engine handle; tokens int64 [1 + n], the root first; parents int64 [1 + n], index into tokens, -1 for
    the root."""

    sequence: Any
    tokens: np.ndarray
    parents: np.ndarray


@dataclass(frozen=True)
class Verified:
    """logits float32 [1 + n, vocabulary] (numpy); features: engine tensor [1 + n, feature_size]; experts: uint8 or uint16
    [1 + n, layers, top_k], what every row really routed to."""

    logits: np.ndarray
    features: Any
    experts: np.ndarray


@dataclass(frozen=True)
class CacheUse:
    """The KV cache in pages of page_tokens tokens. used: held by sequences; kept: only held because a later prompt may begin
    with the same tokens, and given up when a page is needed; the others are free."""

    page_tokens: int
    pages: int
    used: int
    kept: int

    @property
    def free(self) -> int:
        return self.pages - self.used - self.kept


class Engine(Protocol):
    geometry: TargetGeometry
    step_bytes: StepBytes
    max_context_tokens: int

    def enter_thread(self) -> None:
        """Called once by the thread that will run every later call, for thread-local settings."""
        ...

    def new_sequence(self) -> Any: ...

    def release(self, sequence: Any) -> None:
        """Give back what the sequence holds of the KV cache; it is not used again."""
        ...

    def cache_use(self) -> CacheUse: ...

    def check_idle(self) -> str | None:
        """No sequence is in use, so every page must be free or kept. Returns what is wrong, in numbers, after starting with
        an empty cache; None when all is well."""
        ...

    def reuse(self, sequence: Any, tokens: np.ndarray) -> list[Any]:
        """Begin an empty sequence with what the cache already holds of tokens int64 [n]; returns the features of these
        positions in order, as parts [m, feature_size], none when nothing can be reused."""
        ...

    def prefill(self, sequence: Any, tokens: np.ndarray) -> Any:
        """Append tokens int64 [n] to the cache; returns features [n, feature_size] of these positions."""
        ...

    def prefill_with_experts(self, sequence: Any, tokens: np.ndarray) -> tuple[Any, np.ndarray]:
        """prefill() for a trace: the features and, like Verified.experts, uint8 or uint16 [n, layers, top_k]."""
        ...

    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        """One packed, tree-masked forward over all items. The rows stay uncommitted until commit()."""
        ...

    def commit(self, sequence: Any, rows: np.ndarray) -> None:
        """Keep the given rows (ascending, root first) of the sequence's last verify and drop the others."""
        ...
