"""A step in eager mode on rank 0: reads the worker's inputs, keeps the texts, lets the selector choose, and samples traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from .capture import RouterCapture
from .select_eager import EagerSelector
from .select_graph import Stock
from .texts import Batch, Texts
from .traces import TraceSampler


class EagerStep:
    """sampler, capture: None without traces; capture holds the routes of the step."""

    def __init__(self, selector: EagerSelector, texts: Texts, sampler: TraceSampler | None) -> None:
        self._selector, self._texts, self._sampler = selector, texts, sampler
        self.capture: RouterCapture | None = None
        self._batch: Batch | None = None

    def attach(self, worker: nn.Module) -> None:
        worker.register_forward_pre_hook(self._begun, with_kwargs=True)
        worker.register_forward_hook(self._finished, with_kwargs=True)

    def __call__(self, worker: Any, batch_size: int, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
        counts = worker._num_accepted_tokens_buf[:batch_size].cpu().numpy()
        self._texts.accepted(worker._accepted_tokens_buf[:batch_size].cpu().numpy(), counts)
        return self._selector(worker, batch_size, stock)

    def _begun(self, _worker: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        spec, attention = kwargs["spec_metadata"], kwargs["attn_metadata"]
        tokens = kwargs["input_ids"].flatten().cpu().numpy()
        positions = kwargs["position_ids"].flatten().cpu().numpy()
        self._batch = Batch.of(spec.request_ids, int(attention.num_contexts), spec.seq_lens, tokens, positions)
        self._texts.begin(self._batch)

    def _finished(self, worker: Any, _args: Any, _kwargs: dict[str, Any], _output: Any) -> None:
        batch, self._batch = self._batch, None
        if batch is None or self._sampler is None:
            return
        accepted = worker._accepted_draft_indices_tensor[: len(batch.request_ids)].cpu().numpy()
        capture = self.capture
        known = capture is not None and capture.rows == batch.offsets[-1]

        def routes(first: int, end: int) -> np.ndarray:
            assert capture is not None
            return np.ascontiguousarray(capture.routes[:, first:end].transpose(0, 1).cpu().numpy())

        self._sampler.observe(batch, self._texts, accepted, routes if known else None)
        if self._selector.last is not None:
            self._sampler.chosen(batch, self._selector.last)
