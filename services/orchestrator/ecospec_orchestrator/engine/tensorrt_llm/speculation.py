"""What is drafted with which target: from settings and a model's facts to the engine's speculative configuration.

Source: TensorRT-LLM's reference of Eagle3DecodingConfig and MTPDecodingConfig, and its speculative/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...core import SettingsError
from ...settings import Settings
from .artifacts import checked_schedule
from .facts import ModelFacts

Shape = Literal["none", "chain", "tree"]
AUTO, NONE, MTP = "auto", "none", "mtp"


def speculation_of(
    settings: Settings, facts: ModelFacts, schedule: Mapping[int, int] | None
) -> tuple[dict[str, Any] | None, Shape, int, tuple[str, ...]]:
    """The configuration with its decoding_type, None without drafts; the shape of the drafts; nodes of a request in a step; notes for
    a person. schedule: as in launcher.plan_launch. Raises SettingsError."""
    drafter = settings.drafter
    if drafter == "ngram":
        raise SettingsError(
            "Setting drafter is 'ngram', which engine tensorrt-llm does not take; allowed: the directory of an EAGLE-3 head, mtp "
            "or none."
        )
    if drafter == AUTO:
        drafter = MTP if facts.draft_layers else NONE
    if settings.policy == "none" or drafter == NONE:
        note = "no drafter: every step decodes one token of a request" if settings.policy != "none" else None
        return None, "none", 0, (note,) if note else ()
    if drafter == MTP:
        if not facts.draft_layers:
            raise SettingsError(
                f"Setting drafter is 'mtp', but {facts.geometry.name} has no multi-token prediction module; give the directory of "
                "an EAGLE-3 head, or none."
            )
        return _chain({"decoding_type": "MTP"}, settings, facts, schedule)
    if not Path(drafter).is_dir():
        raise SettingsError(f"Setting drafter is {drafter!r}; the directory of an EAGLE-3 head, mtp or none is needed.")
    base: dict[str, Any] = {"decoding_type": "Eagle3", "speculative_model": drafter}
    if facts.attention != "full" or settings.draft_top_k == 1:
        return _chain(base, settings, facts, schedule)
    depth, top_k, nodes = settings.draft_depth, settings.draft_top_k, settings.gamma
    if not depth <= nodes <= top_k * depth:
        raise SettingsError(
            f"Setting gamma is {nodes}; with draft_depth {depth} and draft_top_k {top_k} the engine's trees have {depth} to "
            f"{top_k * depth} nodes."
        )
    tree = base | {
        "max_draft_len": depth,
        "max_total_draft_tokens": nodes,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": top_k,
    }
    fixed = "policy 'goodput' chooses which nodes a tree has, not how many: that is fixed when TensorRT-LLM starts"
    return tree, "tree", nodes, (fixed,) if settings.policy == "goodput" else ()


def _covered(schedule: Mapping[int, int]) -> int:
    """The largest batch that is drafted for."""
    return max((bound for bound, length in schedule.items() if length), default=0)


def _chain(
    base: dict[str, Any], settings: Settings, facts: ModelFacts, schedule: Mapping[int, int] | None
) -> tuple[dict[str, Any], Shape, int, tuple[str, ...]]:
    """One draft token after the other: all that the engine has for a sliding window, for MLA and for MTP."""
    length = min(settings.draft_depth, settings.gamma)
    notes = []
    if settings.draft_top_k > 1:
        why = {"sliding": "a sliding window", "latent": "latent attention", "full": "an MTP module"}[facts.attention]
        notes.append(f"drafts are chains of {length}: TensorRT-LLM has no draft trees with {why}")
    if settings.policy == "ecospec":
        notes.append("policy 'ecospec' has nothing to choose in a chain; its length stays as it is")
    if settings.policy == "goodput" and schedule is None:
        notes.append("policy 'goodput' has no measured draft lengths yet; every chain has the same length")
    config = base | {"max_draft_len": length}
    if schedule is not None and settings.policy == "goodput":
        config["draft_len_schedule"] = checked_schedule(schedule, length)
        if max(schedule) < settings.max_running or 0 in schedule.values():
            notes.append(
                f"with more than {_covered(schedule)} requests nothing is drafted, and TensorRT-LLM's drafter accepts less ever after in "
                "those that were running; give every batch size up to max_running a length of at least 1"
            )
        if base["decoding_type"] == "MTP" and facts.draft_layers > 1:
            notes.append(f"TensorRT-LLM ignores draft_len_schedule with {facts.draft_layers} MTP modules")
        if settings.cuda_graphs:
            notes.append("with a schedule of draft lengths the engine pads batches to those that it has graphs for")
    return config, "chain", length, tuple(notes)
