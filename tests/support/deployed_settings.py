"""The settings that a container would start with, read by the services' own code from the variables that a deployment gives it."""

from __future__ import annotations

from collections.abc import Mapping

from ecospec_orchestrator.settings import Settings as Orchestrator
from ecospec_orchestrator.settings import load_settings as load_orchestrator
from ecospec_predictor.settings import PREFIX as PREDICTOR_PREFIX
from ecospec_predictor.settings import Settings as Predictor
from ecospec_predictor.settings import load_settings as load_predictor

MODEL_DIR = PREDICTOR_PREFIX + "MODEL_DIR"
LOADING_SECONDS = 300  # of a model, and compiling


def orchestrator_settings(environment: Mapping[str, str]) -> Orchestrator:
    """Raises SettingsError for a variable that is not known or has a wrong value."""
    if foreign := [name for name in environment if name.startswith(PREDICTOR_PREFIX)]:
        raise ValueError(f"{foreign} are the predictor's, and an orchestrator ignores them.")
    return load_orchestrator({}, environment)


def predictor_settings(environment: Mapping[str, str]) -> Predictor:
    """Raises SettingsError likewise. The demo's image knows the model's place itself."""
    foreign = [name for name in environment if name.startswith("ECOSPEC_") and not name.startswith(PREDICTOR_PREFIX)]
    if foreign:
        raise ValueError(f"{foreign} are not the predictor's, which ignores them.")
    return load_predictor({}, {MODEL_DIR: "/in/the/image", **environment})


def start_seconds(settings: Orchestrator) -> float:
    """What a first start may take: it loads, waits for the predictor, measures costs, and once more for three times as long."""
    return LOADING_SECONDS + (5 * settings.profile_seconds if settings.engine == "torch" else 0)
