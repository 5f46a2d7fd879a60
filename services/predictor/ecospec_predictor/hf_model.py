"""Serves an HfExpertPredictor through the service's ExpertModel interface. It keeps nothing between calls: every tree's context
is computed anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .base import Query
from .hf_network import HfExpertPredictor
from .packed import plan

CPU = torch.device("cpu")
CPU_ROWS = 128  # of one run: two trees of 60 nodes
DEVICE_ROWS = 1024
ROW_MULTIPLE = 8  # ragged sizes are padded: every new shape costs a kernel compilation


class HfExpertModel:
    session_bytes = 0

    def __init__(self, network: HfExpertPredictor, version: str, device: torch.device = CPU) -> None:
        """On another device than the CPU the backbone computes in bfloat16. Takes the network over."""
        self.network, self.version, self._device = network.eval().to(device), version, device
        if device.type != CPU.type:
            for parameter in network.backbone.parameters():  # not its buffers: rotary frequencies need their digits
                parameter.data = parameter.data.bfloat16()
        self.max_rows = CPU_ROWS if device.type == CPU.type else DEVICE_ROWS
        self.geometry, self.max_context_tokens = network.geometry, network.config.max_context_tokens

    @torch.inference_mode()
    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """One array per query: uint8 (uint16 above 256 experts) [1 + nodes, layers, top_k], row 0 the root."""
        plans = [plan(Query(q.context_tokens, q.draft_tokens, q.parents), self.max_context_tokens) for q in queries]
        width = -(-max(len(p.tokens) for p in plans) // ROW_MULTIPLE) * ROW_MULTIPLE
        tokens, positions = (torch.zeros(len(plans), width, dtype=torch.int64) for _ in range(2))
        mask = torch.eye(width, dtype=torch.bool).repeat(len(plans), 1, 1)
        rows = []
        for at, p in enumerate(plans):
            size = len(p.tokens)
            tokens[at, :size], positions[at, :size] = torch.from_numpy(p.tokens), torch.from_numpy(p.positions)
            mask[at, :size, :size] = torch.from_numpy(p.mask)
            rows.append(at * width + np.arange(p.new - 1, size))
        hidden = self.network(*(value.to(self._device) for value in (tokens, positions, mask)))
        wanted = torch.from_numpy(np.concatenate(rows)).to(self._device)
        logits = self.network.logits(hidden.flatten(0, 1)[wanted])
        dtype = np.uint8 if self.geometry.experts <= 256 else np.uint16
        chosen = logits.topk(self.geometry.top_k, sorted=False).indices.cpu().numpy().astype(dtype)
        return np.split(chosen, np.cumsum([len(r) for r in rows])[:-1])
