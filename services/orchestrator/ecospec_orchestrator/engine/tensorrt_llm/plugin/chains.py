"""How long to draft where drafts are chains (MTP, EAGLE-3 top-1): goodput's answer, as the engine's own draft_len_schedule.

The engine looks up the length by the number of requests in each step, and captures one CUDA graph per batch size, with the length that
the schedule gives that size when the engine starts. So the schedule is made at start, from measured costs and acceptance, and stays:
another length later would run in the graph of another batch size, padded with rows that are routed like any other.

A length of 0 is worse than its own steps: the engine's drafter then misses tokens (its cache, its hidden states), and accepts less for
as long as those requests go on. Later versions therefore never go below 1, and a schedule should not either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Seconds = Callable[[int, int], float]  # (requests, drafts per request) -> seconds of a whole step, drafting included


def conditional_acceptance(accepted: Sequence[int]) -> list[float]:
    """From requests by accepted drafts (0, 1, ... of the most that were drafted): the share of drafts at place 1, 2, ... that was
    accepted where everything before it was. 0 where nothing was seen."""
    reached = [sum(accepted[place:]) for place in range(len(accepted))]
    return [after / before if before else 0.0 for before, after in zip(reached, reached[1:], strict=False)]


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """Per request and step, the one token that a step always decides included; drafts beyond len(acceptance) never hold."""
    total, path = 1.0, 1.0
    for chance in acceptance[:length]:
        path *= chance
        total += path
    return total


def best_length(requests: int, acceptance: Sequence[float], seconds: Seconds, longest: int, shortest: int = 0) -> int:
    """The length from shortest to longest of most tokens per second; of equal ones the shortest. Raises ValueError for a step that
    costs nothing."""
    best, best_rate = shortest, 0.0
    for length in range(shortest, longest + 1):
        cost = seconds(requests, length)
        if not cost > 0:
            raise ValueError(
                f"a step of {requests} requests and {length} drafts costs {cost} s; more than 0 is needed."
            )
        rate = requests * expected_tokens(acceptance, length) / cost
        if rate > best_rate:
            best, best_rate = length, rate
    return best


def best_lengths(
    most_requests: int, acceptance: Sequence[float], seconds: Seconds, longest: int, shortest: int = 0
) -> list[int]:
    """For 1, 2, ... most_requests. Never longer than for fewer requests, which the engine's schedules cannot say: where costs make it
    so, the shorter length of the smaller batch is kept."""
    lengths: list[int] = []
    for requests in range(1, most_requests + 1):
        length = best_length(requests, acceptance, seconds, longest, shortest)
        lengths.append(min(length, lengths[-1]) if lengths else length)
    return lengths


def schedule(lengths: Sequence[int]) -> dict[int, int]:
    """lengths: for 1, 2, ... requests, none longer than the one before it -> draft_len_schedule.

    A length holds for batches up to its key, and beyond the largest key nothing is drafted (versions before 1.3 read the keys the
    other way). The engine wants the length of the smallest key to be max_draft_len, which is lengths[0]; where that is 0, speculation
    is to be switched off instead. Raises ValueError.
    """
    if not lengths or lengths[0] < 1 or any(b > a or b < 0 for a, b in zip(lengths, lengths[1:], strict=False)):
        raise ValueError(
            f"the draft lengths by batch size are {list(lengths)[:16]}; they must start with at least 1 and never grow."
        )
    return {at: length for at, length in enumerate(lengths, 1) if at == len(lengths) or lengths[at] != length}
