"""The predictor service as the plug-in's eager mode asks it: outside the plug-in, because it needs gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ecospec_proto.geometry import TargetGeometry

from ...core import Footprints
from ...footprint.base import TreeContext
from ...footprint.remote import RemoteFootprintSource
from .plugin.select_eager import Predict


def connect(address: str, geometry: dict[str, Any], deadline_seconds: float) -> Predict:
    """address: host:port of a predictor on a trusted network; geometry: TargetGeometry's fields. Does not wait for a connection;
    until there is one, and whenever no answer comes in time, the returned function raises FootprintUnavailableError."""
    source = RemoteFootprintSource(address, TargetGeometry(**geometry), deadline_seconds)

    def predict(trees: Sequence[TreeContext]) -> list[Footprints]:
        return source.begin(trees)()

    return predict
