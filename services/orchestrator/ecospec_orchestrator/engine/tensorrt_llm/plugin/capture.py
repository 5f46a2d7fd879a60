"""Which experts the rows of a verify step were really routed to, taken where every MoE backend passes: at the call of the experts.

The gate itself cannot be hooked: gpt-oss computes the logits of small batches without calling its gate module. The experts module gets
the logits whatever computed them, and whatever backend it is (on Hopper, gpt-oss has the Triton one, which keeps its routing to
itself); the top k are taken once more by the layer's own routing method. Draft layers are not hooked, and rows that pad a batch for a
CUDA graph are left out. All state is allocated once, so the hooks can be part of a captured graph; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .step_file import FIXED

Append = Callable[[np.ndarray], None]
DECODER_LAYERS = ("layers", "block")  # of model.model; the second is gpt-oss


class CaptureError(ValueError):
    """A model whose routing cannot be seen; one sentence."""


@dataclass(frozen=True)
class CaptureShape:
    """max_rows: of a verify step, padding included; levels: most drafts that can be accepted in a step; ring: steps that are kept on
    the device until they are copied."""

    moe_layers: int
    experts: int
    top_k: int
    max_rows: int
    levels: int
    ring: int = 64

    @property
    def width(self) -> int:
        return FIXED + self.levels + 1 + self.moe_layers


def step_row(
    routes: torch.Tensor, real: torch.Tensor, lengths: torch.Tensor, levels: int, experts: int
) -> torch.Tensor:
    """int32 [3 + levels + 1 + layers]: requests, rows, tokens emitted, requests by accepted drafts, distinct experts by layer.

    routes: int [layers, rows, k], rows of all requests, as many each; real: int64 scalar, requests at the front that do not pad;
    lengths: int [requests], tokens that each emitted, at least 1.
    """
    layers, rows, _ = routes.shape
    requests, device = len(lengths), routes.device
    valid = torch.arange(rows, device=device) < real * (rows // requests)
    ids = torch.where(valid[None, :, None], routes.long(), experts)
    used = torch.zeros(layers, experts + 1, dtype=torch.bool, device=device).scatter_(1, ids.flatten(1), True)
    there = torch.arange(requests, device=device) < real
    drafts = torch.where(there, lengths.long() - 1, levels + 1).clamp(0, levels + 1)
    histogram = torch.zeros(levels + 2, dtype=torch.int64, device=device)
    histogram = histogram.index_add(0, drafts, torch.ones_like(drafts))[: levels + 1]
    head = torch.stack([real, real * (rows // requests), torch.where(there, lengths.long(), 0).sum()])
    return torch.cat([head, histogram, used[:, :experts].sum(1)]).int()


class RouterCapture:
    """routes: int16 [layers, max_rows, top_k], of the newest forward; rows: how many of them, 0 after one that had more."""

    def __init__(self, shape: CaptureShape, device: torch.device | str) -> None:
        self.shape, self.device = shape, torch.device(device)
        with torch.inference_mode(False):  # made in inference mode, they could not be written outside of it
            self.routes = torch.zeros(
                shape.moe_layers, shape.max_rows, shape.top_k, dtype=torch.int16, device=self.device
            )
            self.ring = torch.zeros(shape.ring, shape.width, dtype=torch.int32, device=self.device)
            self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
            self.real = torch.zeros((), dtype=torch.int64, device=self.device)
        self.rows = 0

    def routed(self, layer: int, module: Any, logits: torch.Tensor) -> None:
        """One MoE layer's logits [rows, experts], before its experts run."""
        rows = logits.shape[0]
        self.rows = rows if rows <= self.shape.max_rows else 0
        if self.rows:
            experts, _ = module.routing_method.apply(logits)
            self.routes[layer, :rows].copy_(experts[:, : self.shape.top_k])

    def finished(self, contexts: int, lengths: torch.Tensor) -> None:
        """The step's tokens are accepted. A step that also reads prompts is not counted: its rows are not verification's."""
        if contexts or not self.rows or not len(lengths) or self.rows % len(lengths):
            return
        row = step_row(self.routes[:, : self.rows], self.real, lengths, self.shape.levels, self.shape.experts)
        slot = (self.steps % self.shape.ring).view(1)
        self.ring.index_copy_(0, slot, row[None])
        self.steps += 1


