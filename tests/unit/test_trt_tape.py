"""The tape that takes a graph's steps to the host: every step once, in order, with its gaps told, and nothing that waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ecospec_orchestrator.engine.tensorrt_llm.plugin.capture import CaptureShape, RouterCapture
from ecospec_orchestrator.engine.tensorrt_llm.plugin.step_tape import SLOTS, StepHead, StepTape, TapeShape

LAYERS, EXPERTS, TOP_K, LEVELS, NODES, REQUESTS, TOKENS = 2, 9, 3, 2, 3, 4, 20
ROWS = REQUESTS * (1 + NODES)
SHAPE = TapeShape(TOKENS, REQUESTS, NODES, LEVELS)


def worker_on(device: str) -> SimpleNamespace:
    integers = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)
    return SimpleNamespace(
        _accepted_tokens_buf=integers(REQUESTS + 1, LEVELS + 1),
        _num_accepted_tokens_buf=integers(REQUESTS + 1),
        _accepted_draft_indices_tensor=integers(REQUESTS + 1, LEVELS),
    )


class Steps:
    """Random steps through a tape, what they wrote, and what was handed over."""

    def __init__(self, wants_routes: bool = True) -> None:
        self.rng = np.random.default_rng(0)
        self.capture = RouterCapture(CaptureShape(LAYERS, EXPERTS, TOP_K, ROWS, LEVELS), "cpu")
        self.worker = worker_on("cpu")
        self.wants = wants_routes
        self.taken: list[dict[str, Any]] = []
        self.tape = StepTape(SHAPE, self.capture, self.worker, self.take, lambda: self.wants)
        self.written: list[dict[str, Any]] = []

    def take(self, record: Any) -> None:
        self.taken.append(
            {
                "ids": record.batch.request_ids,
                "contexts": record.batch.contexts,
                "offsets": record.batch.offsets.tolist(),
                "after_gap": record.after_gap,
                **{name: getattr(record.batch, name).tolist() for name in ("tokens", "positions")},
                **{name: getattr(record, name).tolist() for name in ("decided", "counts", "accepted", "parents")},
                "routes": None if record.routes is None else record.routes.tolist(),
            }
        )

    def step(self, contexts: int = 0, padding: int = 0, long: int = 0) -> None:
        requests = int(self.rng.integers(1, REQUESTS + 1 - padding))
        contexts = min(contexts, requests)
        lengths = [long or int(self.rng.integers(1, 5)) for _ in range(contexts)] + [1 + NODES] * (requests - contexts)
        ids = tuple(self.rng.integers(100, 1000, requests).tolist())
        self.tape.before_step(StepHead(ids, contexts, tuple(lengths)))
        rows = sum(lengths)
        tokens, positions = (self.rng.integers(0, 99, rows + padding * (1 + NODES)) for _ in range(2))
        self.tape.read(torch.from_numpy(tokens), torch.from_numpy(positions)[None])
        self.capture.routes.copy_(torch.from_numpy(self.rng.integers(0, EXPERTS, self.capture.routes.shape)))
        for tensor in vars(self.worker).values():
            tensor.copy_(torch.from_numpy(self.rng.integers(0, 9, tensor.shape)))
        parents = torch.from_numpy(self.rng.integers(-1, NODES, (requests + padding, NODES)))
        self.tape.chose(parents)
        self.written.append(
            {
                "ids": ids,
                "contexts": contexts,
                "offsets": np.cumsum([0, *lengths]).tolist(),
                "after_gap": False,
                "tokens": tokens[:rows].tolist(),
                "positions": positions[:rows].tolist(),
                "decided": self.worker._accepted_tokens_buf[:requests].tolist(),
                "counts": self.worker._num_accepted_tokens_buf[:requests].tolist(),
                "accepted": self.worker._accepted_draft_indices_tensor[:requests].tolist(),
                "parents": parents[:requests].tolist(),
                "routes": self.capture.routes[:, :rows].tolist() if self.wants else None,
            }
        )


def test_every_step_is_handed_over_once_as_it_was() -> None:
    steps = Steps()
    for number in range(60):
        steps.wants = number % 7 != 0
        steps.step(contexts=number % 3, padding=number % 2)
    assert len(steps.taken) == 58  # one step is running, and the copy of the one before it is looked at next
    for number, (taken, written) in enumerate(zip(steps.taken, steps.written, strict=False)):
        if (number + 1) % 7 == 0:  # whether routes are wanted is asked when the next step begins
            written["routes"] = None
        elif number % 7 == 0:
            written["routes"] = taken["routes"]
        assert taken == written
    assert steps.tape.missed == 0


class Copying:
    """In the place of a CUDA event whose copy has not ended yet."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def record(self) -> None: ...


def test_a_copy_that_takes_long_costs_steps_and_the_gap_is_told() -> None:
    steps = Steps()
    events = [Copying() for _ in range(SLOTS)]
    for slot, event in zip(steps.tape._free, events, strict=True):
        slot.event = event
    for _ in range(SLOTS + 4):
        steps.step()
    assert steps.taken == [] and steps.tape.missed == 3
    for event in events:
        event.ended = True
    steps.step()
    steps.step()
    steps.step()
    assert [t["ids"] for t in steps.taken[:SLOTS]] == [w["ids"] for w in steps.written[:SLOTS]]
    assert [t["after_gap"] for t in steps.taken] == [False] * SLOTS + [True, False]
    assert steps.taken[SLOTS]["ids"] == steps.written[SLOTS + 3]["ids"]


def test_a_step_of_more_tokens_than_there_is_room_for_is_a_gap() -> None:
    steps = Steps()
    steps.step()
    steps.step(contexts=REQUESTS, long=TOKENS + 1)
    for _ in range(3):
        steps.step()
    assert [t["after_gap"] for t in steps.taken] == [False, True] and steps.tape.missed == 1


def test_writing_the_tape_needs_no_value_and_no_host() -> None:
    capture = RouterCapture(CaptureShape(LAYERS, EXPERTS, TOP_K, ROWS, LEVELS), "meta")
    tape = StepTape(SHAPE, capture, worker_on("meta"), lambda _: None, lambda: True)
    tape.read(torch.zeros(8, dtype=torch.int32, device="meta"), torch.zeros(1, 8, dtype=torch.int32, device="meta"))
    tape.chose(torch.zeros(2, NODES, dtype=torch.int64, device="meta"))
    tape = Steps().tape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tape.read(*(mode.from_tensor(torch.zeros(shape, dtype=torch.int32)) for shape in ((8,), (1, 8))))
        tape.chose(mode.from_tensor(torch.zeros(2, NODES, dtype=torch.int64)))
