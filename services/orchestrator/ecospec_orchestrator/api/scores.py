"""How many log-probabilities one request may bring: each is an object in memory, and text in the answer."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import InvalidRequestError
from .schemas import ChatRequest, CompletionRequest

MAX_SCORES = 2**20  # some hundred bytes each


def check_scores(
    request: CompletionRequest | ChatRequest, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
) -> None:
    """prompts, max_tokens: one entry per prompt, each with request.n answers, of which each scores its prompt by itself. Raises
    InvalidRequestError."""
    answers, asked = request.alternatives, request.prompt_alternatives
    scores = _per_token(answers) * sum(max_tokens) + _per_token(asked) * sum(map(len, prompts))
    if request.n * scores > MAX_SCORES:
        field = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
        raise InvalidRequestError(
            f"Field '{field}' lets this request bring up to {request.n * scores} log-probabilities; at most {MAX_SCORES} are allowed: "
            "ask for fewer alternatives, fewer choices, or a lower max_tokens.",
            field,
        )


def _per_token(alternatives: int | None) -> int:
    return 0 if alternatives is None else 1 + alternatives
