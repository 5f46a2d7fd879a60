"""The fake engine over the byte tokenizer's vocabulary, so that grammars, stop strings and templates meet a real step loop."""

from __future__ import annotations

import numpy as np
from fake_engine import EXPERTS, LAYERS, TOP_K, ChainDrafter, ChainEngine, ChainFootprints
from scheduler_harness import build_policy

from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.scheduler import Limits, Scheduler
from ecospec_proto.geometry import TargetGeometry

VOCABULARY = 258  # conftest.make_byte_tokenizer()
CONTEXT = 2048


def _table() -> np.ndarray:
    """float32 [vocabulary, vocabulary]: what follows a token. Prefers what ends JSON values and words, so that answers end."""
    random = np.random.default_rng(11)
    logits = random.normal(0, 1.5, (VOCABULARY, VOCABULARY)).astype(np.float32)
    order = sorted(_byte_symbols())
    for character, bias in (('"', 5), ("}", 4), ("]", 4), (",", 1), (":", 2), (" ", 1), ("a", 2), ("e", 2), ("1", 2)):
        logits[:, order.index(character if character != " " else "\u0120")] += bias
    return logits


def _byte_symbols() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


AFTER = _table()
BEFORE = np.random.default_rng(12).normal(0, 0.7, (VOCABULARY, VOCABULARY)).astype(np.float32)


class ByteEngine(ChainEngine):
    geometry = TargetGeometry("bytes", "test", VOCABULARY, 4, LAYERS, EXPERTS, TOP_K)
    max_context_tokens = CONTEXT

    def logits(self, before: int, token: int) -> np.ndarray:
        return AFTER[token] + BEFORE[before]


class ByteDrafter(ChainDrafter):
    def guess(self, token: int) -> np.ndarray:
        return AFTER[token]


def byte_scheduler(policy: str, max_running: int = 4) -> Scheduler:
    """Not started."""
    limits = Limits(max_running, 64, CONTEXT)
    pages = 512
    return Scheduler(ByteEngine(pages), ByteDrafter(pages), ChainFootprints(), build_policy(policy), limits, Ledger())
