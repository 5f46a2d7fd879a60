"""A live server whose every answer is known: real HTTP in front of the real scheduler over the chain of fake_engine.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from api_server import Running, serve
from fake_engine import VOCABULARY, ChainEngine, greedy
from scheduler_harness import Harness
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GEOMETRY = ChainEngine.geometry
TOKENS = 30


def chain_tokenizer() -> Any:
    """One word per token of the chain; every other word is token 0."""
    core = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="t0")


def chain_harness(policy: str = "ecospec", step_seconds: float = 0.0) -> Harness:
    """step_seconds: that each verification takes longer."""
    harness = Harness(policy)
    verify = harness.engine.verify

    def slower(items: Any) -> Any:
        time.sleep(step_seconds)
        return verify(items)

    if step_seconds:
        harness.engine.verify = slower  # type: ignore[method-assign]
    return harness


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **more}


class Live:
    """A context manager. step_seconds: see chain_harness()."""

    def __init__(self, policy: str = "ecospec", step_seconds: float = 0.0, **settings: Any) -> None:
        self.harness = chain_harness(policy, step_seconds)
        self.random = np.random.default_rng(7)
        scheduler: Any = self.harness.scheduler
        self._context = serve(
            chain_tokenizer(), scheduler, ledger=self.harness.ledger, max_context_tokens=64, **settings
        )

    def __enter__(self) -> Live:
        self.server: Running = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def prompt(self) -> list[int]:
        return self.random.integers(0, VOCABULARY, int(self.random.integers(1, 20))).tolist()

    def ask(self, prompt: list[int], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json=body(prompt, **more), trust_env=False, timeout=30)

    def all_is_right(self, times: int = 4) -> None:
        """So many answers at the same time are the target's own, whole."""
        prompts = [self.prompt() for _ in range(times)]
        with ThreadPoolExecutor(4) as pool:
            for prompt, answer in zip(prompts, pool.map(self.ask, prompts), strict=True):
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == greedy(prompt, TOKENS)

    def right_until(self, enough: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        self.all_is_right()
        while not enough():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.all_is_right()

    def metric(self, name: str, **labels: str) -> float:
        """0 for what was never counted."""
        return self.harness.ledger.registry.get_sample_value(f"ecospec_{name}", labels) or 0.0
