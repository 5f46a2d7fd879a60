"""A request in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .core import Request, RequestStats, TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from .recording import RouteRecorder
    from .verification.processing import LogitProcessor

OnEvent = Callable[[TokenEvent], None]


@dataclass(eq=False)
class Running:
    """An admitted request: first its prompt is computed, then it decodes. last_token is the root of its next step."""

    request: Request
    on_event: OnEvent
    sequence: Any
    draft_state: Any
    worst_case_pages: int
    last_token: int
    uniform: Callable[[int], float]
    stats: RequestStats
    tokens: list[int]  # prompt and output
    submitted: float  # time.monotonic()
    recorder: RouteRecorder | None = None  # None: nobody asked for the routes
    processor: LogitProcessor | None = None  # None: the target's logits stay as they are
    prompt_scores: list[TokenLogprob] | None = None  # None: nobody asked for them
    prefill_began: float | None = None
    decode_began: float | None = None
    prefilled: int = 0  # prompt tokens in the target's cache
    output_tokens: int = 0
    unfed: list[tuple[Any, np.ndarray]] = field(default_factory=list)  # features and next tokens that the drafter lacks

    @property
    def decodes(self) -> bool:
        return self.decode_began is not None

    @property
    def to_prefill(self) -> int:
        """Prompt tokens to compute still: all but the last, which is the root of the first step."""
        return len(self.request.prompt_tokens) - 1 - self.prefilled

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.output_tokens

    @property
    def unfed_rows(self) -> int:
        return sum(len(tokens) for _, tokens in self.unfed)
