"""A small, exact target with its drafter and its experts: a Markov chain whose logits depend on the last two tokens.

The pages of its KV cache are real ones, of the torch engine's own pool: the key of a position is its token, so that
a page that is shared, moved or given away wrongly shows at the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ecospec_orchestrator.core import DraftTree, Footprints
from ecospec_orchestrator.engine.base import CacheUse, StepBytes, Verified, VerifyItem
from ecospec_orchestrator.engine.torch.cache import KvPool, SequenceCache
from ecospec_orchestrator.engine.torch.geometry import KvLayout
from ecospec_orchestrator.footprint.base import FootprintSource, FootprintUnavailableError, TreeContext
from ecospec_proto.codec import pack_bitsets
from ecospec_proto.geometry import TargetGeometry

VOCABULARY, LAYERS, EXPERTS, TOP_K = 23, 3, 16, 2
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY, VOCABULARY)).astype(np.float32) * 2


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The chain's own continuation."""
    tokens = [0, *prompt]
    for _ in range(count):
        tokens.append(int(LOGITS[tokens[-2], tokens[-1]].argmax()))
    return tokens[len(prompt) + 1 :]


def experts_of(token: int) -> np.ndarray:
    return np.array(
        [[(token * 3 + layer) % EXPERTS, (token * 5 + layer + 1) % EXPERTS] for layer in range(LAYERS)], np.uint8
    )


class Tokens(list[int]):
    """What is committed of a sequence, and its pages."""

    def __init__(self, cache: SequenceCache) -> None:
        super().__init__()
        self.cache = cache

    def write(self, tokens: np.ndarray) -> None:
        """Behind what is committed."""
        self.cache.reserve(self.cache.length + len(tokens))
        page, offset = self.cache.slots(self.cache.length, self.cache.length + len(tokens))
        self.cache.pool.keys[0, page, 0, offset, 0] = torch.from_numpy(tokens).float()

    def check(self) -> None:
        keys, _ = self.cache.gather(0, self.cache.length)
        assert keys[0, :, 0].tolist() == list(self), "the cache holds other tokens than were committed"


