"""What a step costs in seconds: fitted to measured steps, kept in a file, followed while serving. No torch, no network."""

from .fitting import assess, fit
from .model import FitQuality, Sample, StepCost, StepFeatures, StepSeconds, charges, distinct_pairs
from .online import OnlineCost
from .profile import Binding, Profile, ProfileError

__all__ = [
    "Binding",
    "FitQuality",
    "OnlineCost",
    "Profile",
    "ProfileError",
    "Sample",
    "StepCost",
    "StepFeatures",
    "StepSeconds",
    "assess",
    "charges",
    "distinct_pairs",
    "fit",
]
