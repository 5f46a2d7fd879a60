"""What EAGLE-3 and MTP have in common: a head with a KV cache of its own grows a tree, one draft forward per level."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core import ROOT, DraftTree
from ..engine.torch.cache import KvPool, SequenceCache
from ..engine.torch.modules import Segment


@dataclass
class HeadState:
    """One request's draft memory: the head's keys and values, and its hidden state at the last decided token."""

    cache: SequenceCache
    hidden: torch.Tensor | None = None  # float32 [hidden]; None before anything was fed


class TreeDrafter(ABC):
    """Implements Drafter for a head that turns (hidden state of position p, token p + 1) into its own hidden state there, which
    predicts token p + 2 and stands in for the target's hidden state of position p + 1.

    The pool of a tree is top_k + (depth - 1) * top_k^2 nodes (EAGLE-2's expansion); with top_k 1 it is a chain.
    pool: the head's KV cache.
    """

    def __init__(self, pool: KvPool, depth: int, top_k: int) -> None:
        self.kv_pool, self.device = pool, pool.keys.device
        self.max_levels, self.top_k = depth, top_k
        self.max_nodes = top_k + (depth - 1) * top_k**2

    @abstractmethod
    def bytes_read(self, levels: int, fed: bool) -> int: ...

    @abstractmethod
    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the target [n, feature_size] -> hidden states [n, hidden] that the head takes."""

    @abstractmethod
    def _layer(
        self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray, segments: list[Segment]
    ) -> torch.Tensor:
        """One forward of the head: tokens, positions int64 [T]; hidden [T, hidden] -> [T, hidden]."""

    @abstractmethod
    def _candidates(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """hidden: [rows, hidden] -> target ids int64 and conditional probabilities float32, both [rows, top_k]."""

    def new_state(self) -> HeadState:
        return HeadState(self.kv_pool.new_sequence())

    def release(self, state: HeadState) -> None:
        state.cache.release()

    def check_idle(self) -> str | None:
        return self.kv_pool.check_idle()

    @torch.inference_mode()
    def extend(
        self, states: Sequence[HeadState], features: Sequence[torch.Tensor], next_tokens: Sequence[np.ndarray]
    ) -> None:
        """features: float32 [n, feature_size] of committed positions; next_tokens: int64 [n], the token after each of them."""
        fed = [i for i, tokens in enumerate(next_tokens) if len(tokens)]
        if not fed:
            return
        fused = self._fuse(torch.cat([features[i] for i in fed]))
        segments, positions, start = [], [], 0
        for i in fed:
            n, cache = len(next_tokens[i]), states[i].cache
            cache.reserve(cache.length + n)
            segments.append(Segment(cache, start, start + n, None))
            positions.append(cache.length + np.arange(n))
            start += n
        hidden = self._layer(np.concatenate([next_tokens[i] for i in fed]), fused, np.concatenate(positions), segments)
        for i, segment in zip(fed, segments, strict=True):
            segment.cache.length += segment.stop - segment.start
            states[i].hidden = hidden[segment.stop - 1]

    def join(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(features))

    @torch.inference_mode()
    def draft(
        self, states: Sequence[HeadState], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(states)
        ready = [i for i, s in enumerate(states) if s.hidden is not None]
        if not ready:
            return trees
        growing = [_GrowingTree(states[i].cache) for i in ready]
        hidden = torch.stack([h for i in ready if (h := states[i].hidden) is not None])  # [requests, hidden]
        parents = [np.array([ROOT]) for _ in growing]
        for level in range(1, self.max_levels + 1):
            tokens, probabilities = self._candidates(hidden)
            start = 0
            for g, parent in zip(growing, parents, strict=True):
                rows = slice(start, start + len(parent))
                g.add(parent, tokens[rows], probabilities[rows], level)
                start += len(parent)
            for i, g in zip(ready, growing, strict=True):
                trees[i] = g.tree()
            if level == self.max_levels or another_level is not None and not another_level(list(trees), level):
                break
            parents = [g.best_of_level(level, self.top_k) for g in growing]
            hidden = self._expand(growing, parents, hidden, level)
        return trees

    def _expand(
        self, growing: Sequence[_GrowingTree], chosen: Sequence[np.ndarray], hidden: torch.Tensor, level: int
    ) -> torch.Tensor:
        """One draft forward over the chosen nodes of every tree; the hidden state of a node's parent stands in for features."""
        segments, tokens, positions, sources, start = [], [], [], [], 0
        row_of_hidden = 0
        for g, nodes in zip(growing, chosen, strict=True):
            visible = g.expand(nodes)
            cache = g.cache
            cache.reserve(cache.length + visible.shape[1])
            segments.append(Segment(cache, start, start + len(nodes), torch.from_numpy(visible)))
            tokens.append(np.array([g.tokens[n] for n in nodes]))
            positions.append(np.full(len(nodes), cache.length + level - 1))
            sources.append(row_of_hidden + g.source_rows(nodes))
            row_of_hidden += g.rows_of_last_level
            g.rows_of_last_level = len(nodes)
            start += len(nodes)
        source = hidden[torch.from_numpy(np.concatenate(sources)).to(self.device)]
        return self._layer(np.concatenate(tokens), source, np.concatenate(positions), segments)


class _GrowingTree:
    """A tree under construction. Rows are expanded nodes, in the order in which the head's cache holds them."""

    def __init__(self, cache: SequenceCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        self.depths: list[int] = []
        self.rows: list[int] = []  # expanded nodes
        self.level_parents: list[int] = []  # parent node of each hidden row of the last level
        self.rows_of_last_level = 1

    def add(self, parents: np.ndarray, tokens: np.ndarray, probabilities: np.ndarray, level: int) -> None:
        self.level_parents = parents.tolist()
        for parent, row_tokens, row_probabilities in zip(self.level_parents, tokens, probabilities, strict=True):
            above = 1.0 if parent == ROOT else self.probabilities[parent]
            for token, probability in zip(row_tokens.tolist(), row_probabilities.tolist(), strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.probabilities.append(above * probability)
                self.depths.append(level)

    def best_of_level(self, level: int, count: int) -> np.ndarray:
        nodes = [n for n, depth in enumerate(self.depths) if depth == level]
        best = sorted(nodes, key=lambda n: (-self.probabilities[n], n))[:count]
        return np.array(sorted(best))

    def source_rows(self, nodes: np.ndarray) -> np.ndarray:
        """Which hidden row of the last level stands for the parent of each node."""
        return np.array([self.level_parents.index(self.parents[n]) for n in nodes])

    def expand(self, nodes: np.ndarray) -> np.ndarray:
        """Note that nodes are run through the head; returns visible bool [nodes, all rows so far and these]."""
        self.rows += nodes.tolist()
        visible = np.zeros((len(nodes), len(self.rows)), bool)
        for i, node in enumerate(nodes.tolist()):
            while node != ROOT:
                visible[i, self.rows.index(node)] = True
                node = self.parents[node]
        return visible

    def tree(self) -> DraftTree:
        return DraftTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            np.array(self.probabilities, np.float32),
            np.array(self.depths, np.int32),
        )