class ChainEngine:
    """fail: the next verification raises; gate: verifications wait for it; prefills: tokens of each prefill so far."""

    geometry = TargetGeometry("chain", "test", VOCABULARY, 4, LAYERS, EXPERTS, TOP_K)
    step_bytes = StepBytes(per_expert=10, attention=100, shared=200, head=300, kv_per_token=1)
    max_context_tokens = 64

    def __init__(self, pages: int = 64, prefix_reuse: bool = True) -> None:
        self.pool = KvPool(KvLayout(1, 1, 1, 1), pages, prefix_reuse=prefix_reuse)
        self.fail = False
        self.gate: threading.Event | None = None
        self.prefills: list[int] = []
        self.parents: dict[int, np.ndarray] = {}

    def enter_thread(self) -> None: ...

    def new_sequence(self) -> Tokens:
        return Tokens(self.pool.new_sequence())

    def release(self, sequence: Tokens) -> None:
        sequence.cache.release()

    def cache_use(self) -> CacheUse:
        return self.pool.use()

    def check_idle(self) -> str | None:
        return self.pool.check_idle()

    def reuse(self, sequence: Tokens, tokens: np.ndarray) -> list[np.ndarray]:
        parts = [part.numpy() for part in sequence.cache.reuse(tokens)]
        sequence += tokens[: sequence.cache.length].tolist()
        sequence.check()
        assert [int(f) for part in parts for f in part[:, 0]] == list(sequence)
        return parts

    def prefill(self, sequence: Tokens, tokens: np.ndarray) -> np.ndarray:
        self.prefills.append(len(tokens))
        sequence.write(tokens)
        sequence.cache.append(tokens, torch.from_numpy(tokens[:, None]))
        sequence += tokens.tolist()
        return tokens[:, None]

    def prefill_with_experts(self, sequence: Tokens, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.prefill(sequence, tokens), np.stack([experts_of(int(t)) for t in tokens])

    def verify(self, items: Sequence[VerifyItem]) -> list[Verified]:
        if self.gate is not None:
            self.gate.wait(10)
        if self.fail:
            raise RuntimeError("out of memory")
        return [self._verify(item) for item in items]

    def _verify(self, item: VerifyItem) -> Verified:
        item.sequence.check()
        before = item.sequence[-1] if item.sequence else 0
        last_two = [
            (before if parent < 0 else int(item.tokens[parent]), int(token))
            for token, parent in zip(item.tokens, item.parents, strict=True)
        ]
        item.sequence.write(item.tokens)
        item.sequence.cache.pend(item.tokens, torch.from_numpy(item.tokens[:, None]))
        self.parents[id(item.sequence)] = item.parents
        return Verified(
            np.stack([self.logits(*pair) for pair in last_two]),
            np.array(item.tokens)[:, None],
            np.stack([experts_of(int(t)) for t in item.tokens]),
        )

    def logits(self, before: int, token: int) -> np.ndarray:
        return LOGITS[before, token]

    def commit(self, sequence: Tokens, rows: np.ndarray) -> None:
        parents = self.parents.pop(id(sequence))
        assert rows[0] == 0 and all(parents[b] == a for a, b in zip(rows, rows[1:], strict=False)), (
            "not a path from the root"
        )
        before = sequence.cache.length
        sequence.cache.commit(rows)
        keys, _ = sequence.cache.gather(0, sequence.cache.length)
        sequence += [int(k) for k in keys[0, before:, 0]]


class ChainDrafter:
    """Knows the last token only, so that it is right sometimes."""

    max_levels, top_k, max_nodes = 3, 2, 10

    def __init__(self, pages: int = 64) -> None:
        self.pool = KvPool(KvLayout(1, 1, 1, 1), pages)

    def bytes_read(self, levels: int, fed: bool) -> int:
        return 7 * levels + fed

    def join(self, features: Sequence[Any]) -> Any:
        return np.concatenate(features)

    def new_state(self) -> Tokens:
        return Tokens(self.pool.new_sequence())

    def release(self, state: Tokens) -> None:
        state.cache.release()

    def check_idle(self) -> str | None:
        return self.pool.check_idle()

    def extend(self, states: Sequence[Tokens], features: Sequence[Any], next_tokens: Sequence[Any]) -> None:
        for state, feature, tokens in zip(states, features, next_tokens, strict=True):
            assert len(feature) == len(tokens)
            # A feature is its position's token, and its next token is the next one's.
            assert feature[1:, 0].tolist() == tokens[:-1].tolist() and (not state or state[-1] == feature[0, 0])
            state.write(np.asarray(tokens))
            state.cache.length += len(tokens)
            state += list(tokens)

    def draft(self, states: Sequence[Tokens], another_level: Any = None) -> list[DraftTree]:
        for state in states:
            state.cache.reserve(state.cache.length + self.max_nodes)
        for level in range(1, self.max_levels + 1):
            trees = [self._tree(state[-1], level) if state else DraftTree.empty() for state in states]
            if level == self.max_levels or another_level is not None and not another_level(trees, level):
                return trees
        raise AssertionError

    def guess(self, token: int) -> np.ndarray:
        """Logits of what comes after a token, whatever came before it."""
        return LOGITS[:, token].mean(0)

    def _tree(self, root: int, depth_limit: int = 3) -> DraftTree:
        tokens, parents, probabilities, depths = [], [], [], []
        level = [(-1, int(root), 1.0)]
        for depth in range(1, depth_limit + 1):
            following = []
            for parent, token, above in level:
                mean = self.guess(token)
                share = np.exp(mean) / np.exp(mean).sum()
                for child in np.argsort(-share)[:2].tolist():
                    tokens.append(child)
                    parents.append(parent)
                    probabilities.append(above * share[child])
                    depths.append(depth)
                    following.append((len(tokens) - 1, child, above * share[child]))
            level = following[:2]
        return DraftTree(
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
            np.array(probabilities, np.float32),
            np.array(depths, np.int32),
        )


class ChainFootprints(FootprintSource):
    def __init__(self) -> None:
        self.down = False

    def begin(self, trees: Sequence[TreeContext]) -> Callable[[], list[Footprints]]:
        if self.down:
            raise FootprintUnavailableError("unavailable", "nobody listens")
        found = [
            Footprints(
                pack_bitsets(
                    np.stack([experts_of(t) for t in (c.context_tokens[-1], *c.tree.tokens.tolist())]), EXPERTS
                ),
                np.ones(1 + len(c.tree), bool),
            )
            for c in trees
        ]
        return lambda: found

    def close(self) -> None: ...
