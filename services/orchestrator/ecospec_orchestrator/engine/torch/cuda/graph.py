"""Steps of a fixed shape: padded rows, captured once per row count, replayed afterwards.

A CUDA graph repeats the very launches that it recorded, on the same memory, so a step of 13 rows runs as one of 16: inputs are
copied into static buffers, the rows behind them are padding, and only the real rows of the results are handed out. Who computes
what between is the step's own business, but it must neither wait for the device nor depend on values on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
WARM_UPS = 3  # runs before a capture: the first compile kernels and make libraries allocate what they keep
NO_EXPERT = -1  # where a padding row is routed: nowhere

Tensors = Mapping[str, torch.Tensor]
Step = Callable[[Tensors], Tensors]


class CaptureBackend(Protocol):
    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record run() -> (replay, the static outputs that every replay overwrites)."""
        ...


class CudaCapture:
    """Records CUDA graphs of one device that share a memory pool. They must run one after the other, which one engine thread
    does, and what one leaves in its outputs is gone when another is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = run()
        return graph.replay, outputs


@dataclass(frozen=True)
class _Captured:
    inputs: dict[str, torch.Tensor]
    replay: Callable[[], None]
    outputs: Tensors


class StepGraphs:
    """Runs `step` for any number of rows by graphs of a few row counts.

    step: named tensors with one entry per row in their first dimension -> the same; its results must not depend on other rows
    than their own unless the inputs say so. paddings: what a padding row holds, per input. The step always gets one more
    input, "real": bool [rows], False for padding. Graphs are captured on first use; warm_up() makes that happen at start.
    More rows than the largest count run without a graph.
    """

    def __init__(
        self,
        step: Step,
        paddings: Mapping[str, float],
        backend: CaptureBackend,
        row_counts: Sequence[int] = ROW_COUNTS,
    ) -> None:
        if not row_counts or min(row_counts) < 1:
            raise ValueError(f"row_counts is {tuple(row_counts)}; give at least one count, each at least 1.")
        self.step, self.backend = step, backend
        self.paddings = {**paddings, "real": False}
        self.row_counts = tuple(sorted(set(row_counts)))
        self._captured: dict[tuple[object, ...], _Captured] = {}

    def __call__(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The step's results for these rows, copies. Raises ValueError for inputs that do not fit each other."""
        rows = self._rows(inputs)
        first = next(iter(inputs.values()))
        inputs = {**inputs, "real": torch.ones(rows, dtype=torch.bool, device=first.device)}
        padded = padded_rows(rows, self.row_counts)
        if padded is None:
            return dict(self.step(inputs))
        captured = self._graph(inputs, padded)
        for name, static in captured.inputs.items():
            static[:rows].copy_(inputs[name])
            static[rows:].fill_(self.paddings[name])
        captured.replay()
        return {name: output[:rows].clone() for name, output in captured.outputs.items()}

    def warm_up(self, one_row: Tensors) -> None:
        """Capture every row count now, largest first (later ones then fit into its memory). one_row: inputs of one row."""
        for count in reversed(self.row_counts):
            self({name: tensor.expand(count, *tensor.shape[1:]) for name, tensor in one_row.items()})

    def _rows(self, inputs: Tensors) -> int:
        wanted = set(self.paddings) - {"real"}
        if set(inputs) != wanted:
            raise ValueError(f"the step takes the inputs {sorted(wanted)}; it was given {sorted(inputs)}.")
        counts = {name: len(tensor) for name, tensor in inputs.items()}
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise ValueError(f"the inputs have {counts} rows; all need the same number, at least 1.")
        return next(iter(counts.values()))

    def _graph(self, inputs: Tensors, padded: int) -> _Captured:
        # Another row shape or type is another graph.
        key = (padded, *((name, tensor.shape[1:], tensor.dtype) for name, tensor in sorted(inputs.items())))
        if key not in self._captured:
            static = {
                name: torch.full(
                    (padded, *tensor.shape[1:]), self.paddings[name], dtype=tensor.dtype, device=tensor.device
                )
                for name, tensor in inputs.items()
            }
            replay, outputs = self.backend.capture(lambda: self.step(static))
            self._captured[key] = _Captured(static, replay, outputs)
        return self._captured[key]


def padded_rows(rows: int, row_counts: Sequence[int]) -> int | None:
    """The smallest of the ascending counts that holds so many rows, None beyond the last."""
    return next((count for count in row_counts if count >= rows), None)


def only_real(index: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Expert choices int64 [rows, k] with those of padding rows (real: bool [rows]) replaced by NO_EXPERT, which the experts
    kernel reads nothing for and a count of distinct experts must leave out."""
    return index.masked_fill(~real[:, None], NO_EXPERT)
