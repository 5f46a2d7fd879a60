"""Which draft tokens the target agrees with. Pure numpy."""

from .accept import Acceptance, accept
from .sampling import draw, greedy, logprobs, pick, seeded_uniform, target_distribution

__all__ = [
    "Acceptance",
    "accept",
    "draw",
    "greedy",
    "logprobs",
    "pick",
    "seeded_uniform",
    "target_distribution",
]
