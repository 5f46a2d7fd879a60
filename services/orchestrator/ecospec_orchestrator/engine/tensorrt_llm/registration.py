"""Importing this module registers the plug-in's model classes, in a process whose environment names a plug-in configuration.

The engine sends the classes that are registered in the process that starts it to its ranks, as Python sends classes: by module and name.
So they have to be found here under the names that they are registered by; a rank that looks for one imports this module and thereby
registers its own, built from the same configuration. Versions that send the modules alone have the same effect.
"""

from __future__ import annotations

import importlib
import os

from .plugin.config import ENVIRONMENT, from_environment
from .plugin.install import ARCHITECTURES, model_class
from .plugin.signatures import require_supported

MODELS = "tensorrt_llm._torch.models"


def register() -> None:
    """Raises UnsupportedVersionError and PluginConfigError."""
    require_supported()
    config = from_environment()
    assert config is not None
    registry = importlib.import_module(f"{MODELS}.modeling_utils")
    for architecture, module in ARCHITECTURES.items():
        base = getattr(importlib.import_module(f"{MODELS}.{module}"), architecture)  # registers itself first
        ours = model_class(base, config)
        ours.__module__ = __name__
        globals()[architecture] = ours
        registry.register_auto_model(architecture)(ours)


if os.environ.get(ENVIRONMENT):
    register()
