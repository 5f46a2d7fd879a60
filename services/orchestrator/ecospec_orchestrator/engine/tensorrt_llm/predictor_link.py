"""The predictor service as the plug-in's eager mode asks it: outside the plug-in, because it needs gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ecospec_proto.geometry import TargetGeometry

from ...core import Footprints
from ...footprint.base import TreeContext
from ...footprint.channel import ClientTls, client_tls
from ...footprint.remote import RemoteFootprintSource
from ...settings import Settings


def connect(
    address: str, geometry: dict[str, Any], deadline_seconds: float, tls: dict[str, str] | None = None
) -> Callable[[Sequence[TreeContext]], list[Footprints]]:
    """Everything as arguments_of() makes it, which goes through JSON. Does not wait for a connection; until there is one, and whenever
    no answer comes in time, the returned function raises FootprintUnavailableError."""
    files = None if tls is None else ClientTls(**{name: Path(file) for name, file in tls.items()})
    source = RemoteFootprintSource(address, TargetGeometry(**geometry), deadline_seconds, tls=files)
    return lambda trees: source.begin(trees)()


def arguments_of(settings: Settings, geometry: dict[str, Any]) -> dict[str, Any]:
    """For connect(); geometry: TargetGeometry's fields. Raises SettingsError for TLS settings that cannot be used."""
    tls = client_tls(settings)
    files = {} if tls is None else {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
    return {
        "address": settings.predictor_address,
        "geometry": geometry,
        "deadline_seconds": settings.predictor_deadline_ms / 1e3,
        "tls": {name: str(file.resolve()) for name, file in files.items() if file is not None} or None,
    }
