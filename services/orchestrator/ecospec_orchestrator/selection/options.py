"""Checks of policy options, one sentence per mistake."""

from __future__ import annotations

import math

from ..core import SettingsError
from .kernel import BUFFER_BATCH, BUFFER_NONE, BUFFER_REQUEST

MAX_GAMMA = 64
EXPERT_BUFFERS = {"batch": BUFFER_BATCH, "request": BUFFER_REQUEST, "none": BUFFER_NONE}


def check_gamma(gamma: object) -> int:
    """Nodes verified per request and step: a whole number from 1 to 64. Raises SettingsError."""
    if isinstance(gamma, bool) or not isinstance(gamma, int) or not 1 <= gamma <= MAX_GAMMA:
        raise SettingsError(f"gamma is {gamma!r}; it must be a whole number from 1 to {MAX_GAMMA}.")
    return gamma


def check_eps(eps: object) -> float:
    """The constant beside the cost in the score: a finite number above 0. Raises SettingsError."""
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not (math.isfinite(eps) and eps > 0):
        raise SettingsError(f"eps is {eps!r}; it must be a finite number above 0, for instance 1.0.")
    return float(eps)


def check_count(name: str, value: object) -> int:
    """A whole number of at least 1. Raises SettingsError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    return value


def check_flag(name: str, value: object) -> bool:
    """Raises SettingsError unless value is True or False."""
    if not isinstance(value, bool):
        raise SettingsError(f"{name} is {value!r}; it must be true or false.")
    return value


def check_expert_buffer(expert_buffer: object) -> int:
    """The kernels' buffer mode for "batch", "request" or "none". Raises SettingsError."""
    if not isinstance(expert_buffer, str) or expert_buffer not in EXPERT_BUFFERS:
        raise SettingsError(f"expert_buffer is {expert_buffer!r}; it must be one of {', '.join(EXPERT_BUFFERS)}.")
    return EXPERT_BUFFERS[expert_buffer]


def check_range(name: str, value: object, low: float, high: float) -> float:
    """A number from low to high. Raises SettingsError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise SettingsError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.")
    return float(value)
