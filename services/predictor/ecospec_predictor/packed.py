"""The expert predictor as it serves: the rows of every tree of a batch packed into one forward, each over the kept keys and
values of its own session.

A row sees itself and the tokens before it, at most max_context_tokens in all (a sliding window; on held-out text the top-k
accuracy equals that of a window computed anew for every token). Only tokens that are decided enter a session's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .base import Query
from .kernels import add_norm, attend, gather_norm, top_k
from .network import ExpertPredictor, PredictorConfig

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kept:
    """What a session keeps: keys (turned by their positions) and values of its last m <= max_context_tokens tokens, float32
    [layers, 2, m, hidden], the last of them the token at index end - 1 of the session's text."""

    keys_values: np.ndarray
    end: int


@dataclass(frozen=True)
class Plan:
    """One tree's rows: first the context tokens to compute, the root last, then the nodes.

    tokens, positions: int64 [rows]; kept: the m tokens before them, or None; new: number of context rows; mask: bool
    [rows, m + rows], True where a row may look.
    """

    tokens: np.ndarray
    positions: np.ndarray
    kept: np.ndarray | None
    new: int
    mask: np.ndarray


def plan(query: Query, window: int) -> Plan:
    """Which rows this query needs. A session that is too far behind, or ahead, is computed anew from the query's context."""
    context, nodes = query.context_tokens[-window:], len(query.draft_tokens)
    length = len(context) if query.session is None else query.length
    kept, new = None, len(context)
    if query.session is not None and (state := query.session.state) is not None:
        known = min(state.end, length - 1)  # the root is computed again: its own answer is asked for
        if state.end - known <= 1 and length - known < len(context):
            new = length - known
            kept = state.keys_values[:, :, : state.keys_values.shape[2] - (state.end - known)]
    m = 0 if kept is None else kept.shape[2]
    ancestors = _ancestors(query.parents)
    positions = np.empty(m + new + nodes, np.int64)
    positions[: m + new] = np.arange(length - m - new, length)
    positions[m + new :] = length - 1 + ancestors.sum(1)
    visible = np.zeros((new + nodes, m + new + nodes), bool)
    visible[:new, : m + new] = np.tri(new, m + new, m, dtype=bool)
    visible[new:, : m + new] = True
    visible[new:, m + new :] = ancestors
    visible &= positions > positions[m:, None] - window
    return Plan(np.concatenate([context[len(context) - new :], query.draft_tokens]), positions[m:], kept, new, visible)


