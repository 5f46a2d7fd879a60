"""Put the parts together: settings -> a running system."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ecospec_proto.geometry import TargetGeometry

from .accounting.ledger import Ledger
from .core import SettingsError
from .drafting.base import Drafter
from .engine.base import Engine
from .footprint.base import FootprintSource
from .footprint.channel import client_tls
from .footprint.oracle import OracleFootprintSource
from .footprint.remote import RemoteFootprintSource
from .live import POLICY
from .loading import in_own_thread, load
from .predictor_process import wait_until_serving
from .profiling import binding_of, default_profile_path, measure
from .scheduler import Limits, Scheduler
from .selection.base import SelectionPolicy
from .selection.cost import OnlineCost, Profile, ProfileError
from .selection.factory import make_policy
from .selection.goodput import UnprofiledGoodputPolicy
from .selection.pairs import TargetShape
from .settings import Settings
from .state.base import StateStore
from .state.sharing import Sharing, open_sharing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class System:
    """Everything that serves. The scheduler is not started yet."""

    scheduler: Scheduler
    tokenizer: Any
    model_id: str
    ledger: Ledger
    info: dict[str, Any]
    settings: Settings
    sharing: Sharing

    def profile_if_missing(self, seconds: float, progress: Callable[[str], None] = log.info) -> None:
        """Measure this machine's costs where the goodput policy lacks them, keep them where the next start looks, and use them
        in any case. A profile that is named and does not fit is left alone. The system must be idle."""
        scheduler, named = self.scheduler, self.settings.profile
        if not isinstance(scheduler.policy, UnprofiledGoodputPolicy) or (named is not None and named.exists()):
            return
        if seconds == 0:
            log.warning("Setting profile_seconds is 0, so nothing is measured, and 'ecospec' decides.")
            return
        assert scheduler.drafter is not None, "goodput has one"
        if isinstance(scheduler.footprint_source, RemoteFootprintSource):
            address = self.settings.predictor_address
            if not wait_until_serving(address, seconds, client_tls(self.settings)):
                log.warning(
                    "No predictor serves at %s, so what a step costs is not measured; start it, then this server again.",
                    address,
                )
                return
        path = named or default_profile_path(
            binding_of(scheduler.engine, scheduler.drafter, scheduler.footprint_source)
        )
        profile = None
        for at_most in (seconds, 3 * seconds):  # a busy machine takes longer to show enough
            progress(
                f"measuring for {at_most:g} s what a step costs on this machine; it is kept in {path}, so this is done once"
            )
            try:
                profile = measure(self, at_most, progress)
                break
            except ProfileError as error:
                log.warning("The costs of this machine could not be measured: %s", error)
        if profile is None:
            return
        scheduler.policy = goodput_policy(self.settings, profile, scheduler.engine, scheduler.drafter)
        try:
            profile.save(path)
        except ProfileError as error:
            log.warning(
                "%s What was measured is used until this server ends, and measured again at the next start.", error
            )

    @property
    def store(self) -> StateStore:
        return self.sharing.store

    def reconfigure(self, settings: Settings, before: Settings) -> None:
        """Use live settings that have changed (see live.py). Raises SettingsError, and then nothing has changed."""
        scheduler = self.scheduler
        policy: SelectionPolicy | None = None
        if any(getattr(settings, name) != getattr(before, name) for name in POLICY):
            parts = scheduler.engine, scheduler.drafter, scheduler.footprint_source
            policy = in_own_thread(lambda: policy_from_settings(settings, *parts))
            self.info["policy"] = policy.name
        limits = replace(
            scheduler.limits,
            max_running=settings.max_running,
            max_waiting=settings.max_waiting,
            prefill_share=settings.prefill_share,
        )
        scheduler.change(limits, policy)

    def close(self) -> None:
        self.scheduler.stop()
        self.sharing.close()


def policy_from_settings(
    settings: Settings, engine: Engine, drafter: Drafter | None, source: FootprintSource | None
) -> SelectionPolicy:
    """The policy that the settings name; goodput without a valid profile of this engine, model and machine is the paper's
    fixed choice instead, and says so once; without a drafter it is none. Raises SettingsError."""
    if drafter is None:
        return make_policy("none")
    ecospec: dict[str, Any] = {
        "gamma": settings.gamma,
        "eps": settings.eps,
        "seed_root": settings.seed_root,
        "expert_buffer": settings.expert_buffer,
        "top_k": engine.geometry.top_k,
    }
    if settings.policy == "goodput":
        try:
            return goodput_policy(settings, load_profile(settings, engine, drafter, source), engine, drafter)
        except ProfileError as error:
            log.warning("Policy 'goodput' needs measured costs, so 'ecospec' decides for now: %s", error)
            return UnprofiledGoodputPolicy(**ecospec)
    may_change = settings.admin_port is not None or bool(settings.state_store_url.get_secret_value())
    options: dict[str, dict[str, Any]] = {
        "none": {"keep_drafter": may_change},
        "likelihood": {"gamma": settings.gamma},
        "ecospec": ecospec,
    }
    return make_policy(settings.policy, **options[settings.policy])


def load_profile(settings: Settings, engine: Engine, drafter: Drafter, source: FootprintSource | None) -> Profile:
    """The profile that the settings name, or this engine's own. Raises ProfileError."""
    binding = binding_of(engine, drafter, source)
    profile = Profile.load(settings.profile or default_profile_path(binding))
    profile.check(binding)
    return profile


