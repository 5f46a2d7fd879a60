"""Iteration statistics from TensorRT-LLM into the ledger, from a thread of their own: the question waits, even in its asynchronous
form, and would hold up every token meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ...accounting.ledger import Ledger
from ..base import CacheUse
from .statistics import cache_use, iteration_report

log = logging.getLogger(__name__)
QUESTION_SECONDS = 1.0  # that one question waits
PAUSE_SECONDS = 5.0  # after a question that failed


class StatisticsCollector:
    """get_stats(timeout in seconds): the records since the last question. on_cache is called once, when the first record told of the
    KV cache; from then on cache_use() may be asked. poll is called once in a while, and must not raise. A failure costs
    figures, never a request."""

    def __init__(
        self,
        get_stats: Callable[[float], list[dict[str, Any]]],
        ledger: Ledger,
        on_cache: Callable[[], None],
        poll: Callable[[], None],
    ) -> None:
        self._get_stats, self._ledger, self._on_cache, self._poll = get_stats, ledger, on_cache, poll
        self._cache: CacheUse | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm-statistics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for the question that is asked just now, not for a dead engine."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * QUESTION_SECONDS)

    def cache_use(self) -> CacheUse:
        assert self._cache is not None, "on_cache has not been called"
        return self._cache

    def _run(self) -> None:
        told = False
        while not self._stopping.is_set():
            self._poll()
            try:
                for record in self._get_stats(QUESTION_SECONDS):
                    self._observe(record)
                told = False
            except Exception as error:  # whatever an engine in trouble raises
                if not told and not self._stopping.is_set():
                    log.warning("TensorRT-LLM's iteration statistics cannot be had: %s", error)
                told = True
            self._stopping.wait(PAUSE_SECONDS if told else QUESTION_SECONDS / 10)

    def _observe(self, record: dict[str, Any]) -> None:
        report, use = iteration_report(record), cache_use(record)
        if report is not None:
            self._ledger.observe_iteration(report)
        if use is not None:
            first, self._cache = self._cache is None, use
            if first:
                self._on_cache()