def experts_modules(model: nn.Module, layers: int) -> list[nn.Module]:
    """The experts of the target's MoE layers, in order. model: the engine's causal model, whose first `layers` decoder layers are the
    target's own (multi-token prediction appends its layers behind them). Raises CaptureError where a layer's cannot be told."""
    found: list[nn.Module] = []
    inner = getattr(model, "model", None)
    lists = (getattr(inner, name, None) for name in DECODER_LAYERS)
    decoder: Any = next((layers_of for layers_of in lists if layers_of is not None), None)
    if decoder is None or len(decoder) < layers:
        raise CaptureError(
            f"{type(model).__name__} has no model.{' or model.'.join(DECODER_LAYERS)} with its {layers} layers."
        )
    for number in range(layers):
        candidates = [
            module
            for name, module in decoder[number].named_modules()
            if name.rpartition(".")[2] == "experts" and hasattr(module, "routing_method")
        ]
        if len(candidates) > 1:
            raise CaptureError(
                f"layer {number} of {type(model).__name__} has {len(candidates)} modules of experts; one is known."
            )
        found.extend(candidates)
    if not found:
        raise CaptureError(f"{type(model).__name__} has no experts with a routing method in its {layers} layers.")
    return found


def attach(
    capture: Callable[[torch.device], RouterCapture], experts: Sequence[nn.Module], worker: nn.Module
) -> list[Any]:
    """Hook the layers and the worker; returns the handles. capture: gives the state, made at the first call, when the model has
    moved to its device (engines build models on the meta device)."""

    def hook(layer: int) -> Callable[..., None]:
        def before(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            logits = kwargs["router_logits"] if "router_logits" in kwargs else args[1]
            capture(logits.device).routed(layer, module, logits)

        return before

    contexts = 0

    def begun(_worker: nn.Module, _args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        nonlocal contexts  # read before the worker drafts, for which it calls every request a generating one
        contexts = int(kwargs["attn_metadata"].num_contexts)

    def after(
        _worker: nn.Module, _args: Sequence[Any], _kwargs: dict[str, Any], output: dict[str, torch.Tensor]
    ) -> None:
        lengths = output["new_tokens_lens"]
        capture(lengths.device).finished(contexts, lengths)

    handles = [m.register_forward_pre_hook(hook(layer), with_kwargs=True) for layer, m in enumerate(experts)]
    handles.append(worker.register_forward_pre_hook(begun, with_kwargs=True))
    handles.append(worker.register_forward_hook(after, with_kwargs=True))
    return handles


class StepFeed:
    """Copies finished steps from the device ring to append, every period_steps steps, without waiting: a copy begun in one step is
    looked at in a later one. missed: steps that the ring lost before they were copied."""

    def __init__(self, capture: RouterCapture, append: Append, period_steps: int = 16) -> None:
        self._capture, self._append, self._period = capture, append, period_steps
        pin = capture.device.type == "cuda"
        with torch.inference_mode(False):  # as RouterCapture
            self._ring = torch.empty(capture.ring.shape, dtype=torch.int32, pin_memory=pin)
            self._steps = torch.zeros((), dtype=torch.int64, pin_memory=pin)
        self._event: Any = torch.cuda.Event() if pin else None
        self._copying = False
        self._calls = self._written = self.missed = 0

    def step(self) -> None:
        """Before every step, in the thread that launches it."""
        self._calls += 1
        if self._copying and (self._event is None or self._event.query()):
            self._hand_over()
        if not self._copying and self._calls % self._period == 0:
            self._ring.copy_(self._capture.ring, non_blocking=True)
            self._steps.copy_(self._capture.steps, non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._copying = True

    def _hand_over(self) -> None:
        self._copying = False
        steps, slots = int(self._steps), self._capture.shape.ring
        first = max(self._written, steps - slots)
        self.missed += first - self._written
        for step in range(first, steps):
            row = self._ring[step % slots].numpy()
            if row[0] > 0:  # nothing but padding, while the engine warms up
                self._append(row.copy())
        self._written = steps
