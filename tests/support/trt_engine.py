"""Drives the stand-in of TensorRT-LLM, and makes candidates of random draft trees with their true parents."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

STAND_IN = Path(__file__).parent / "stand_in_engine"
PADDING_ID = (1 << 64) - 1
TREE = SimpleNamespace(max_batch_size=4, dynamic_tree_max_topK=3, max_draft_len=3, max_total_draft_tokens=5)


@contextmanager
def stand_in_engine() -> Iterator[None]:
    """tensorrt_llm can be imported, and is the stand-in."""
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(STAND_IN))
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


def model_config(layers: int = 3, experts: int = 16, top_k: int = 2, ranks: int = 1, rank: int = 0) -> SimpleNamespace:
    pretrained = SimpleNamespace(
        num_hidden_layers=layers, hidden_size=8, num_experts=experts, num_experts_per_tok=top_k
    )
    mapping = SimpleNamespace(rank=rank, world_size=ranks, pp_size=1, cp_size=1, enable_attention_dp=False)
    return SimpleNamespace(pretrained_config=pretrained, mapping=mapping, spec_config=TREE)


@dataclass
class Decoded:
    """outputs: tokens per request; steps: (real requests, prompts read, rows per request) of every step."""

    outputs: dict[int, list[int]]
    steps: list[tuple[int, int, list[int]]] = field(default_factory=list)


def decode(
    model: Any,
    metadata_class: Any,
    prompts: dict[int, list[int]],
    tokens: int,
    join_at: dict[int, int] | None = None,
    padding: int = 0,
) -> Decoded:
    """Run the requests to so many tokens each. join_at: the step in which a request's prompt is read, else the first; padding:
    requests that pad every step that reads no prompt."""
    worker, nodes = model.spec_worker, model.spec_worker.max_total_draft_tokens
    worker.trees[PADDING_ID] = ([0] * nodes, None)
    texts = {request: list(prompt) for request, prompt in prompts.items()}
    decoded, started = Decoded({request: [] for request in prompts}), set()
    step = 0
    while any(len(output) < tokens for output in decoded.outputs.values()):
        new = [r for r in prompts if r not in started and (join_at or {}).get(r, 0) <= step]
        running = [r for r in prompts if r in started and len(decoded.outputs[r]) < tokens]
        pads = [] if new else [PADDING_ID] * padding
        rows, positions, lengths = [], [], []
        for request in new:
            rows += texts[request]
            positions += range(len(texts[request]))
            lengths.append(len(texts[request]))
        for request in running:
            rows += [texts[request][-1], *worker.trees[request][0]]
            positions += [len(texts[request]) - 1] * (1 + nodes)
            lengths.append(1 + nodes)
        for _ in pads:
            rows += [0] * (1 + nodes)
            positions += [0] * (1 + nodes)
            lengths.append(1 + nodes)
            worker.trees[PADDING_ID] = ([0] * nodes, None)
        generating = len(running) + len(pads)
        metadata = metadata_class(request_ids=[*new, *running, *pads], seq_lens=lengths, num_generations=generating)
        metadata.prepare()
        with torch.inference_mode():
            output = model(
                attn_metadata=SimpleNamespace(num_contexts=len(new), num_seqs=len(lengths)),
                input_ids=torch.tensor(rows, dtype=torch.int32),
                position_ids=torch.tensor([positions], dtype=torch.int32),
                spec_metadata=metadata,
            )
        for at, request in enumerate([*new, *running]):
            emitted = output["new_tokens"][at, : int(output["new_tokens_lens"][at])].tolist()
            texts[request] += emitted
            decoded.outputs[request] += emitted
        decoded.steps.append((len(new) + len(running), len(new), lengths))
        started |= set(new)
        step += 1
    return decoded


def random_worker(
    rng: np.random.Generator, batch: int, branching: int, levels: int, nodes: int, vocabulary: int = 50
) -> tuple[SimpleNamespace, list[list[int]]]:
    """A worker's buffers after drafting random trees, and the true parents of all candidates, -1 below the root. Probabilities are
    few and round, so that they often tie, also between a parent and its child. The buffers are larger than the batch."""
    count = branching + branching * branching * (levels - 1)
    width = max(branching * (levels - 1) + 1, branching + 1)
    scores, tokens = np.full((batch + 2, count), np.nan, np.float32), rng.integers(0, vocabulary, (batch + 2, count))
    above = rng.integers(0, max(1, count // 2), (batch + 2, width))
    all_parents = []
    for at in range(batch):
        parents, chances = [-1] * branching, list(rng.choice([0.25, 0.5, 1.0], branching))
        expanded = list(range(branching))
        listed = [-1, *expanded]
        for level in range(1, levels):
            start = len(parents)
            for parent in expanded:
                parents += [parent] * branching
                chances += [chances[parent] * share for share in rng.choice([0.25, 0.5, 1.0], branching)]
            grown = list(range(start, len(parents)))
            rng.shuffle(grown)
            expanded = sorted(grown, key=lambda node: -chances[node])[:branching]  # equal ones in any order
            if level < levels - 1:
                listed += expanded
        scores[at], above[at, : len(listed)] = chances, listed
        all_parents.append(parents)
    accepted = rng.integers(0, vocabulary, (batch + 2, levels + 1))
    worker = SimpleNamespace(
        K=branching,
        max_draft_len=levels,
        max_total_draft_tokens=nodes,
        history_score_buffer=torch.from_numpy(scores),
        history_draft_tokens_buffer=torch.from_numpy(tokens.astype(np.int32)),
        history_draft_tokens_parent_buffer=torch.from_numpy(above.astype(np.int64)),
        _accepted_tokens_buf=torch.from_numpy(accepted.astype(np.int32)),
        _num_accepted_tokens_buf=torch.from_numpy(rng.integers(1, levels + 2, batch + 2).astype(np.int32)),
    )
    return worker, all_parents


def unasked() -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of the engine's own choice, where nobody is to ask for it."""
    raise AssertionError("asked for the engine's own choice")


def stock_choice(worker: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's own choice: the nodes of highest probability."""
    indices = torch.topk(worker.history_score_buffer[:batch], worker.max_total_draft_tokens).indices.sort().values
    return worker.history_draft_tokens_buffer[:batch].gather(1, indices), indices


def random_table(rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    """uint8 [tokens, layers, top_k], ids without repeats."""
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[:, :, :top_k].astype(np.uint8)
