"""Which requests are taken: what one may ask for, how many may wait, and what one may come to need of the KV cache, so that one that
was admitted never has to be sent away."""

from __future__ import annotations

from collections.abc import Sequence

from .core import InvalidRequestError, QueueFullError, Request


def check_request(request: Request, max_context_tokens: int, vocab_size: int) -> None:
    """Raises InvalidRequestError."""
    length = len(request.prompt_tokens)
    if length == 0:
        raise InvalidRequestError("prompt is empty; at least one token is needed.", "prompt")
    if length + request.max_tokens > max_context_tokens:
        raise InvalidRequestError(
            f"the prompt has {length} tokens and max_tokens is {request.max_tokens}, together "
            f"{length + request.max_tokens}; at most {max_context_tokens} are allowed: shorten one of them.",
            "prompt" if length >= max_context_tokens else "max_tokens",
        )
    bad = next((t for t in request.prompt_tokens if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(f"prompt holds token id {bad}; ids from 0 to {vocab_size - 1} are allowed.", "prompt")
    bad = next((t for t, _ in request.sampling.logit_bias if not 0 <= t < vocab_size), None)
    if bad is not None:
        raise InvalidRequestError(
            f"logit_bias holds token id {bad}; ids from 0 to {vocab_size - 1} are allowed.", "logit_bias"
        )


def check_policy(request: Request, allowed: Sequence[str]) -> None:
    """Raises InvalidRequestError for a wish that this server cannot grant."""
    if request.policy is not None and request.policy not in allowed:
        raise InvalidRequestError(
            f"Field 'ecospec.policy' is '{request.policy}', which this server cannot offer; allowed: {', '.join(dict.fromkeys(allowed))}.",
            "ecospec.policy",
        )


def check_queue(running: int, waiting: int, max_running: int, max_waiting: int) -> None:
    """May one more come? Raises QueueFullError."""
    if waiting >= max_waiting + max(0, max_running - running):
        raise QueueFullError(
            f"{waiting} requests are waiting and {max_waiting} may; try again later.",
            retry_after_seconds=1 + waiting // max_running,
        )


def worst_case_pages(request: Request, max_nodes: int, page_tokens: int) -> int:
    """Pages that the request holds at most, in the target's cache and as many in the drafter's: all its tokens but the last,
    then the root and max_nodes rows of a step's tree. Pages shared with others count in full for each."""
    positions = len(request.prompt_tokens) + request.max_tokens - 1 + max_nodes
    return -(-positions // page_tokens)


def fits(worst_case: int, running: Sequence[int], pages: int) -> bool:
    """May a request of this worst case start beside running ones of these, in a cache of so many pages? Pages that are only
    kept for their prefix give way, so they are not counted."""
    return worst_case + sum(running) <= pages
