"""Policies by name, as settings and requests name them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..core import SettingsError
from .base import SelectionPolicy
from .ecospec import EcoSpecPolicy
from .goodput import GoodputPolicy
from .likelihood import LikelihoodPolicy
from .none import NonePolicy

POLICIES: dict[str, Callable[..., SelectionPolicy]] = {
    "none": NonePolicy,
    "likelihood": LikelihoodPolicy,
    "ecospec": EcoSpecPolicy,
    "goodput": GoodputPolicy,
}


def make_policy(name: str, **options: Any) -> SelectionPolicy:
    """Build a policy. Options: likelihood takes gamma; ecospec takes top_k (required), gamma, eps, seed_root and
    expert_buffer; goodput takes what its class documents.

    Raises SettingsError that names the bad policy, option or value and what is allowed.
    """
    if name not in POLICIES:
        raise SettingsError(f"selection policy is {name!r}; it must be one of {', '.join(POLICIES)}.")
    parameters = inspect.signature(POLICIES[name]).parameters
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        allowed = f"allowed are {', '.join(parameters)}" if parameters else "it takes none"
        raise SettingsError(f"selection policy {name} has no option {', '.join(unknown)}; {allowed}.")
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    missing = [key for key in required if key not in options]
    if missing:
        raise SettingsError(f"selection policy {name} needs the option {', '.join(missing)}.")
    return POLICIES[name](**options)
