"""What the dynamic-tree worker asks of a choice of draft nodes, as functions of its candidates.

TensorRT-LLM 1.3 (eagle3_dynamic_tree.py): the worker drafts K nodes below the root and, in each further of D levels, K below each of
the K best of the level before. Candidate i of C = K + K*K*(D-1) hangs from the root when i < K, else from candidate
parent_list[i // K]. A choice is exactly g indices per request, ascending and unique, each with its parent; the engine derives mask,
positions and links from it, and verifies all g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

ROOT = -1


class ContractError(ValueError):
    """A choice that the engine must not get, or buffers that are not what the choice is made from; one sentence."""


@dataclass(frozen=True)
class Candidates:
    """The worker's candidates of one step, views of its own buffers.

    scores: float32 [B, C], path probabilities by the drafter; tokens: int32 or int64 [B, C]; parent_list: int64 [B, at least
    K*(D-1)+1]; branching: K; levels: D.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    parent_list: torch.Tensor
    branching: int
    levels: int

    @property
    def parents(self) -> torch.Tensor:
        """int64 [B, C]: the candidate that each hangs from, ROOT for the first level."""
        index = torch.arange(self.scores.shape[1], device=self.scores.device)
        return torch.where(index < self.branching, ROOT, self.parent_list[:, index // self.branching])


def candidates_of(worker: Any, batch_size: int) -> Candidates:
    """Read the worker's buffers for the first batch_size requests. Raises ContractError when their widths do not fit."""
    scores = worker.history_score_buffer[:batch_size]
    branching, levels = int(worker.K), int(worker.max_draft_len)
    wanted = branching + branching * branching * (levels - 1)
    if scores.shape[1] != wanted:
        raise ContractError(
            f"the worker keeps {scores.shape[1]} candidates; K {branching} and max_draft_len {levels} make {wanted}: this "
            "version drafts another tree than the one that is known."
        )
    tokens = worker.history_draft_tokens_buffer[:batch_size]
    return Candidates(scores, tokens, worker.history_draft_tokens_parent_buffer[:batch_size], branching, levels)


def root_tokens(worker: Any, batch_size: int) -> torch.Tensor:
    """int64 [B], the last decided token of each request: the one that the tree hangs from."""
    decided = worker._accepted_tokens_buf[:batch_size]
    last = (worker._num_accepted_tokens_buf[:batch_size].long() - 1).clamp(0, decided.shape[1] - 1)
    return decided.gather(1, last[:, None])[:, 0].long()


def check_indices(indices: torch.Tensor, candidates: Candidates, nodes: int) -> None:
    """Raises ContractError unless indices, int64 [B, nodes], keep the contract. Waits for the device."""
    batch, count = candidates.scores.shape
    if indices.shape != (batch, nodes) or indices.dtype != torch.int64:
        raise ContractError(
            f"the choice is {indices.dtype} {list(indices.shape)}; int64 {[batch, nodes]} is needed: as many nodes for everybody."
        )
    outside = (indices < 0) | (indices >= count)
    if outside.any():
        request, place = outside.nonzero()[0].tolist()
        raise ContractError(
            f"request {request} names candidate {int(indices[request, place])}; 0 to {count - 1} is allowed."
        )
    falls = (indices[:, 1:] <= indices[:, :-1]).nonzero()
    if len(falls):
        request, place = falls[0].tolist()
        pair = indices[request, place : place + 2].tolist()
        raise ContractError(f"request {request} names candidate {pair[1]} after {pair[0]}; they must ascend.")
    chosen = torch.zeros(batch, count, dtype=torch.bool, device=indices.device).scatter_(1, indices, True)
    above = candidates.parents.gather(1, indices)
    orphans = (~chosen.gather(1, above.clamp(min=0)) & (above >= 0)).nonzero()
    if len(orphans):
        request, place = orphans[0].tolist()
        raise ContractError(
            f"request {request} names candidate {int(indices[request, place])} without its parent "
            f"{int(above[request, place])}; every chosen node needs its ancestors."
        )


def tree_parents(indices: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """int64 [B, g]: for each chosen node the place of its parent among the chosen, ROOT below the root."""
    above = candidates.parents.gather(1, indices)
    places = torch.searchsorted(indices.contiguous(), above.clamp(min=0).contiguous())
    return torch.where(above < 0, ROOT, places)
