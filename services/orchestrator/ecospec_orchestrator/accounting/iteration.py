"""What an engine that batches by itself tells of one iteration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IterationReport:
    """A StepReport without what such an engine keeps to itself: which request accepted what, experts, bytes and phases.

    generating: requests that decoded; prompt_tokens: computed of prompts beside them; drafting: of the generating, those with draft
    tokens.
    """

    seconds: float
    generating: int
    prompt_tokens: int
    drafting: int
    draft_tokens: int
    accepted_tokens: int
