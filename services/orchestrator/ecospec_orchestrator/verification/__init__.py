"""Which draft tokens the target agrees with. Pure numpy."""

from .accept import Acceptance, accept
from .processing import LogitProcessor, processor_for
from .sampling import draw, greedy, logprobs, pick, seeded_uniform, target_distribution

__all__ = [
    "Acceptance",
    "LogitProcessor",
    "accept",
    "draw",
    "greedy",
    "logprobs",
    "pick",
    "processor_for",
    "seeded_uniform",
    "target_distribution",
]
