"""The second way in, for LLM(orchestrator_type="ray", ray_worker_extension_cls="...plugin.ray_extension.WorkerExtension"): Ray's workers
import this module before they build the engine."""

from __future__ import annotations

from typing import Any

from .. import registration  # noqa: F401 - registers, where the environment says so
from .install import current


class WorkerExtension:
    """Mixed into the engine's worker; its methods can be called through llm._collective_rpc."""

    def ecospec_status(self) -> dict[str, Any] | None:
        """What is installed in this worker; None if nothing is."""
        plugin = current()
        return None if plugin is None else plugin.status()
