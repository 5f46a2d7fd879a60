"""What a batch is, and the paper's loss on it: per layer, cross-entropy to a distribution with 1/K on each activated expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .data import Window


@dataclass(frozen=True)
class Batch:
    """tokens, positions  int64 [B, T]
    mask    bool [B, T, T], True where a row may look
    rows    int64 [n], places in the flattened [B * T] of the rows that are scored
    routes  int64 [n, moe_layers, top_k], -1 where unknown
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    routes: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def collate(packed: Sequence[Sequence[Window]], width: int, reach: int) -> Batch:
    """Packed rows of windows -> one batch; windows side by side do not see one another, and positions begin at 0 in each.

    reach: tokens that a row sees at most, itself included, as when it is served.
    """
    tokens, positions = (np.zeros((len(packed), width), np.int64) for _ in range(2))
    mask = np.broadcast_to(np.eye(width, dtype=bool), (len(packed), width, width)).copy()
    rows, routes = [], []
    for at, windows in enumerate(packed):
        start = 0
        for window in windows:
            part = slice(start, start + len(window.tokens))
            ancestors = window.ancestors()
            place = ancestors.sum(1) - 1
            tokens[at, part], positions[at, part] = window.tokens, place
            mask[at, part, part] = ancestors & (place[:, None] - place < reach)
            scored = window.known.any(1)
            rows.append(at * width + start + np.flatnonzero(scored))
            routes.append(window.routes[scored])
            start = part.stop
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(positions),
        torch.from_numpy(mask),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(routes).astype(np.int64)),
    )


def entries(packed: Sequence[Sequence[Window]]) -> int:
    """(row, layer) pairs that the loss of these rows is a mean over."""
    return sum(int(window.known.sum()) for windows in packed for window in windows)


def cross_entropy(logits: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """Sum over rows and layers of the cross-entropy to equal mass on each known expert of `routes`; -1 has no part in it.

    logits: float [n, layers, experts]; routes: int64 [n, layers, top_k].
    """
    known = routes >= 0
    count = known.sum(-1)
    picked = logits.gather(-1, routes.clamp(min=0)).masked_fill(~known, 0.0).sum(-1)
    loss = torch.logsumexp(logits, -1) - picked / count.clamp(min=1)
    return loss[count > 0].sum()


class Objective(nn.Module):
    """The network and its loss as one module, so that everything that trains passes through one forward call."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss summed over its entries, router logits float32 [n, layers, experts])."""
        hidden = self.network(batch.tokens, batch.positions, batch.mask)
        logits = self.network.logits(hidden.flatten(0, 1)[batch.rows]).float()
        return cross_entropy(logits, batch.routes), logits
