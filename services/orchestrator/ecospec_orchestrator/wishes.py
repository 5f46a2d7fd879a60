"""Which policy decides a step whose requests may wish for one of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .selection.base import SelectionPolicy

PLAIN = "none"  # nothing is drafted for such a request, whoever decides


def policy_of_step(
    wishes: Sequence[str | None], own: SelectionPolicy, others: Mapping[str, SelectionPolicy]
) -> SelectionPolicy:
    """Plain decoding is granted to each request for itself, so it leaves the policy to the rest. Another wish counts in a step whose
    other requests all share it: one policy sees the whole batch and its one union of experts, and nobody's wish slows others.

    wishes: one per request of the step, None: the server's own policy; others: by name, without the server's own.
    """
    drafting = {wish for wish in wishes if wish != PLAIN} or {PLAIN}
    (wish, *more) = drafting
    return own if more or wish is None else others.get(wish, own)
