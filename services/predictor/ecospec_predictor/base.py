"""The seam to the model. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ecospec_proto.geometry import TargetGeometry


@dataclass(eq=False)
class Session:
    """The decided text of one request. tokens: int64, its last max_context_tokens tokens, never changed in place; length: tokens
    that it was sent in all. Both belong to the event loop. state: what the model keeps from call to call; of the worker."""

    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    length: int = 0
    state: Any = None


@dataclass(frozen=True)
class Query:
    """One draft tree. context_tokens int64 [C], C >= 1, the root last; draft_tokens int64 [N]; parents int64 [N], an
    earlier node or -1 for the root. Checked before it comes here. With a session, context_tokens are the last tokens of its
    first `length` tokens, as many as a model can use, and the model may skip what session.state holds already."""

    context_tokens: np.ndarray
    draft_tokens: np.ndarray
    parents: np.ndarray
    session: Session | None = None
    length: int = 0


class ExpertModel(Protocol):
    geometry: TargetGeometry
    version: str
    max_context_tokens: int  # a longer context is of no use
    session_bytes: int  # memory of one session's state
    max_rows: int  # nodes and roots of one run; with more of them a row costs no less, and its answer comes later

    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """One array per query: uint8, or uint16 above 256 experts, [1 + N, layers, top_k]; row 0 is the root.

        Called from one thread only. Two queries of one session may come in one call; an answer depends on the session's
        text alone, whichever came before.
        """
        ...