def _ancestors(parents: np.ndarray) -> np.ndarray:
    """bool [N, N]: whether column is row's ancestor, or row itself."""
    count, size = len(parents), -(-len(parents) // 8)
    if not count:
        return np.zeros((0, 0), bool)
    above: list[int] = []  # one bit per node: far cheaper than rows of an array
    for node, parent in enumerate(parents.tolist()):
        above.append((above[parent] if parent >= 0 else 0) | 1 << node)
    data = np.frombuffer(b"".join(bits.to_bytes(size, "little") for bits in above), np.uint8)
    return np.unpackbits(data.reshape(count, size), axis=1, count=count, bitorder="little").view(bool)


class PackedPredictor:
    """The same function as ExpertPredictor, over packed rows on the CPU. dtype: of the products, bfloat16 or float32."""

    def __init__(self, network: ExpertPredictor, dtype: torch.dtype) -> None:
        self.dtype, self.config, self.geometry = dtype, network.config, network.geometry
        half = self.config.hidden_size // self.config.heads // 2
        self._frequency = self.config.rope_theta ** (-np.arange(half) / half)
        self._table = network.embeddings  # what load_embeddings() shares with the next version, as long as it lives
        self._embeddings = _array(self._table)
        self._project = product(network.project, dtype, network.embedding_norm)
        self._layers = [
            (
                product(block.qkv, dtype, block.attention_norm),
                product(block.out, dtype),
                product(block.up, dtype, block.mlp_norm, gelu=True),
                product(block.down, dtype),
            )
            for block in network.blocks
        ]
        self._router = product(network.router, dtype, network.norm)

    def predict(self, plans: Sequence[Plan]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Top-k experts of each plan's root and nodes, packed, uint8 or uint16 [sum(1 + nodes), layers, k], and what each
        session may keep: keys and values of its last max_context_tokens decided tokens."""
        c, g = self.config, self.geometry
        tokens = np.concatenate([p.tokens for p in plans])
        angle = np.concatenate([p.positions for p in plans])[:, None] * self._frequency
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        room = Room.of(plans, c)
        embedded = self._empty(len(tokens), g.hidden_size)
        gather_norm(self._embeddings, tokens, _array(embedded))
        normed, attended = (self._empty(len(tokens), c.hidden_size) for _ in range(2))
        normed_bits, attended_bits = _array(normed), _array(attended)
        x, more = np.zeros((len(tokens), c.hidden_size), np.float32), self._project(embedded)
        for (qkv, out, up, down), (keys, values) in zip(self._layers, room.keys_values, strict=True):
            add_norm(x, _array(more), normed_bits)
            attend(
                _array(qkv(normed)), cos, sin, room.places, room.first, room.seen, keys, values, c.heads, attended_bits
            )
            add_norm(x, _array(out(attended)), normed_bits)
            more = down(up(normed))
        add_norm(x, _array(more), normed_bits)
        logits = self._router(normed[torch.from_numpy(room.answered)])
        experts = np.empty((len(logits), g.moe_layers, g.top_k), np.uint8 if g.experts <= 256 else np.uint16)
        top_k(_array(logits).reshape(-1, g.experts), experts.reshape(-1, g.top_k))
        return experts, room.kept(plans, c.max_context_tokens)

    def _empty(self, rows: int, size: int) -> torch.Tensor:
        return torch.empty(rows, size, dtype=self.dtype)


@dataclass(frozen=True)
class Room:
    """Where the keys and values of a batch lie: for each tree a stretch of places, its kept ones first, then its rows.

    keys_values: float32 [layers, 2, places, hidden]; places: int64 [rows] of each row; row i looks at places
    seen[first[i]:first[i + 1]]; starts: int64 [trees], first place of each tree; answered: rows with an answer.
    """

    keys_values: np.ndarray
    places: np.ndarray
    first: np.ndarray
    seen: np.ndarray
    starts: np.ndarray
    answered: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[Plan], c: PredictorConfig) -> Room:
        sizes = [p.mask.shape[1] for p in plans]
        starts = np.cumsum([0, *sizes])
        keys_values = np.empty((c.layers, 2, starts[-1], c.hidden_size), np.float32)
        places, seen, looks, answered, row = [], [], [], [], 0
        for p, start, end in zip(plans, starts, starts[1:], strict=False):
            if p.kept is not None:
                keys_values[:, :, start : start + p.kept.shape[2]] = p.kept
            places.append(np.arange(end - len(p.tokens), end))
            seen.append(p.mask.nonzero()[1] + start)
            looks.append(p.mask.sum(1))
            answered.append(np.arange(row + p.new - 1, row + len(p.tokens)))
            row += len(p.tokens)
        first = np.zeros(row + 1, np.int64)
        np.cumsum(np.concatenate(looks), out=first[1:])
        return cls(
            keys_values, np.concatenate(places), first, np.concatenate(seen), starts[:-1], np.concatenate(answered)
        )

    def kept(self, plans: Sequence[Plan], most: int) -> list[np.ndarray]:
        """[layers, 2, m, hidden] of each tree's last decided tokens; views."""
        ends = [int(s) + p.mask.shape[1] - len(p.tokens) + p.new for p, s in zip(plans, self.starts, strict=True)]
        return [self.keys_values[:, :, max(int(s), e - most) : e] for s, e in zip(self.starts, ends, strict=True)]


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def product(layer: nn.Linear, dtype: torch.dtype, norm: torch.Tensor | None = None, gelu: bool = False) -> Product:
    """x [n, in] -> layer(norm * x), and gelu of it. oneDNN's own layout is made once, not at every call, where it can be."""
    weight = layer.weight.detach().float()
    weight = (weight if norm is None else weight * norm.detach()).to(dtype)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    mkldnn = torch.ops.mkldnn
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and mkldnn._is_mkldnn_bf16_supported():
        packed, run = mkldnn._reorder_linear_weight(weight), mkldnn._linear_pointwise
        name, algorithm = ("gelu", "none") if gelu else ("none", "")
        return lambda x: run(x, packed, bias, name, [], algorithm)
    if gelu:
        return lambda x: F.gelu(F.linear(x, weight, bias))
    return lambda x: F.linear(x, weight, bias)
