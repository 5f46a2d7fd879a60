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
from .network import ExpertPredictor

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kept:
    """What a session keeps: keys (rotated) and values of its last m <= max_context_tokens tokens, [layers, 2, heads, m, size],
    the last of them the token at index end - 1 of the session's text."""

    keys_values: torch.Tensor
    end: int


@dataclass(frozen=True)
class Plan:
    """One tree's rows: first the context tokens to compute, the root last, then the nodes.

    tokens, positions: int64 [rows]; kept: the m tokens before them, or None; new: number of context rows; mask: bool
    [rows, m + rows], True where a row may look.
    """

    tokens: np.ndarray
    positions: np.ndarray
    kept: torch.Tensor | None
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
            kept = state.keys_values[:, :, :, : state.keys_values.shape[3] - (state.end - known)]
    m = 0 if kept is None else kept.shape[3]
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
    """The same function as ExpertPredictor, over packed rows. dtype: of the products; float32 in between."""

    def __init__(self, network: ExpertPredictor, dtype: torch.dtype) -> None:
        self.network, self.dtype, self.config = network, dtype, network.config
        half = self.config.hidden_size // self.config.heads // 2
        self._frequency = self.config.rope_theta ** (-np.arange(half) / half)
        self._project = product(network.project, dtype)
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

    def forward(self, plans: Sequence[Plan]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Router logits of each plan's root and nodes, packed [sum(1 + nodes), layers, experts], and what each session may
        keep: keys and values of its last max_context_tokens decided tokens."""
        c, network = self.config, self.network
        x = network.embeddings[torch.from_numpy(np.concatenate([p.tokens for p in plans]))].float()
        x = self._project(F.rms_norm(x, x.shape[-1:], network.embedding_norm).to(self.dtype)).float()
        angle = np.concatenate([p.positions for p in plans])[:, None] * self._frequency
        cosine, sine = np.cos(angle), np.sin(angle)
        turn = torch.from_numpy(np.concatenate([cosine, cosine, -sine, sine], 1)).to(self.dtype)
        cos, sin = turn.view(len(x), 1, 2, -1).unbind(2)
        masks = [torch.from_numpy(p.mask) for p in plans]
        buffers = [self._buffer(p) for p in plans]
        ends = np.cumsum([len(p.tokens) for p in plans]).tolist()
        pieces = list(zip(buffers, masks, [0, *ends], ends, strict=False))
        attended = torch.empty(len(x), c.heads, c.hidden_size // c.heads, dtype=self.dtype)
        for layer, (qkv, out, up, down) in enumerate(self._layers):
            parts = qkv(F.rms_norm(x, (c.hidden_size,)).to(self.dtype)).view(len(x), 3 * c.heads, -1)
            queries_keys, values = parts[:, : 2 * c.heads], parts[:, 2 * c.heads :]
            half = queries_keys.shape[-1] // 2
            turned = torch.addcmul(queries_keys * cos, queries_keys.roll(half, -1), sin)
            for buffer, mask, start, end in pieces:
                keys, held = buffer[layer, 0], buffer[layer, 1]
                keys[:, start - end :] = turned[start:end, c.heads :].transpose(0, 1)
                held[:, start - end :] = values[start:end].transpose(0, 1)
                query = turned[start:end, : c.heads].transpose(0, 1)
                seen = F.scaled_dot_product_attention(query[None], keys[None], held[None], attn_mask=mask)
                attended[start:end] = seen[0].transpose(0, 1)
            x += out(attended.flatten(1))
            x += down(up(F.rms_norm(x, (c.hidden_size,)).to(self.dtype)))
        rows = np.concatenate(
            [np.arange(start + p.new - 1, end) for p, (_, _, start, end) in zip(plans, pieces, strict=True)]
        )
        logits = self._router(F.rms_norm(x[torch.from_numpy(rows)], (c.hidden_size,)).to(self.dtype))
        kept = []
        for p, buffer in zip(plans, buffers, strict=True):
            decided = buffer.shape[3] - len(p.tokens) + p.new
            kept.append(buffer[:, :, :, max(0, decided - c.max_context_tokens) : decided])
        return logits.unflatten(-1, (network.geometry.moe_layers, network.geometry.experts)), kept

    def _buffer(self, p: Plan) -> torch.Tensor:
        """Room for the keys and values of a tree, those kept in place: [layers, 2, heads, m + rows, size]."""
        c = self.config
        m = p.mask.shape[1] - len(p.tokens)
        buffer = torch.empty(c.layers, 2, c.heads, p.mask.shape[1], c.hidden_size // c.heads, dtype=self.dtype)
        if p.kept is not None:
            buffer[:, :, :, :m] = p.kept
        return buffer


def product(layer: nn.Linear, dtype: torch.dtype, norm: torch.Tensor | None = None, gelu: bool = False) -> Product:
    """x [n, in] -> layer(norm * x), and gelu of it. oneDNN's own layout is made once, not at every call, where it can be."""
    weight = layer.weight.detach().float()
    weight = (weight if norm is None else weight * norm.detach()).to(dtype)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    if torch.backends.mkldnn.is_available() and dtype == torch.bfloat16 and weight.device.type == "cpu":
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        run = torch.ops.mkldnn._linear_pointwise
        name, algorithm = ("gelu", "none") if gelu else ("none", "")
        return lambda x: run(x, packed, bias, name, [], algorithm)
    if gelu:
        return lambda x: F.gelu(F.linear(x, weight, bias))
    return lambda x: F.linear(x, weight, bias)
