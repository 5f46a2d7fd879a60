"""What this process serves: one model, with what runs it, for each target fingerprint."""

from __future__ import annotations

from dataclasses import dataclass

from .base import ExpertModel
from .batching import Batcher
from .metrics import Metrics
from .sessions import Sessions
from .settings import Settings


@dataclass(frozen=True, eq=False)
class Served:
    """A model and what runs it. Make one with start(), on the event loop."""

    model: ExpertModel
    batcher: Batcher
    sessions: Sessions

    @classmethod
    def start(cls, model: ExpertModel, metrics: Metrics, settings: Settings) -> Served:
        window = settings.batch_window_microseconds / 1e6
        batcher = Batcher(model, metrics, settings.max_queue, settings.max_trees, window)
        budget, idle = settings.session_bytes, settings.session_idle_seconds
        return cls(model, batcher, Sessions(model.max_context_tokens, model.session_bytes, budget, idle, metrics))

    async def close(self, finish: bool = False) -> None:
        """End it and its sessions. finish: first answer what it has accepted; else what waits is refused as UNAVAILABLE."""
        self.sessions.close()
        await self.batcher.close(finish)


class Catalogue:
    """Use it on the event loop. A request keeps the Served that it found, whatever is swapped meanwhile."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}

    def get(self, fingerprint: str) -> Served | None:
        return self._served.get(fingerprint)

    def all(self) -> list[Served]:
        """In the order in which their targets came."""
        return list(self._served.values())

    def swap(self, fingerprint: str, served: Served | None) -> Served | None:
        """Serve this one for the target, or nothing; returns what was served before, which the caller closes."""
        before = self._served.pop(fingerprint, None) if served is None else self._served.get(fingerprint)
        if served is not None:
            self._served[fingerprint] = served
        return before