def goodput_policy(settings: Settings, profile: Profile, engine: Engine, drafter: Drafter) -> SelectionPolicy:
    geometry = engine.geometry
    return make_policy(
        "goodput",
        cost=OnlineCost(profile),
        shape=TargetShape(geometry.moe_layers, geometry.experts, geometry.top_k),
        max_levels=drafter.max_levels,
        knows_experts=settings.footprints != "none",
        free_predictions=settings.footprints == "oracle",
        probe_share=settings.probe_share,
        max_slowdown=settings.max_slowdown,
        expert_buffer=settings.expert_buffer,
        seed_root=settings.seed_root,
        placement=load_placement(settings, geometry),
    )


def load_placement(settings: Settings, geometry: TargetGeometry) -> np.ndarray | None:
    """int64 [layers, experts] from the settings' JSON file. Raises SettingsError."""
    path = settings.expert_placement
    if path is None:
        return None
    shape = (geometry.moe_layers, geometry.experts)
    try:
        placement = np.array(json.loads(path.read_text(encoding="utf-8")))
        if placement.shape != shape or placement.dtype.kind != "i" or placement.min() < 0:
            raise ValueError(f"it holds {placement.dtype} of shape {placement.shape}")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"Setting expert_placement is {path}, which cannot be used ({error}); a JSON file of ranks from 0 of shape {shape} is needed."
        ) from None
    return placement


def footprint_source(settings: Settings, engine: Engine, ledger: Ledger) -> FootprintSource | None:
    if settings.footprints == "none":
        return None
    if settings.footprints == "oracle":
        return OracleFootprintSource(engine, settings.footprint_accuracy)
    return RemoteFootprintSource(
        settings.predictor_address,
        engine.geometry,
        settings.predictor_deadline_ms / 1e3,
        ledger.observe_predictor_call,
        client_tls(settings),
        ledger.state.observe_version_in_use,
        ledger.observe_context_resent,
    )


def build_system(settings: Settings, progress: Callable[[str], None] = log.info) -> System:
    """Load everything, warm it up and return the parts. Raises SettingsError."""
    loaded = load(settings, progress)
    engine, drafter = loaded.engine, loaded.drafter
    ledger = Ledger()
    geometry = engine.geometry
    ledger.model.describe(
        geometry.name, geometry.revision, str(engine.device), settings.memory_bandwidth_gb_per_second * 1e9
    )
    source = footprint_source(settings, engine, ledger) if drafter is not None else None
    policy = policy_from_settings(settings, engine, drafter, source)
    limits = Limits(settings.max_running, settings.max_waiting, settings.max_context_tokens, settings.prefill_share)
    scheduler = Scheduler(engine, drafter, source, policy, limits, ledger)
    ledger.bind(lambda: scheduler.running, lambda: scheduler.waiting, engine.cache_use)
    ledger.bind_policy(lambda: scheduler.policy.health())
    sharing = open_sharing(settings, engine.geometry, ledger.state)
    if sharing.sampler is not None:
        scheduler.on_verified = sharing.sampler.observe
    info = {
        "target": engine.geometry.name,
        "target_revision": engine.geometry.revision,
        "device": str(engine.device),
        "policy": scheduler.policy.name,
        "gamma": settings.gamma,
        "moe_layers": engine.geometry.moe_layers,
        "experts": engine.geometry.experts,
        "top_k": engine.geometry.top_k,
        "eos_token_ids": list(loaded.end_tokens),
        "geometry": asdict(engine.geometry),
        "fingerprint": engine.geometry.fingerprint,
    }
    return System(scheduler, loaded.tokenizer, engine.geometry.name, ledger, info, settings, sharing)
