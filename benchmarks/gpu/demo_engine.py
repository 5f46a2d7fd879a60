"""The demo, loaded by the setting `device` as serving does, decoding and verifying on each device."""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_orchestrator.engine.base import VerifyItem
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_orchestrator.loading import in_own_thread, load
from ecospec_orchestrator.settings import Settings

DEMO_DIR = Path(__file__).parents[2] / "models" / "demo"
PROMPT, TOKENS, BATCHES, REPEATS = "Gravity is", 64, (1, 4), 10
PLAIN, TREE = np.array([-1]), np.array([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


def demo_table(devices: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for every device and batch size; same_tokens: as those of the first device. Raises SettingsError."""
    rows: list[dict[str, Any]] = []
    for device in devices:
        loaded = load(Settings(model="demo", demo_dir=DEMO_DIR, device=device, max_running=max(BATCHES)), print)
        prompt = np.array(loaded.tokenizer(PROMPT)["input_ids"])
        rows += in_own_thread(partial(_measure, loaded.engine, prompt))
    texts = [row.pop("tokens") for row in rows]
    return [
        {**row, "same_tokens": text == texts[i % len(BATCHES)]}
        for i, (row, text) in enumerate(zip(rows, texts, strict=True))
    ]


def _measure(engine: TorchEngine, prompt: np.ndarray) -> list[dict[str, Any]]:
    engine.enter_thread()
    return [_decode(engine, prompt, batch) for batch in BATCHES]


def _decode(engine: TorchEngine, prompt: np.ndarray, batch: int) -> dict[str, Any]:
    sequences = [engine.new_sequence() for _ in range(batch)]
    for sequence in sequences:
        engine.prefill(sequence, prompt[:-1])
    tokens, step_us, tree_us = [int(prompt[-1])], [], []
    for _ in range(TOKENS):
        began = time.perf_counter()
        verified = engine.verify([VerifyItem(s, np.array(tokens[-1:]), PLAIN) for s in sequences])
        for sequence in sequences:
            engine.commit(sequence, np.array([0]))
        step_us.append((time.perf_counter() - began) * 1e6)
        tokens.append(int(verified[0].logits[0].argmax()))
    draft = np.array((tokens * len(TREE))[: len(TREE)])
    for _ in range(REPEATS):
        began = time.perf_counter()
        engine.verify([VerifyItem(s, draft, TREE) for s in sequences])
        tree_us.append((time.perf_counter() - began) * 1e6)
    for sequence in sequences:
        engine.release(sequence)
    return {
        "device": str(engine.device),
        "computed_by": engine.computed_by,
        "batch": batch,
        "step_us": statistics.median(step_us),
        "tree_step_us": statistics.median(tree_us),
        "tokens": tokens,
    }
