"""The routes of one request, for a trace: the experts that every row of it really used, rejected drafts included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_document import TraceDocument, TraceError, row_bytes
from ecospec_proto.trace_rows import TraceRows

from .core import InvalidRequestError, Request
from .engine.base import Verified, VerifyItem
from .running import Running
from .verification.accept import Acceptance

MAX_BYTES = 128 << 20  # of one request's rows


def check_recordable(request: Request, max_nodes: int, geometry: TargetGeometry) -> None:
    """Raises InvalidRequestError for a request whose rows could take more than MAX_BYTES: its prompt, and for every output
    token a root and max_nodes drafts."""
    try:
        per_row = row_bytes(geometry)
    except TraceError as error:
        raise InvalidRequestError(
            f"return_routed_experts is true, which cannot be: {error}", "return_routed_experts"
        ) from None
    prompt = len(request.prompt_tokens)
    needed = (prompt + request.max_tokens * (1 + max_nodes)) * per_row
    if needed > MAX_BYTES:
        most = max(0, MAX_BYTES // per_row - prompt) // (1 + max_nodes)
        raise InvalidRequestError(
            f"return_routed_experts is true and max_tokens is {request.max_tokens}, whose routes may take {needed} bytes; at most "
            f"{MAX_BYTES} are allowed: lower max_tokens to {most} or less.",
            "return_routed_experts",
        )


def record_step(
    batch: Sequence[Running],
    items: Sequence[VerifyItem],
    verified: Sequence[Verified],
    accepted: Sequence[Acceptance],
) -> None:
    """Keep what the step told of those requests that asked for their routes."""
    for r, item, v, a in zip(batch, items, verified, accepted, strict=True):
        if r.recorder is not None:
            r.recorder.verified(item, v.experts, a)


def accepted_rows(item: VerifyItem, acceptance: Acceptance) -> tuple[np.ndarray, bool]:
    """(bool [1 + n], what the target chose among the rows of a step; whether a drafted stop token ended the walk, which is not
    kept, and yet it is what the target chose)."""
    accepted = np.zeros(len(item.tokens), np.bool_)
    accepted[acceptance.rows] = True
    stop = np.flatnonzero((item.parents == acceptance.rows[-1]) & (item.tokens == acceptance.tokens[-1]))
    accepted[stop[:1]] = True
    return accepted, len(stop) > 0


class RouteRecorder:
    """Gathers the rows of one request, in the order in which they are computed."""

    def __init__(self, geometry: TargetGeometry) -> None:
        self._rows = TraceRows(geometry.moe_layers, geometry.top_k)
        self._next: int | None = None  # decided, but not computed yet

    def prefilled(self, tokens: np.ndarray, experts: np.ndarray) -> None:
        """The next part of the prompt. tokens int64 [n]; experts as in Verified."""
        self._rows.add_chain(tokens, experts)

    def verified(self, item: VerifyItem, experts: np.ndarray, acceptance: Acceptance) -> None:
        """All rows of a step, the root first."""
        accepted, ended = accepted_rows(item, acceptance)
        self._next = None if ended else int(acceptance.tokens[-1])
        self._rows.add_tree(item.tokens, item.parents, accepted, experts)

    def document(self, request_id: str) -> TraceDocument:
        """Everything so far, and the last token of the output, whose experts nobody knows."""
        if self._next is not None:
            self._rows.add_chain(np.array([self._next]))
            self._next = None
        return self._rows.document(request_id)
