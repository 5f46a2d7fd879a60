"""Choose and load a drafter: an EAGLE-3 head's directory, "mtp" (from the target's own checkpoint), or "ngram"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..core import SettingsError
from ..engine.torch.checkpoint import Checkpoint
from ..engine.torch.geometry import KvLayout
from . import eagle3_formats
from .eagle3 import eagle3_drafter
from .mtp import mtp_drafter, mtp_layout, mtp_memory_bytes
from .ngram import NgramDrafter
from .target import TargetFacts
from .tree_drafter import TreeDrafter

__all__ = ["MTP", "NGRAM", "TargetFacts", "feature_layers_of", "kv_layout_of", "load_drafter", "memory_needed_bytes"]
MTP, NGRAM = "mtp", "ngram"


def feature_layers_of(drafter: str | Path, target_layers: int) -> tuple[int, ...]:
    """The target layers whose output the drafter takes; the engine has to be built with them. Raises SettingsError."""
    if str(drafter) == NGRAM:
        return ()
    if str(drafter) == MTP:
        return (target_layers - 1,)
    return eagle3_formats.feature_layers_of(Path(drafter), target_layers)


def kv_layout_of(drafter: str | Path, target_layers: int, checkpoint: Checkpoint | None = None) -> KvLayout | None:
    """What the drafter's own cache keeps per token, known before it is loaded; None: it has none. checkpoint: the target's, for
    MTP. Raises SettingsError."""
    if str(drafter) == NGRAM:
        return None
    if str(drafter) == MTP:
        return mtp_layout(_needed(checkpoint))
    return eagle3_formats.kv_layout_of(Path(drafter), target_layers)


def memory_needed_bytes(drafter: str | Path, checkpoint: Checkpoint | None, device: torch.device) -> int:
    """What the drafter takes at most, but for its cache, known before it is loaded; checkpoint: the target's, for MTP. Raises
    SettingsError."""
    if str(drafter) == NGRAM:
        return 0
    if str(drafter) == MTP:
        return mtp_memory_bytes(_needed(checkpoint), device)
    return sum(file.stat().st_size for file in Path(drafter).iterdir() if file.suffix in (".safetensors", ".bin"))


def load_drafter(
    drafter: str | Path,
    target: TargetFacts,
    depth: int,
    top_k: int,
    kv_pages: int,
    checkpoint: Checkpoint | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda _done_bytes, _total_bytes: None,
) -> TreeDrafter | NgramDrafter:
    """depth: draft forwards; top_k: candidates kept per level (EAGLE-3) or branches (n-gram), not for MTP, which drafts a chain.
    kv_pages: of the drafter's own cache. checkpoint: the target's, for MTP. Raises SettingsError."""
    if str(drafter) == NGRAM:
        return NgramDrafter(depth, top_k)
    if str(drafter) == MTP:
        return mtp_drafter(_needed(checkpoint), target, depth, kv_pages, progress, device)
    return eagle3_drafter(Path(drafter), target, depth, top_k, kv_pages, device)


def _needed(checkpoint: Checkpoint | None) -> Checkpoint:
    if checkpoint is None:
        raise SettingsError(
            "the drafter 'mtp' is part of a DeepSeek checkpoint, and this target has none; use an EAGLE-3 head or 'ngram'."
        )
    return checkpoint
