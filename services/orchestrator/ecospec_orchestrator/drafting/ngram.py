"""Drafting without a model: what followed the last few tokens when they came before, in the request's own text.

Source: prompt look-up decoding, as known from public serving engines. Nothing is read but the request's tokens, so it costs
next to nothing and serves targets for which nobody has trained a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core import ROOT, DraftTree, SettingsError


@dataclass
class NgramState:
    """tokens: all that were fed. The first token of a prompt never is (drafters get the token *after* each position), which
    costs at most one match. followers: for every n-gram that has a follower, the places of its latest distinct followers, the latest
    last."""

    tokens: list[int] = field(default_factory=list)
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NgramDrafter:
    """Implements Drafter. The longest suffix of the text, of max_n down to min_n tokens, that came before decides; each of its
    latest `branches` distinct followers starts a chain of up to `depth` tokens, read from that place on (and on into the chain itself
    where the text repeats with a shorter period).

    Probabilities are guesses from the length of the match, to be calibrated by the policy: with a match of n tokens the next
    token is as before with n / (n + 1), and each token that comes true makes the match longer, so level l of a single chain has
    n / (n + l). Branches share the first level, each earlier one half of the next.
    """

    def __init__(self, depth: int, branches: int = 1, max_n: int = 4, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n or min(depth, branches) < 1:
            raise SettingsError(
                f"the n-gram drafter has min_n {min_n}, max_n {max_n}, depth {depth} and branches {branches}; all are at least 1, "
                "and min_n is not above max_n."
            )
        self.max_levels, self.branches, self.max_n, self.min_n = depth, branches, max_n, min_n
        self.max_nodes = depth * branches

    @property
    def top_k(self) -> int:
        return self.branches

    def bytes_read(self, levels: int, fed: bool) -> int:
        return 0

    def new_state(self) -> NgramState:
        return NgramState()

    def release(self, state: NgramState) -> None:
        state.tokens, state.followers = [], {}

    def check_idle(self) -> None:
        return None

    def extend(self, states: Sequence[NgramState], features: Sequence[Any], next_tokens: Sequence[np.ndarray]) -> None:
        """features are not looked at and may be anything."""
        for state, new in zip(states, next_tokens, strict=True):
            for token in new.tolist():
                self._append(state, token)

    def _append(self, state: NgramState, token: int) -> None:
        tokens = state.tokens
        for n in range(self.min_n, min(self.max_n, len(tokens)) + 1):
            places = state.followers.setdefault(tuple(tokens[-n:]), [])
            places[:] = [p for p in places if tokens[p] != token][-self.branches + 1 :] if self.branches > 1 else []
            places.append(len(tokens))
        tokens.append(token)

    def join(self, features: Sequence[Any]) -> np.ndarray:
        """Features nobody looks at, of as many positions."""
        return np.empty((sum(len(f) for f in features), 0), np.float32)

    def draft(
        self, states: Sequence[NgramState], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        whole = [self._whole(state) for state in states]
        deepest = max((int(t.depths.max()) for t in whole if len(t)), default=0)
        for level in range(1, deepest):
            trees = [_to_depth(tree, level) for tree in whole]
            if another_level is not None and not another_level(trees, level):
                return trees
        return whole

    def _whole(self, state: NgramState) -> DraftTree:
        """All levels, level by level, the chains side by side."""
        n, places = self._match(state)
        if not places:
            return DraftTree.empty()
        chains = [self._chain(state.tokens, place) for place in reversed(places)]
        count = len(chains)
        share = 0.5 ** np.arange(count)
        levels = np.arange(1, self.max_levels + 1)
        probabilities = share / share.sum() * (n / (n + levels))[:, None]  # [levels, chains]
        parents = np.arange(self.max_levels * count, dtype=np.int32) - count
        return DraftTree(
            np.array(chains, np.int32).T.reshape(-1),
            np.where(parents < 0, ROOT, parents).astype(np.int32),
            probabilities.astype(np.float32).reshape(-1),
            np.repeat(levels, count).astype(np.int32),
        )

    def _match(self, state: NgramState) -> tuple[int, list[int]]:
        for n in range(min(self.max_n, len(state.tokens)), self.min_n - 1, -1):
            places = state.followers.get(tuple(state.tokens[-n:]))
            if places:
                return n, places
        return 0, []

    def _chain(self, tokens: list[int], place: int) -> list[int]:
        chain: list[int] = []
        for at in range(place, place + self.max_levels):
            chain.append(tokens[at] if at < len(tokens) else chain[at - len(tokens)])
        return chain


def _to_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Levels lie one behind the other, so the first ones are a prefix."""
    n = int(np.count_nonzero(tree.depths <= depth))
    return DraftTree(tree.tokens[:n], tree.parents[:n], tree.probabilities[:n], tree.depths[:n])
