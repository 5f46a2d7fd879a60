"""Put TensorRT-LLM, tokenizer and metrics together: settings -> a running system."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...accounting.ledger import Ledger
from ...core import SettingsError
from ...live import POLICY
from ...settings import Settings
from ...state.base import StateStore
from ...state.sharing import Sharing, open_sharing
from ...tokenizer import end_tokens, load_tokenizer
from ..torch.checkpoint import read_json
from .artifacts import read_schedule
from .backend import BackendLimits, TensorRtBackend
from .facts import ModelFacts, local_directory, read_facts
from .installation import Installation, install, mode_of
from .launcher import LaunchPlan, create_llm, plan_launch
from .steps import StepTally
from .traces import TraceIntake

log = logging.getLogger(__name__)
# Of the live settings: those that lie in the engine's buffers and graphs, or are not its own.
BUILT_IN = (*POLICY, "max_running", "prefill_share")


@dataclass(frozen=True)
class TensorRtSystem:
    """Everything that serves. The scheduler is not started yet."""

    scheduler: TensorRtBackend
    tokenizer: Any
    model_id: str
    ledger: Ledger
    info: dict[str, Any]
    settings: Settings
    sharing: Sharing
    installation: Installation | None

    @property
    def store(self) -> StateStore:
        return self.sharing.store

    def reconfigure(self, settings: Settings, before: Settings) -> None:
        """Use live settings that have changed (see live.py). Raises SettingsError, and then nothing has changed."""
        for name in BUILT_IN:
            now, was = getattr(settings, name), getattr(before, name)
            if now != was:
                raise SettingsError(
                    f"Setting {name} is {str(now)!r}; engine tensorrt-llm keeps {str(was)!r}, with which it was started: restart the "
                    "server to change it."
                )
        self.scheduler.change(settings.max_waiting)

    def close(self) -> None:
        self.scheduler.stop()
        self.sharing.close()
        if self.installation is not None:
            self.installation.close()


def build_system(settings: Settings, progress: Callable[[str], None] = log.info) -> TensorRtSystem:
    """Check everything that can be checked without a GPU, then load the model. Raises SettingsError."""
    directory = local_directory(settings.model)
    facts = read_facts(directory, settings.model_name or Path(settings.model).name)
    plan = plan_launch(settings, facts, read_schedule(settings.draft_len_schedule))
    tokenizer = load_tokenizer(directory)
    ends = end_tokens(directory, read_json(directory / "config.json"), tokenizer)
    for line in summary(facts, plan):
        progress(line)
    ledger = Ledger()
    sharing = open_sharing(settings, facts.geometry, ledger.state)
    progress("TensorRT-LLM loads the model, which takes minutes")
    try:
        llm, sampling_params, installation = _start(settings, facts, plan)
    except BaseException:
        sharing.close()
        raise
    limits = BackendLimits(
        settings.max_running,
        settings.max_waiting,
        settings.max_context_tokens,
        facts.geometry.vocab_size,
        plan.nodes,
        varying="draft_len_schedule" in (plan.arguments["speculative_config"] or {}),
    )
    poll = _poll(settings, facts, installation, sharing, ledger)
    backend = TensorRtBackend(llm, sampling_params, limits, ledger, poll)
    ledger.bind(lambda: backend.running, lambda: backend.waiting)
    info = info_of(settings, facts, plan, ends)
    return TensorRtSystem(backend, tokenizer, facts.geometry.name, ledger, info, settings, sharing, installation)


def _poll(
    settings: Settings, facts: ModelFacts, installation: Installation | None, sharing: Sharing, ledger: Ledger
) -> Callable[[], None]:
    """What has to be looked after while it serves."""
    looks: list[Callable[[], None]] = []
    if installation is not None:
        looks.append(StepTally(installation.steps, ledger).poll)
        if settings.trace_rate_tokens_per_second:
            looks.append(TraceIntake(installation.traces, facts.geometry, sharing.store, ledger.state).poll)

    def poll() -> None:
        for look in looks:
            look()

    return poll


def _start(settings: Settings, facts: ModelFacts, plan: LaunchPlan) -> tuple[Any, Any, Installation | None]:
    if plan.shape == "none":
        return *create_llm(plan), None
    installation = install(settings, facts, plan)
    try:
        llm, sampling_params = create_llm(plan)
        try:
            installation.confirm()
        except BaseException:
            llm.shutdown()
            raise
    except BaseException:
        installation.close()
        raise
    return llm, sampling_params, installation


def info_of(settings: Settings, facts: ModelFacts, plan: LaunchPlan, ends: tuple[int, ...]) -> dict[str, Any]:
    """Facts for /version and /v1/models."""
    geometry = facts.geometry
    return {
        "engine": "tensorrt-llm",
        "target": geometry.name,
        "target_revision": geometry.revision,
        "policy": settings.policy if plan.shape != "none" else "none",
        "drafts": plan.shape,
        "gamma": plan.nodes,
        "selection": mode_of(settings, plan) if plan.shape != "none" else None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "cuda_graphs": settings.cuda_graphs,
        "moe_layers": geometry.moe_layers,
        "experts": geometry.experts,
        "top_k": geometry.top_k,
        "eos_token_ids": list(ends),
        "geometry": asdict(geometry),
        "fingerprint": geometry.fingerprint,
    }


def summary(facts: ModelFacts, plan: LaunchPlan) -> list[str]:
    """What will be served, in lines for a person."""
    g, arguments = facts.geometry, plan.arguments
    drafts = {
        "none": "none",
        "chain": f"chains of {plan.nodes} tokens",
        "tree": f"trees of {plan.nodes} nodes, chosen by {'EcoSpec' if plan.selects else 'their probability'}",
    }[plan.shape]
    return [
        f"target {g.name} ({facts.family}): {g.moe_layers} MoE layers of {g.experts} experts, top-{g.top_k}, "
        f"{facts.weight_bytes / 1e9:.1f} GB of weights on {arguments['tensor_parallel_size']} GPUs, experts on "
        f"{arguments['moe_expert_parallel_size']} of them; drafts: {drafts}",
        *plan.notes,
    ]
