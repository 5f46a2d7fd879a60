"""A grammar over token ids that is easy to check by hand: it must know every token of the path, and only those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def allowed_after(path: Sequence[int], vocabulary: int, ends: Sequence[int], ends_after: int) -> np.ndarray:
    """A token may come where it differs from the last three of the path and the sum stays off the multiples of three; the ends
    from ends_after tokens on."""
    allowed = np.array(
        [token not in list(path[-3:]) and (sum(path) + token) % 3 != 0 for token in range(vocabulary)], np.bool_
    )
    allowed[list(ends)] = len(path) >= ends_after
    if not allowed.any():
        allowed[0] = True
    return allowed


class ToyState:
    def __init__(self, grammar: ToyGrammar) -> None:
        self._grammar, self.path = grammar, list[int]()
        self.error: str | None = None

    def allowed(self) -> np.ndarray:
        g = self._grammar
        if self.error is not None:
            return np.ones(g.vocabulary, np.bool_)
        return allowed_after(self.path, g.vocabulary, g.ends, g.ends_after)

    def advance(self, token: int) -> None:
        if self.error is None:
            assert self.allowed()[token], "advanced by a token that was not allowed"
            assert token not in self._grammar.ends, "advanced by a token that ends the text"
            self.path.append(token)
            if len(self.path) == self._grammar.fails_after:
                self.error = "the toy grammar broke."


class ToyGrammar:
    """Implements Grammar. fails_after: this many tokens bring it into its error state."""

    def __init__(
        self, vocabulary: int, ends: Sequence[int] = (), ends_after: int = 0, fails_after: int | None = None
    ) -> None:
        self.vocabulary, self.ends, self.ends_after, self.fails_after = vocabulary, tuple(ends), ends_after, fails_after
        self.started: list[ToyState] = []

    def start(self) -> ToyState:
        self.started.append(ToyState(self))
        return self.started[-1]
