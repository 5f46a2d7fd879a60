"""Drafting with an EAGLE-3 head: a dynamic tree of `depth` draft forwards, `top_k` candidates kept per level."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from ..core import ROOT, DraftTree, SettingsError
from ..engine.torch.modules import Bfloat16Linear, Segment, SequenceCache, StepPlan, attend_segments
from .eagle3_head import Eagle3Config, Eagle3Head


@dataclass
class Eagle3State:
    """One request's draft memory: the head's keys and values, and its hidden state at the last decided token."""

    cache: SequenceCache
    hidden: torch.Tensor | None = None  # float32 [hidden]; None before anything was fed


class Eagle3Drafter:
    """Implements Drafter. The pool of a tree is top_k + (depth - 1) * top_k^2 nodes (EAGLE-2's expansion)."""

    def __init__(self, head: Eagle3Head, embed_tokens: nn.Module, depth: int, top_k: int) -> None:
        self.head, self.embed_tokens, self.max_levels, self.top_k = head.eval(), embed_tokens, depth, top_k
        self.target_ids = head.target_ids
        self._layer_bytes, self._vocabulary_bytes, self._fusion_bytes = (
            sum(p.numel() * p.element_size() for p in module.parameters())
            for module in (head.midlayer, head.lm_head, head.fc)
        )

    def bytes_read(self, levels: int, fed: bool) -> int:
        feeding = self._fusion_bytes + self._layer_bytes if fed else 0
        return feeding + levels * self._vocabulary_bytes + max(0, levels - 1) * self._layer_bytes

    def new_state(self) -> Eagle3State:
        c = self.head.config
        return Eagle3State(SequenceCache(1, c.num_key_value_heads, c.head_dim))

    @torch.inference_mode()
    def extend(
        self, states: Sequence[Eagle3State], features: Sequence[torch.Tensor], next_tokens: Sequence[np.ndarray]
    ) -> None:
        """features: float32 [n, 3 * hidden] of committed positions; next_tokens: int64 [n], the token after each of them."""
        fed = [i for i, tokens in enumerate(next_tokens) if len(tokens)]
        if not fed:
            return
        fused = self.head.fc(torch.cat([features[i] for i in fed]))
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
        self, states: Sequence[Eagle3State], another_level: Callable[[list[DraftTree], int], bool] | None = None
    ) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(states)
        ready = [i for i, s in enumerate(states) if s.hidden is not None]
        if not ready:
            return trees
        growing = [_GrowingTree(states[i]) for i in ready]
        hidden = torch.stack([g.state.hidden for g in growing if g.state.hidden is not None])  # [requests, hidden]
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

    def _candidates(self, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """hidden: [rows, hidden] -> target ids int64 and conditional probabilities float32, both [rows, top_k]."""
        probability, draft_ids = self.head.lm_head(self.head.norm(hidden)).softmax(-1).topk(self.top_k)
        return self.target_ids[draft_ids].numpy(), probability.numpy()

    def _expand(
        self, growing: Sequence[_GrowingTree], chosen: Sequence[np.ndarray], hidden: torch.Tensor, level: int
    ) -> torch.Tensor:
        """One draft forward over the chosen nodes of every tree; the hidden state of a node's parent stands in for features."""
        segments, tokens, positions, sources, start = [], [], [], [], 0
        row_of_hidden = 0
        for g, nodes in zip(growing, chosen, strict=True):
            visible = g.expand(nodes)
            cache = g.state.cache
            cache.reserve(cache.length + visible.shape[1])
            segments.append(Segment(cache, start, start + len(nodes), torch.from_numpy(visible)))
            tokens.append(np.array([g.tokens[n] for n in nodes]))
            positions.append(np.full(len(nodes), cache.length + level - 1))
            sources.append(row_of_hidden + g.source_rows(nodes))
            row_of_hidden += g.rows_of_last_level
            g.rows_of_last_level = len(nodes)
            start += len(nodes)
        source = hidden[torch.from_numpy(np.concatenate(sources))]
        return self._layer(np.concatenate(tokens), source, np.concatenate(positions), segments)

    def _layer(
        self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray, segments: list[Segment]
    ) -> torch.Tensor:
        """tokens, positions: int64 [T]; hidden: [T, hidden] -> [T, hidden]."""
        layer = self.head.midlayer
        x = layer.inputs(self.embed_tokens(torch.from_numpy(tokens)), hidden)
        q, k, v = layer.self_attn.qkv(x, torch.from_numpy(positions))
        attention = layer.self_attn
        attended, _ = attend_segments(
            attention, q[None], k[None], v[None], None, attention.head_dim**-0.5, StepPlan(segments)
        )
        return layer.finish(hidden, attended[0].flatten(1))


class _GrowingTree:
    """A tree under construction. Rows are expanded nodes, in the order in which the head's cache holds them."""

    def __init__(self, state: Eagle3State) -> None:
        self.state = state
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
        probabilities = np.array(self.probabilities, np.float32)
        return DraftTree(
            np.array(self.tokens, np.int32),
            np.array(self.parents, np.int32),
            probabilities,
            np.array(self.depths, np.int32),
        )


def load_eagle3(
    directory: Path, embed_tokens: nn.Module, hidden_size: int, vocab_size: int, depth: int, top_k: int
) -> Eagle3Drafter:
    """Load a head (config.json, model.safetensors); its products run from bfloat16 weights. Raises SettingsError when it was
    made for a target of another hidden size or vocabulary."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"the drafter directory {directory} holds no config.json; give a trained EAGLE-3 head."
        ) from None
    raw["feature_layers"] = tuple(raw["feature_layers"])
    config = Eagle3Config(**{field.name: raw[field.name] for field in fields(Eagle3Config)})
    for name, wanted in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if getattr(config, name) != wanted:
            raise SettingsError(
                f"the EAGLE-3 head in {directory} has {name} {getattr(config, name)}, but the target has {wanted}; "
                "use a head that was trained for this target."
            )
    head = Eagle3Head(config)
    tensors = load_file(directory / "model.safetensors")
    head.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in tensors.items()})
    for module in (head, head.midlayer.self_attn, head.midlayer.mlp):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Bfloat16Linear(child.weight.detach().bfloat16()))
    head.midlayer.self_attn.layer_idx = 0
    return Eagle3Drafter(head, embed_tokens, depth, top_k)
