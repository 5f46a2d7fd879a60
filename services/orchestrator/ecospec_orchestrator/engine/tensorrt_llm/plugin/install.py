"""Puts the plug-in into TensorRT-LLM: model classes of our own, registered in the place of the engine's.

The engine builds a model, the model builds its speculation worker, and the engine finds the worker as model.spec_worker. Our model
classes are the engine's own, with one thing more at the end of __init__: the worker gets a class that chooses nodes our way. It stays the
object that the engine built, with its buffers, its draft model and its place in the model's epilogue. Registering must happen in every
executor process before the model is built: the registration module beside this package does it, when a rank imports it (MPI), and
ray_extension.py with Ray.

The second seam is the preparation of each step, which the engine runs on every rank in the same order, graph or not: the spec
metadata's prepare().
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import capture as routing
from .config import PluginConfig
from .contract import candidates_of, tree_parents
from .eager_step import EagerStep
from .ranks import Ranks, check_mapping, join
from .select_eager import EagerSelector, Predict
from .select_graph import GraphSelector, Pricing, Stock
from .spool import TraceSpool
from .step_file import StepShape, StepWriter
from .step_tape import StepHead, StepTape, TapeShape, sample
from .texts import Texts
from .token_state import TableArrays, TableFeed, TableFile, TableSize, TokenState
from .traces import TraceSampler

ARCHITECTURES = {  # as in a checkpoint's config.json -> the engine's module, which has a class of that name
    "Qwen3MoeForCausalLM": "modeling_qwen3_moe",
    "GptOssForCausalLM": "modeling_gpt_oss",
    "DeepseekV3ForCausalLM": "modeling_deepseekv3",
}
TREE_WORKERS = ("Eagle3OneModelDynamicTreeWorker",)
METADATA = (
    ("eagle3", "Eagle3OneModelSpecMetadata"),
    ("mtp", "MTPSpecMetadata"),
)  # the second for several MTP modules only
PADDING_IDS = 4096  # below the highest request id: one per draft length pads batches for graphs

_current: Plugin | None = None  # of this process; the engine may build its model twice


class InstallError(RuntimeError):
    """An engine that the plug-in cannot work in; one sentence."""


class Plugin:
    """The plug-in on one rank. highest_id: the request id that pads batches for graphs."""

    def __init__(self, config: PluginConfig, rank: int, count: int, highest_id: int) -> None:
        self.config, self._rank, self._count = config, rank, count
        # Real ids lie between these and those of the warm-up: the engine counts from max_batch_size.
        self._least_padding_id = highest_id - PADDING_IDS
        geometry = config.geometry
        self._pricing = Pricing(config.eps, geometry.moe_layers * geometry.top_k, config.considered)
        self._state: TokenState | None = None
        self._feed: TableFeed | None = None
        self._graph: GraphSelector | None = None
        self._eager: EagerSelector | EagerStep | None = None
        self.capture: routing.RouterCapture | None = None
        self._steps: routing.StepFeed | None = None
        self._tape: StepTape | None = None

    @cached_property
    def ranks(self) -> Ranks:
        """Meets the other ranks when it is first asked for: all of them ask in the same step."""
        return join(self._rank, self._count, self.config.rendezvous)

    def attach(self, model: Any, worker: Any) -> None:
        """Take the choice of nodes, and hook what is captured (on rank 0: all ranks route alike). Raises InstallError and
        CaptureError."""
        if self.config.mode != "stock":
            if type(worker).__name__ not in TREE_WORKERS:
                raise InstallError(
                    f"the engine's worker is {type(worker).__name__}; node selection needs {' or '.join(TREE_WORKERS)}: set "
                    "use_dynamic_tree, or leave the choice to the engine."
                )
            worker.__class__ = worker_class(type(worker))
            worker.ecospec_select = self.select
        if self._rank == 0 and (self.config.steps_file or self.config.traces_folder):
            layers = int(model.config.num_hidden_layers)
            experts = routing.experts_modules(model, layers)
            if len(experts) != self.config.geometry.moe_layers:
                raise InstallError(
                    f"the engine's model has {len(experts)} MoE layers; the target {self.config.geometry.name} has "
                    f"{self.config.geometry.moe_layers}: the launcher describes another model."
                )
            routing.attach(self._capture_on, experts, worker)
        if self._rank == 0 and self.config.mode == "graph" and self.config.traces_folder:
            worker.register_forward_pre_hook(self._read_tape, with_kwargs=True)
        if self._rank == 0 and self.config.mode == "eager":
            # The predictor needs the texts; hooked after the capture, so that a step's routes are there when it ends.
            self._eager_step.attach(worker)

    def select(self, worker: Any, batch_size: int, stock: Stock) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.mode == "graph":
            if self._graph is None:  # in a warm-up, before any graph is captured
                self._state = TokenState(self._table_size, worker.history_score_buffer.device)
                self._graph = GraphSelector(self._state, self._pricing)
            tokens, indices = self._graph(worker, batch_size, stock)
            if self._tape is not None:
                self._tape.chose(tree_parents(indices, candidates_of(worker, batch_size)))
            return tokens, indices
        if self._eager is None:
            self._eager = self._eager_step if self._rank == 0 else self._selector(None, None)
        return self._eager(worker, batch_size, stock)

    def before_step(self, request_ids: Sequence[int], lengths: Sequence[int], generations: int) -> None:
        """On every rank, before the work of a step is launched or its graph replayed. lengths: rows of each request; generations:
        requests, at the end, that do not read their prompt."""
        if self._state is not None:
            if self._feed is None:
                path = Path(self.config.table)
                read = TableFile(path, self._load_table)
                self._feed = TableFeed(self._state, self.ranks, self.config.table_period_steps, read)
            self._feed.step()
        if self.capture is not None:
            real = sum(self.config.max_batch_size <= number < self._least_padding_id for number in request_ids)
            self.capture.real.fill_(real)
            if self._steps is not None:
                self._steps.step()
            if self._tape is not None:
                contexts = len(request_ids) - generations
                self._tape.before_step(StepHead(tuple(request_ids[:real]), contexts, tuple(lengths[:real])))

    def status(self) -> dict[str, Any]:
        return {"mode": self.config.mode, "rank": self._rank, "ranks": self._count, "pid": os.getpid()}

    @property
    def _table_size(self) -> TableSize:
        g = self.config.geometry
        return TableSize(g.vocab_size, g.moe_layers, g.experts, g.top_k, self.config.table_rows)

    def _load_table(self, path: Path) -> TableArrays:
        from ecospec_proto.token_table import TokenTable  # here, because it needs safetensors

        table = TokenTable.load(path, self.config.geometry)
        return TableArrays(table.token_ids, table.experts, table.popular)

    def _capture_on(self, device: torch.device) -> routing.RouterCapture:
        if self.capture is None:
            c, g = self.config, self.config.geometry
            rows = c.max_batch_size * (1 + c.nodes)
            shape = routing.CaptureShape(g.moe_layers, g.experts, g.top_k, rows, c.levels)
            self.capture = routing.RouterCapture(shape, device)
            if c.mode == "eager":
                self._eager_step.capture = self.capture
            if c.steps_file:
                writer = StepWriter(Path(c.steps_file), StepShape(g.moe_layers, c.levels))
                self._steps = routing.StepFeed(self.capture, writer.append)
        return self.capture

    def _read_tape(self, worker: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs["input_ids"]
        if self._tape is None:  # in a warm-up, as in select()
            c, texts, sampler = self.config, Texts(), self._sampler()
            self._tape = StepTape(
                TapeShape(c.max_tokens, c.max_batch_size, c.nodes, c.levels),
                self._capture_on(tokens.device),
                worker,
                lambda record: sample(record, texts, sampler),
                lambda: sampler.wants_routes,
            )
        self._tape.read(tokens, kwargs["position_ids"])

    @cached_property
    def _eager_step(self) -> EagerStep:
        texts = Texts()
        predict: Predict = resolve(self.config.predictor)(**self.config.predictor_arguments)
        sampler = self._sampler() if self.config.traces_folder else None
        return EagerStep(self._selector(predict, texts), texts, sampler)

    def _sampler(self) -> TraceSampler:
        spool = TraceSpool(Path(self.config.traces_folder))
        return TraceSampler(self.config.geometry, spool.put, self.config.traces_pause_seconds)

    def _selector(self, predict: Predict | None, texts: Texts | None) -> EagerSelector:
        contexts = texts.context if texts is not None else None
        return EagerSelector(lambda: self.ranks, predict, self.config.deadline_seconds, self._pricing, contexts)


def worker_class(base: Any) -> Any:
    """The engine's worker, asking ecospec_select(worker, batch_size, stock) for the nodes."""

    class EcoSpecWorker(base):
        def resampling_final_draft_tokens(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
            stock = lambda: base.resampling_final_draft_tokens(self, batch_size)
            return self.ecospec_select(self, batch_size, stock)

    return _named_after(EcoSpecWorker, base)


def model_class(base: Any, config: PluginConfig) -> Any:
    """The engine's causal model, with the plug-in installed when it is built."""

    class EcoSpecModel(base):
        def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(model_config, *args, **kwargs)
            install(self, model_config, config)

    return _named_after(EcoSpecModel, base)


def install(model: Any, model_config: Any, config: PluginConfig) -> Plugin:
    """Raises InstallError, RanksError and CaptureError; all of them stop the engine's start."""
    global _current
    worker = getattr(model, "spec_worker", None)
    if worker is None:
        raise InstallError(
            "the engine speculates in another way than one model with one worker; EAGLE-3 or MTP is needed."
        )
    rank, count = check_mapping(model_config.mapping)
    if count > 1 and config.mode != "stock" and not config.rendezvous:
        raise InstallError(f"rendezvous is empty; host:port is needed for {count} ranks.")
    runner = importlib.import_module("tensorrt_llm._torch.pyexecutor.cuda_graph_runner")
    plugin = Plugin(config, rank, count, runner.CUDA_GRAPH_DUMMY_REQUEST_ID)
    plugin.attach(model, worker)
    for module, name in METADATA:
        _prepare_first(getattr(importlib.import_module(f"tensorrt_llm._torch.speculative.{module}"), name))
    _current = plugin
    if rank == 0 and config.status_file:
        Path(config.status_file).write_text(json.dumps(plugin.status() | {"worker": type(worker).__name__}))
    return plugin


def current() -> Plugin | None:
    return _current


def resolve(name: str) -> Any:
    """ "module:function" -> the function. Raises InstallError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InstallError(f"{name!r} cannot be found ({error}); module:function is needed.") from None


def _prepare_first(metadata_class: Any) -> None:
    """Let the current plug-in know of every step, once however often the engine builds its model."""
    original = metadata_class.prepare
    if getattr(original, "ecospec", False):
        return

    def prepare(self: Any) -> None:
        original(self)
        if _current is not None:
            _current.before_step(self.request_ids or (), self.seq_lens or (), self.num_generations)

    prepare.ecospec = True  # type: ignore[attr-defined]
    metadata_class.prepare = prepare


def _named_after(ours: Any, base: Any) -> Any:
    """The engine looks some things up by the name of a class."""
    ours.__name__, ours.__qualname__ = base.__name__, base.__qualname__
    return ours
