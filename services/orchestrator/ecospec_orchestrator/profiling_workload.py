"""The load under which a system is profiled: our own prompts in batches of several sizes."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .core import Request, SamplingParams, TokenEvent
from .scheduler import Scheduler
from .selection.cost import ProfileError, Sample

ROUND_SECONDS = 30.0  # through all batch sizes; several rounds even out what else the machine does
MAX_TOKENS = 256
PROMPTS = (
    "A lighthouse keeper writes in her diary about the night on which the lamp went out.",
    "def median(values):\n    ordered = sorted(values)\n",
    "Three friends share 84 marbles so that the second has twice as many as the first. How many",
    "Bread rises because yeast turns sugar into gas. The baker should first",
    '{"city": "Lisbon", "population": 545000, "rivers": ["Tagus"], "mayor":',
    "Dear neighbours, next Saturday the street will be closed from nine in the morning because",
    "The difference between a comet and an asteroid is",
    "for (int i = 0; i < rows; ++i) {\n    for (int j = 0; j < columns; ++j) {\n",
)
LENGTHS = (1, 3, 1, 8, 2, 1, 5)  # times that a prompt is repeated, in turn: contexts of different length


class SystemLike(Protocol):
    """The parts of a built system that are measured."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def tokenizer(self) -> Any: ...


class Workload:
    """Our own prompts in batches that shrink from the largest size to the smallest: a batch that shrinks needs no new
    prefill, which is not what is measured. samples: grows by one with every measured step."""

    def __init__(
        self, system: SystemLike, samples: Sequence[Sample], seconds: float, progress: Callable[[str], None]
    ) -> None:
        self._scheduler, self._tokenizer, self._samples = system.scheduler, system.tokenizer, samples
        self._seconds, self._progress = seconds, progress
        self._began = self._shown = time.monotonic()
        self._submitted = 0
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._running: list[str] = []
        self._cancelled: set[str] = set()

    def run(self, sizes: Sequence[int]) -> None:
        """Returns when the time is over and all requests have ended. Larger batches get more time: their steps take longer."""
        rounds = max(1, round(self._seconds / ROUND_SECONDS))
        shares = [(size, 1 + math.log2(size)) for size in sorted(sizes, reverse=True)] * rounds
        whole, until = sum(share for _, share in shares), self._began
        for size, share in shares:
            until += self._seconds * share / whole
            self._keep(size, until)
        self._cancel(0)
        while self._running or self._cancelled:
            self._wait()

    def _keep(self, size: int, until: float) -> None:
        self._cancel(size)
        while time.monotonic() < until:
            while len(self._running) < size:
                request = self._request()
                self._running.append(request.request_id)
                self._scheduler.submit(request, self._events.put)
            self._wait()

    def _cancel(self, size: int) -> None:
        """Down to so many requests, the oldest ones first."""
        for name in self._running[: max(0, len(self._running) - size)]:
            self._running.remove(name)
            self._cancelled.add(name)
            self._scheduler.cancel(name)

    def _wait(self) -> None:
        """For one event. Raises ProfileError when a request ended that was not meant to."""
        self._show()
        try:
            event = self._events.get(timeout=0.1)
        except queue.Empty:
            return
        name = event.request_id
        if event.finish_reason == "error" or (event.finish_reason == "abort" and name not in self._cancelled):
            raise ProfileError(f"The engine stopped while it was profiled: {event.error or 'it was shut down'}")
        if event.finish_reason is not None:
            self._cancelled.discard(name)
            if name in self._running:
                self._running.remove(name)

    def _request(self) -> Request:
        n, self._submitted = self._submitted, self._submitted + 1
        text = "\n".join([PROMPTS[n % len(PROMPTS)]] * LENGTHS[n % len(LENGTHS)])
        longest = self._scheduler.limits.max_context_tokens
        max_tokens = min(MAX_TOKENS, longest // 2)
        tokens = tuple(self._tokenizer(text)["input_ids"])[: longest - max_tokens]
        sampling = SamplingParams(temperature=float(n % 2), seed=n)
        return Request(f"profile-{n}", tokens, max_tokens, sampling)

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= 1:
            self._shown = now
            done, steps = min(1.0, (now - self._began) / self._seconds), len(self._samples)
            self._progress(f"profiling: {done:.0%}, {self._seconds * (1 - done):.0f} s left, {steps} steps measured")
