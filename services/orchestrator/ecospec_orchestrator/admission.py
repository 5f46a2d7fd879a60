"""What a request may come to need of the KV cache, so that one that was admitted never has to be sent away."""

from __future__ import annotations

from collections.abc import Sequence

from .core import Request


def worst_case_pages(request: Request, max_nodes: int, page_tokens: int) -> int:
    """Pages that the request holds at most, in the target's cache and as many in the drafter's: all its tokens but the last,
    then the root and max_nodes rows of a step's tree. Pages shared with others count in full for each."""
    positions = len(request.prompt_tokens) + request.max_tokens - 1 + max_nodes
    return -(-positions // page_tokens)


def fits(worst_case: int, running: Sequence[int], pages: int) -> bool:
    """May a request of this worst case start beside running ones of these, in a cache of so many pages? Pages that are only
    kept for their prefix give way, so they are not counted."""
    return worst_case + sum(running) <= pages
