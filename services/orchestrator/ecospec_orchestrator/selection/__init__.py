"""Which draft nodes are worth verifying. Numpy and numba; no torch, no network."""

from .base import SelectionPolicy
from .ecospec import EcoSpecPolicy
from .factory import POLICIES, make_policy
from .kernel import warm_up
from .likelihood import LikelihoodPolicy
from .none import NonePolicy

__all__ = [
    "POLICIES",
    "EcoSpecPolicy",
    "LikelihoodPolicy",
    "NonePolicy",
    "SelectionPolicy",
    "make_policy",
    "warm_up",
]
