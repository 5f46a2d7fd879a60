"""Lossless acceptance over a draft tree: the target decides every token, the draft only says where to look next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from ..core import SamplingParams
from .processing import LogitProcessor
from .sampling import draw, greedy, target_distribution


@dataclass(frozen=True)
class Acceptance:
    """rows: int64 [m], the rows to keep, ascending, row 0 (the root) first; tokens: int64 [m], what is emitted.

    tokens[i] came from the logits of rows[i]. All but the last are the accepted drafts (the tokens of rows[1:]); the
    last is the bonus token, or the stop token that ended the walk.

    mass: float64 [1 + n], what the walk saw of every row, kept or not: the probability that the target gives the row's
    token after the row's parent (processor, temperature and filters included; 1 or 0 at temperature 0). NaN where the walk
    did not reach the parent, and for row 0. For one parent the distinct tokens' masses sum to at most 1.
    """

    rows: np.ndarray
    tokens: np.ndarray
    mass: np.ndarray

    @property
    def accepted(self) -> int:
        """Draft tokens accepted, the root not counted."""
        return len(self.rows) - 1


def accept(
    logits: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    sampling: SamplingParams,
    uniform: Callable[[int], float],
    first_position: int,
    stop: Collection[int] = frozenset(),
    processor: LogitProcessor | None = None,
) -> Acceptance:
    """Walk down the verified tree with the target's own choices (target-only verification).

    logits float32 [1 + n, vocabulary], row r given the path root..r; tokens int [1 + n], row 0 the root; parents int
    [1 + n], -1 for row 0, else an earlier row. uniform(position) gives the one number in [0, 1) that output position
    uses, so the draws, and with them the text, do not depend on what was drafted; first_position is the output position
    of the first emitted token. A token in stop ends the walk and is the last one emitted. Of siblings with equal tokens
    only the lowest row is followed. processor makes of each row's logits what the token is chosen by, and is advanced by
    every emitted token but a stop token: it sees the path and nothing of what was rejected.

    Why it is lossless: at every row the emitted token is drawn from the target's distribution before the draft is
    looked at; a draft that matches only tells that the next row's logits are already there.
    Raises ValueError for arrays that do not fit together or logits without a finite maximum.
    """
    nodes = len(tokens)
    if nodes < 1 or len(logits) != nodes or len(parents) != nodes:
        raise ValueError(
            f"{len(logits)} logit rows, {nodes} tokens and {len(parents)} parents; equal numbers from 1 are needed."
        )
    if parents[0] != -1:
        raise ValueError(f"row 0 has parent {parents[0]}; it must be the root, with parent -1.")
    children: dict[tuple[int, int], int] = {}
    for row in range(nodes - 1, 0, -1):  # backwards: of equal siblings the lowest row stays
        parent = int(parents[row])
        if not 0 <= parent < row:
            raise ValueError(f"row {row} has parent {parent}; it must be an earlier row, 0 to {row - 1}.")
        children[parent, int(tokens[row])] = row

    row = 0
    rows = [0]
    emitted: list[int] = []
    mass = np.full(nodes, np.nan)
    while True:
        # The target's token here: greedy argmax, or one draw from its processed distribution.
        below = np.flatnonzero(parents == row)
        processed = logits[row] if processor is None else processor(logits[row])
        if sampling.temperature == 0:
            token = greedy(processed)
            mass[below] = tokens[below] == token
        else:
            distribution = target_distribution(processed, sampling)
            token = draw(distribution, uniform(first_position + len(emitted)))
            mass[below] = distribution[tokens[below]]
        emitted.append(token)
        # A stop token ends the text: nothing behind it is kept.
        if token in stop:
            break
        if processor is not None:
            processor.advance(token)
        # Drafted: accept the child and go on with its logits.
        child = children.get((row, token))
        if child is not None:
            rows.append(child)
            row = child
            continue
        # Not drafted: the target's token is the bonus token, and the step ends.
        break
    return Acceptance(np.array(rows, np.int64), np.array(emitted, np.int64), mass)
