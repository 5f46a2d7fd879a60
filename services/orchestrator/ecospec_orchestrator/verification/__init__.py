"""Which draft tokens the target agrees with. Pure numpy."""

from .accept import Acceptance, accept
from .sampling import logprobs, pick, seeded_uniform, target_distribution

__all__ = ["Acceptance", "accept", "logprobs", "pick", "seeded_uniform", "target_distribution"]
