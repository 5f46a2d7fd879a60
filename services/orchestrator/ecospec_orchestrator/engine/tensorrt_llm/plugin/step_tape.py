"""What a step read and decided, from the device to the host without a wait: for traces where steps are replayed as graphs.

What the tape writes is part of the captured graph and goes to buffers that never move. Before the next step is launched it is copied, in
the order of the stream, to one of a few slots of host memory, and handed over once the copy has ended, in the order of the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .capture import RouterCapture
from .texts import Batch, Texts
from .traces import TraceSampler

SLOTS = 4


@dataclass(frozen=True)
class TapeShape:
    """max_tokens: rows of a step, prompts included; max_requests: of a step, padding included; nodes: of a tree; levels: most drafts
    that can be accepted."""

    max_tokens: int
    max_requests: int
    nodes: int
    levels: int


@dataclass(frozen=True)
class StepHead:
    """A step as the host knows it beforehand: its requests without padding, the contexts that read their prompt first, and the rows of
    each."""

    request_ids: tuple[int, ...]
    contexts: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """A finished step; arrays are views that hold during the call they are handed over in. decided: int32 [requests, levels + 1], of
    which the first counts [requests] are the tokens emitted; accepted: int32 [requests, levels], as TraceSampler.observe takes them;
    parents: int32 [requests, nodes], of the trees that the next step verifies; routes: int16 [layers, rows, top_k], None where they
    were not asked for or there was no room for them; after_gap: steps before this one are missing."""

    batch: Batch
    decided: np.ndarray
    counts: np.ndarray
    accepted: np.ndarray
    parents: np.ndarray
    routes: np.ndarray | None
    after_gap: bool

    def routes_of(self, first: int, end: int) -> np.ndarray:
        """int16 [rows, layers, top_k] of these rows, where there are routes."""
        assert self.routes is not None
        return np.ascontiguousarray(self.routes[:, first:end].transpose(1, 0, 2))


@dataclass
class _Slot:
    tensors: dict[str, torch.Tensor]
    event: Any = None  # None on the CPU, where copies have ended when they begin
    head: StepHead | None = None
    routed: bool = False
    after_gap: bool = False


class StepTape:
    """missed: steps that found no free slot."""

    def __init__(
        self,
        shape: TapeShape,
        capture: RouterCapture,
        worker: Any,
        take: Callable[[StepRecord], None],
        wants_routes: Callable[[], bool],
    ) -> None:
        """worker: the engine's tree worker, whose buffers of what was accepted stay where they are."""
        self._shape, self._capture, self._worker = shape, capture, worker
        self._take, self._wants_routes = take, wants_routes
        pin = capture.device.type == "cuda"
        with torch.inference_mode(False):  # made in inference mode, they could not be written outside of it
            self._tokens = torch.zeros(shape.max_tokens, dtype=torch.int32, device=capture.device)
            self._positions = torch.zeros_like(self._tokens)
            self._parents = torch.zeros(shape.max_requests, shape.nodes, dtype=torch.int32, device=capture.device)
            self._free = [
                _Slot(
                    {
                        name: torch.zeros(t.shape, dtype=t.dtype, pin_memory=pin)
                        for name, t in self._on_device().items()
                    },
                    torch.cuda.Event() if pin else None,
                )
                for _ in range(SLOTS)
            ]
        self._copied: deque[_Slot] = deque()
        self._head: StepHead | None = None  # of the step that was launched last
        self._gap = False
        self.missed = 0

    def read(self, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """The worker's inputs, padding included. Part of the graph."""
        rows = tokens.numel()
        if rows <= self._shape.max_tokens:
            self._tokens[:rows].copy_(tokens.flatten())
            self._positions[:rows].copy_(positions.flatten()[:rows])

    def chose(self, parents: torch.Tensor) -> None:
        """int64 [requests, nodes], as contract.tree_parents gives them. Part of the graph."""
        self._parents[: len(parents)].copy_(parents)

    def before_step(self, head: StepHead) -> None:
        """In the thread that launches the step, before it does."""
        while self._copied and (self._copied[0].event is None or self._copied[0].event.query()):
            slot = self._copied.popleft()
            self._hand_over(slot)
            self._free.append(slot)
        last, self._head = self._head, head
        if last is None or not last.request_ids:
            return
        if not self._free or sum(last.lengths) > self._shape.max_tokens:
            self.missed += 1
            self._gap = True
            return
        self._copy(self._free.pop(), last)

    def _copy(self, slot: _Slot, head: StepHead) -> None:
        rows = sum(head.lengths)
        slot.routed = rows <= self._capture.shape.max_rows and self._wants_routes()
        slot.head, slot.after_gap, self._gap = head, self._gap, False
        for name, tensor in self._on_device().items():
            if name == "routes":
                if slot.routed:
                    slot.tensors[name][:, :rows].copy_(tensor[:, :rows], non_blocking=True)
            else:
                slot.tensors[name].copy_(tensor, non_blocking=True)
        if slot.event is not None:
            slot.event.record()
        self._copied.append(slot)

    def _hand_over(self, slot: _Slot) -> None:
        head = slot.head
        assert head is not None
        rows, requests = sum(head.lengths), len(head.request_ids)
        found = {name: tensor.numpy() for name, tensor in slot.tensors.items()}
        batch = Batch.of(
            head.request_ids, head.contexts, head.lengths, found["tokens"][:rows], found["positions"][:rows]
        )
        decided, counts, accepted, parents = (
            found[name][:requests] for name in ("decided", "counts", "accepted", "parents")
        )
        routes = found["routes"][:, :rows] if slot.routed else None
        self._take(StepRecord(batch, decided, counts, accepted, parents, routes, slot.after_gap))

    def _on_device(self) -> dict[str, torch.Tensor]:
        worker, most = self._worker, self._shape.max_requests
        return {
            "tokens": self._tokens,
            "positions": self._positions,
            "parents": self._parents,
            "decided": worker._accepted_tokens_buf[:most],
            "counts": worker._num_accepted_tokens_buf[:most],
            "accepted": worker._accepted_draft_indices_tensor[:most],
            "routes": self._capture.routes,
        }


def sample(record: StepRecord, texts: Texts, sampler: TraceSampler) -> None:
    """Brings one step to the sampler, with the texts that it continues."""
    if record.after_gap:
        sampler.lost()
    texts.begin(record.batch)
    texts.accepted(record.decided, record.counts)
    sampler.observe(record.batch, texts, record.accepted, None if record.routes is None else record.routes_of)
    sampler.chosen(record.batch, record.parents.copy())  # kept beyond the call
