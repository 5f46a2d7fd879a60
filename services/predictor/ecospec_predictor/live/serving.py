"""What a serving predictor does with the state store: score its models on live routes, and follow the registry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from ecospec_proto.shared_state import StoreAddress

from ..base import ExpertModel
from ..catalogue import Served
from ..errors import SettingsError
from ..settings import Settings
from . import registry
from .metrics import LiveMetrics
from .scorer import LiveScorer

log = logging.getLogger(__name__)
CANCEL_SECONDS = 0.1  # between tries


class Offer(Protocol):
    def __call__(self, fingerprint: str, find: Callable[[], Path]) -> Coroutine[Any, Any, None]:
        """Serve the version in the directory that find() returns. find may block and raises PredictorError."""
        ...


def check_live(settings: Settings) -> None:
    """Raises SettingsError."""
    if settings.follow_registry and not settings.state_store_url.get_secret_value():
        raise SettingsError(
            "Setting follow_registry is true, but state_store_url is empty; give the address of the state store, or false."
        )


def start_live(
    settings: Settings,
    served: Callable[[], Sequence[Served]],
    baseline_of: Callable[[ExpertModel], float | None],
    offer: Offer,
    prometheus: CollectorRegistry,
) -> list[asyncio.Task[None]]:
    """Tasks on the running event loop, which run until they are cancelled; none without a state store."""
    url, password = settings.state_store_url.get_secret_value(), settings.state_store_password.get_secret_value()
    tasks: list[asyncio.Task[None]] = []
    if url and settings.score_tokens_per_second:
        scorer = LiveScorer(
            StoreAddress.parse(url, password),
            served,
            baseline_of,
            LiveMetrics(prometheus),
            settings.score_tokens_per_second,
            settings.drift_margin,
            settings.max_nodes_per_tree,
        )
        tasks.append(asyncio.create_task(scorer.run()))
    if url and settings.follow_registry:
        tasks += [
            asyncio.create_task(_follow(url, password, s.model.geometry.fingerprint, served, offer)) for s in served()
        ]
    return tasks


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks until they have ended: before Python 3.12, asyncio.wait_for(), which the store's client uses, may swallow a
    cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_SECONDS)


async def _follow(
    url: str, password: str, fingerprint: str, served: Callable[[], Sequence[Served]], offer: Offer
) -> None:
    async for entry in registry.watch(url, fingerprint, password):
        if any(s.model.geometry.fingerprint == fingerprint and s.model.version == entry.version for s in served()):
            continue
        log.info("Version %s is published in %s.", entry.version, entry.location)
        await offer(fingerprint, partial(registry.check_files, entry))
