"""Node selection with the host in the loop: rank 0 asks the predictor, chooses, and tells the other ranks.

Only without CUDA graphs and without the overlap scheduler. It is the literal reading of the design, for traces, acceptance and counts of
experts; the time that it takes says nothing about the product. Nothing that happens on rank 0 keeps the others waiting: when the
predictor is late, busy or wrong, the engine's own choice is what rank 0 tells.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....core import DraftTree, Footprints
from ....footprint.base import FootprintUnavailableError, TreeContext
from ...greedy import DevicePack
from .contract import Candidates, candidates_of, check_indices, root_tokens, tree_parents
from .ranks import Ranks
from .select_graph import Pricing, Stock, chosen_indices, likeliest, pack_considered, path_probabilities

logger = logging.getLogger(__name__)

# One Footprints [1 + N, layers, words] per tree, the root first.
Predict = Callable[[Sequence[TreeContext]], list[Footprints]]
Contexts = Callable[[int], tuple[str, Sequence[int]]]  # request's place in the batch -> its id and its decided tokens


class LateError(Exception):
    """No answer within the deadline. reason: "late", or "busy" while an earlier call still runs."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the predictor is {reason}")
        self.reason = reason


class Waiter:
    """Runs calls in a thread and waits for each no longer than seconds; one call at a time, so that late ones do not pile up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], Any]) -> Any:
        """The call's result or exception; raises LateError."""
        if self._thread is not None and self._thread.is_alive():
            raise LateError("busy")
        answer: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                answer.append((call(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                answer.append((None, error))

        self._thread = threading.Thread(target=work, name="ecospec-predict", daemon=True)
        self._thread.start()
        self._thread.join(self._seconds)
        if not answer:
            raise LateError("late")
        result, error = answer[0]
        if error is not None:
            raise error
        return result


class EagerSelector:
    """predict: rank 0's only. fallbacks: how often the engine's own choice was taken, by reason ("late", "busy", "error" and
    those of FootprintUnavailableError); chosen: how often ours was; both on rank 0. last: rank 0's newest choice as the places of parents, int64 [B, g], ROOT below the
    root: the trees that the next step verifies."""

    def __init__(
        self,
        ranks: Callable[[], Ranks],
        predict: Predict | None,
        deadline_seconds: float,
        pricing: Pricing,
        contexts: Contexts | None = None,
    ) -> None:
        """ranks: asked in the first step, when all ranks are there to meet."""
        self._ranks, self._predict, self._pricing, self._contexts = ranks, predict, pricing, contexts
        self._waiter = Waiter(deadline_seconds)
        self.fallbacks: Counter[str] = Counter()
        self.chosen = 0
        self.last: np.ndarray | None = None

    def __call__(self, worker: Any, batch_size: int, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
        """What the worker's method returns: (tokens [B, g], indices int64 [B, g]). Waits for the device, the predictor and the
        other ranks."""
        tokens, indices = stock()
        told = indices.cpu().long().contiguous()
        ranks = self._ranks()
        if ranks.rank == 0 and self._predict is not None:
            told = self._choose(worker, batch_size, told)
        told = ranks.broadcast(told)
        if ranks.rank == 0:
            self.last = tree_parents(told, _on_host(candidates_of(worker, batch_size))).numpy()
        indices = told.to(indices.device)
        return worker.history_draft_tokens_buffer[:batch_size].gather(1, indices).to(tokens.dtype), indices

    def _choose(self, worker: Any, batch_size: int, stock: torch.Tensor) -> torch.Tensor:
        try:
            indices = self._priced(worker, batch_size, stock.shape[1])
        except (LateError, FootprintUnavailableError) as none:
            self.fallbacks[none.reason] += 1
            return stock
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for an answer
            if not self.fallbacks["error"]:
                logger.warning(
                    "The engine's own choice is taken, because ours failed: %s: %s", type(error).__name__, error
                )
            self.fallbacks["error"] += 1
            return stock
        self.chosen += 1
        return indices

    def _priced(self, worker: Any, batch_size: int, nodes: int) -> torch.Tensor:
        assert self._predict is not None
        candidates = _on_host(candidates_of(worker, batch_size))
        values = path_probabilities(candidates)
        considered = likeliest(values, min(values.shape[1], max(self._pricing.considered, nodes)))
        trees = pack_considered(candidates, considered, values)
        asked = self._questions(candidates, considered, trees, root_tokens(worker, batch_size).tolist())
        predict = self._predict
        footprints = self._waiter.run(lambda: predict(asked))
        pack = priced_pack(trees, footprints, considered.shape)
        indices = chosen_indices(pack, considered, nodes, self._pricing)
        check_indices(indices, candidates, nodes)
        return indices

    def _questions(
        self, candidates: Candidates, considered: torch.Tensor, trees: DevicePack, roots: Sequence[int]
    ) -> list[TreeContext]:
        batch, count = considered.shape
        tokens = candidates.tokens.gather(1, considered).numpy().astype(np.int32)
        chances = trees.values.view(batch, count + 1)[:, 1:].numpy().astype(np.float32)
        start = np.arange(batch)[:, None] * (count + 1)
        parents = (trees.parents.view(batch, count + 1)[:, 1:].numpy() - start - 1).astype(np.int32)
        asked = []
        for at in range(batch):
            tree = DraftTree(tokens[at], parents[at], chances[at], depths_of(parents[at]))
            request_id, context = self._contexts(at) if self._contexts is not None else ("", [roots[at]])
            asked.append(TreeContext(context, tree, None, request_id))
        return asked


def priced_pack(trees: DevicePack, footprints: Sequence[Footprints], shape: Sequence[int]) -> DevicePack:
    """The trees with their footprints. shape: (B, M). Raises ValueError for footprints that do not fit."""
    batch, count = shape
    if len(footprints) != batch or any(len(f.experts) != count + 1 or len(f.known) != count + 1 for f in footprints):
        raise ValueError(
            f"the predictor answered for {[len(f.experts) for f in footprints]} nodes; {count + 1} for each of {batch} trees are "
            "needed, roots included."
        )
    experts = np.concatenate([f.experts.reshape(count + 1, -1) for f in footprints])
    bits = torch.from_numpy(np.ascontiguousarray(experts, np.uint64).view(np.int64))
    known = torch.from_numpy(np.concatenate([f.known for f in footprints]).astype(np.bool_))
    return DevicePack(bits, known, trees.values, trees.parents, trees.tree)


def depths_of(parents: np.ndarray) -> np.ndarray:
    """int32 [N], the first level is 1; parents come before children."""
    depths = np.zeros(len(parents), np.int32)
    for node, parent in enumerate(parents.tolist()):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
    return depths


def _on_host(candidates: Candidates) -> Candidates:
    return Candidates(
        candidates.scores.cpu(),
        candidates.tokens.cpu(),
        candidates.parent_list.cpu(),
        candidates.branching,
        candidates.levels,
    )
