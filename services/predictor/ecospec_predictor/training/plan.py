"""What a run is about to do: its data counted, its network built, its memory estimated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.traces import TraceReader

from ..errors import PredictorError, SettingsError
from ..hf_network import HfExpertPredictor
from ..network import ExpertPredictor, PredictorConfig
from ..networks import Network, load_embeddings, load_network
from .config import HfBackbone, SmallBackbone, TrainConfig
from .data import is_held_out, rows_trained


@dataclass(frozen=True)
class Counts:
    """Of one side of the split. rows: those that are trained on or scored; left_out: rejected rows beyond draft_rows."""

    documents: int = 0
    rows: int = 0
    left_out: int = 0

    def plus(self, rows: int, left_out: int) -> Counts:
        return Counts(self.documents + 1, self.rows + rows, self.left_out + left_out)


def count(reader: TraceReader, config: TrainConfig, quiet: bool = False) -> tuple[Counts, Counts]:
    """(training, held out); reads all traces once. Raises SettingsError when one side is empty."""
    sides = {False: Counts(), True: Counts()}
    for document in tqdm(reader, "counting", len(reader), unit="documents", disable=quiet or None):
        side = is_held_out(document.document_id, config.data.held_out)
        rows = rows_trained(document, config.data.draft_rows)
        sides[side] = sides[side].plus(rows, len(document.tokens) - rows)
    for side, name in ((False, "trained on"), (True, "held out")):
        if not sides[side].documents:
            raise SettingsError(
                f"Of the {len(reader)} documents in {config.traces} none is {name} with data.held_out {config.data.held_out}; "
                "collect more documents or change it."
            )
    return sides[False], sides[True]


def build_network(config: TrainConfig, geometry: TargetGeometry) -> Network:
    """The network with its first weights, on the CPU in float32. Raises SettingsError or PredictorError."""
    backbone = config.backbone
    network: Network
    try:
        if isinstance(backbone, SmallBackbone):
            if backbone.hidden_size % (2 * backbone.heads):
                raise SettingsError(
                    f"Setting backbone.hidden_size is {backbone.hidden_size}; allowed: a multiple of twice backbone.heads, "
                    f"{2 * backbone.heads}."
                )
            sizes = PredictorConfig(
                backbone.hidden_size, backbone.layers, backbone.heads, backbone.mlp_size, backbone.context_tokens
            )
            network = ExpertPredictor(sizes, geometry, load_embeddings(config.embeddings))
        elif isinstance(backbone, HfBackbone):
            network = HfExpertPredictor.from_pretrained(backbone.path, geometry, backbone.context_tokens)
            network.backbone.requires_grad_(backbone.train == "whole")
        else:
            network, _ = load_network(backbone.path, config.embeddings, geometry)
    except (ValueError, OSError, KeyError, TypeError) as error:  # what broken files raise
        raise PredictorError(f"The network cannot be built: {error}") from None
    context = network.config.max_context_tokens
    if config.data.window_tokens < context:
        raise SettingsError(
            f"Setting data.window_tokens is {config.data.window_tokens}, but the predictor will look at {context} tokens of "
            "context; allowed: at least as many."
        )
    return network


def parameters(network: nn.Module) -> tuple[int, int]:
    """(all, trained)."""
    sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def describe(
    config: TrainConfig, geometry: TargetGeometry, sides: tuple[Counts, Counts], network: nn.Module, world: int
) -> str:
    """Lines for a person: what will be trained on what, for how long, in how much memory."""
    training, held_out = sides
    options, width = config.training, config.data.window_tokens + config.data.draft_rows
    everything, trained = parameters(network)
    rows_per_step = options.batch_windows * options.accumulate * world * width
    steps = max(1, round(options.epochs * training.rows / rows_per_step))
    limit = "" if options.minutes is None else f", at most {options.minutes:g} minutes"
    left_out = training.left_out + held_out.left_out
    return "\n".join(
        [
            f"target: {geometry.name}, revision {geometry.revision}: {geometry.moe_layers} MoE layers, {geometry.experts} "
            f"experts, top-{geometry.top_k}",
            f"training: {training.rows} tokens of {training.documents} documents",
            f"held out: {held_out.rows} tokens of {held_out.documents} documents",
            f"left out: {left_out} rejected draft tokens beyond data.draft_rows",
            f"network: {everything} parameters, {trained} of them trained",
            f"steps: at least {steps} of {rows_per_step} places for tokens, {options.epochs} epochs{limit}",
            f"memory (estimated): {_memory_bytes(config, geometry, network, world) / 2**30:.2f} GiB for each of {world} "
            f"processes",
        ]
    )


def _memory_bytes(config: TrainConfig, geometry: TargetGeometry, network: nn.Module, world: int) -> float:
    """float32 weights, gradients and two moments; activations as twenty hidden states a layer; logits four times; the
    shuffled traces."""
    everything, trained = parameters(network)
    rows = config.training.batch_windows * (config.data.window_tokens + config.data.draft_rows)
    hidden = network.router.in_features
    layers = sum(len(module) for module in network.modules() if isinstance(module, nn.ModuleList))
    size = 2 if config.training.precision == "bfloat16" else 4
    activations = rows * hidden * layers * 20 * size
    logits = rows * geometry.moe_layers * geometry.experts * 4 * 4
    traces = config.data.shuffle_tokens * geometry.moe_layers * geometry.top_k * 2
    buffers = sum(b.numel() * b.element_size() for b in network.buffers())
    return 4 * (everything + 3 * trained) / world + buffers + activations + logits + traces


def seed(config: TrainConfig) -> None:
    torch.manual_seed(config.training.seed)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
