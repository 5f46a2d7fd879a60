"""Node selection inside the engine's CUDA graph: fixed shapes, device state only, no host synchronisation.

Every rank makes the same choice from the same candidates: costs are whole numbers, and the score of a node is one float64 division.

How many nodes a step verifies, g, is baked into the engine's buffers and graphs, so a step always verifies g nodes of every request,
worth it or not; this module decides which. The engine offers no second size for trees (draft_len_schedule shortens chains only,
chains.py), and rows that pad a smaller choice would be routed like any other, so no smaller choice is claimed. Rows of requests
that pad the batch for a graph are verified too; their trees are chosen, and their experts counted, like all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ....expert_buffers import BUFFER_BATCH
from ...greedy import DevicePack, greedy_marginal
from .contract import Candidates, candidates_of, root_tokens

Stock = Callable[
    [], tuple[torch.Tensor, torch.Tensor]
]  # the engine's own choice: (tokens [B, g], indices int64 [B, g])


class DeviceFootprints(Protocol):
    """Predictor state on the device: tokens int64 [B, N] -> (experts int64 [B, N, words], the uint64 bitsets by their bits; known
    bool [B, N]). Fixed shapes, no synchronisation, and the same on all ranks at every step."""

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Pricing:
    """eps: beside the cost in the score, above 0; unknown_cost: experts charged for a node without prediction (top_k in every MoE
    layer); considered: most candidates per request that are priced, the likeliest ones. At least g."""

    eps: float
    unknown_cost: int
    considered: int


def path_probabilities(candidates: Candidates) -> torch.Tensor:
    """float32 [B, C]: the drafter's, none above its parent's whatever the buffers hold (rows that pad a batch hold anything)."""
    values = candidates.scores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    parents = candidates.parents
    above = parents.clamp(min=0)
    for _ in range(candidates.levels - 1):
        values = torch.where(parents < 0, values, torch.minimum(values, values.gather(1, above)))
    return values


def likeliest(values: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [B, count], ascending: the candidates of highest probability, ancestor-closed: of equal ones the first, and a parent
    comes before its children."""
    best = torch.sort(values, dim=1, descending=True, stable=True).indices[:, :count]
    return best.sort(dim=1).values


def pack_considered(candidates: Candidates, considered: torch.Tensor, values: torch.Tensor) -> DevicePack:
    """The considered candidates as trees of the greedy, without experts yet. considered: int64 [B, M], ancestor-closed and
    ascending; values: float32 [B, C]."""
    batch, count = considered.shape
    device = considered.device
    place = torch.zeros_like(candidates.parents).scatter_(
        1, considered, torch.arange(count, device=device).expand(batch, count)
    )
    above = candidates.parents.gather(1, considered)
    start = torch.arange(batch, device=device)[:, None] * (count + 1)
    rows = start + 1 + place.gather(1, above.clamp(min=0))
    parents = torch.cat([torch.full_like(start, -1), torch.where(above < 0, start, rows)], 1).flatten()
    chances = torch.cat([values.new_ones(batch, 1), values.gather(1, considered)], 1).double().flatten()
    none = torch.zeros(len(parents), 1, dtype=torch.int64, device=device)
    unknown = torch.zeros(len(parents), dtype=torch.bool, device=device)
    return DevicePack(none, unknown, chances, parents, torch.arange(batch, device=device).repeat_interleave(count + 1))


def choose_indices(
    candidates: Candidates, roots: torch.Tensor, footprints: DeviceFootprints, nodes: int, pricing: Pricing
) -> torch.Tensor:
    """int64 [B, nodes] that keep contract.py: greedily by path probability per expert that nothing chosen so far reads, one
    buffer for the batch, started with the experts of the roots. roots: int64 [B], their tokens."""
    batch, count = candidates.scores.shape
    values = path_probabilities(candidates)
    considered = likeliest(values, min(count, max(pricing.considered, nodes)))
    tokens = torch.cat([roots[:, None], candidates.tokens.gather(1, considered).long()], 1)
    experts, known = footprints(tokens)
    trees = pack_considered(candidates, considered, values)
    pack = DevicePack(experts.flatten(0, 1), known.flatten(), trees.values, trees.parents, trees.tree)
    return chosen_indices(pack, considered, nodes, pricing)


def chosen_indices(pack: DevicePack, considered: torch.Tensor, nodes: int, pricing: Pricing) -> torch.Tensor:
    """The greedy's choice among the considered candidates, int64 [B, M], as candidates: int64 [B, nodes], ascending."""
    batch, count = considered.shape
    chosen = greedy_marginal(
        pack, batch, nodes, pricing.eps, pricing.unknown_cost, True, BUFFER_BATCH, lockstep=True
    ).view(batch, count + 1)[:, 1:]
    places = torch.sort((~chosen).to(torch.uint8), dim=1, stable=True).indices[:, :nodes]
    return considered.gather(1, places)


class GraphSelector:
    """Chooses in the worker's place. Keeps no tensors of its own: the footprints keep theirs."""

    def __init__(self, footprints: DeviceFootprints, pricing: Pricing) -> None:
        self._footprints, self._pricing = footprints, pricing

    def __call__(self, worker: Any, batch_size: int, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
        """What the worker's method returns: (tokens [B, g], indices int64 [B, g]). stock is not asked: it launches kernels."""
        candidates = candidates_of(worker, batch_size)
        roots = root_tokens(worker, batch_size)
        nodes = int(worker.max_total_draft_tokens)
        indices = choose_indices(candidates, roots, self._footprints, nodes, self._pricing)
        return candidates.tokens.gather(1, indices), indices
