"""What a server shares with others, from the settings: the store, and the sampling of routes where it is switched on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.shared_state import StoreAddress

from ..accounting.state_metrics import StateMetrics
from ..core import SettingsError
from ..settings import Settings
from .base import StateStore
from .memory import MemoryStore
from .route_sampler import RouteSampler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharing:
    """sampler: None when no routes are sampled."""

    store: StateStore
    sampler: RouteSampler | None

    def close(self) -> None:
        """After the step thread has ended."""
        if self.sampler is not None:
            self.sampler.close()
        self.store.close()


def open_sharing(settings: Settings, geometry: TargetGeometry, metrics: StateMetrics) -> Sharing:
    """Waits for no server. Raises SettingsError."""
    rate, store = settings.trace_rate_tokens_per_second, _store(settings, geometry, metrics)
    if rate == 0:
        return Sharing(store, None)
    try:
        sampler = RouteSampler(geometry, rate, store.append_trace, metrics.sampled_tokens.inc)
    except SettingsError:
        store.close()
        raise
    where = "the state store" if settings.state_store_url.get_secret_value() else "this process"
    log.info("Token ids and routes of answers are sampled into %s, up to %g tokens/s.", where, rate)
    return Sharing(store, sampler)


def _store(settings: Settings, geometry: TargetGeometry, metrics: StateMetrics) -> StateStore:
    url = settings.state_store_url.get_secret_value()
    if not url:
        metrics.store_up.set(1)
        return MemoryStore(settings.trace_max_records, metrics)
    from .redis import RedisStore  # not needed by a server on its own

    address = StoreAddress.parse(url, settings.state_store_password.get_secret_value())
    return RedisStore(address, geometry.fingerprint, settings.trace_max_records, metrics)
