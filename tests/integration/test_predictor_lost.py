"""The predictor is killed and started again while an orchestrator generates: no completion is lost or changed by it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import numpy as np
from fake_engine import VOCABULARY, ChainEngine, greedy
from ports import free_port
from predictor_server import predictor_process
from scheduler_harness import Harness

from ecospec_orchestrator.footprint.remote import RemoteFootprintSource

STEPS = 30
IN_FLIGHT = 6  # more than run at once, so that some wait


class Load:
    """Requests without end; every one that ends is compared with what the target alone says."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.random = np.random.default_rng(5)
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.right = 0

    def run(self, enough: Callable[[], bool]) -> None:
        """Until there is enough, and then until everything that was asked for has ended."""
        give_up = time.monotonic() + 30
        while self.prompts or not enough():
            assert time.monotonic() < give_up
            while len(self.prompts) < IN_FLIGHT and not enough():
                name = f"r{self.right + len(self.prompts)}-{self.random.integers(2**40)}"
                self.prompts[name] = self.random.integers(0, VOCABULARY, int(self.random.integers(1, 20))).tolist()
                self.tokens[name] = []
                self.harness.submit(name, self.prompts[name], tokens=40)
            try:
                event = self.harness.events.get(timeout=0.1)
            except queue.Empty:
                continue
            self.tokens[event.request_id].extend(event.tokens)
            if event.finish_reason is not None:
                assert event.finish_reason == "length", event
                prompt = self.prompts.pop(event.request_id)
                assert self.tokens.pop(event.request_id) == greedy(prompt, 40)
                self.right += 1


def test_no_completion_is_lost_and_predictions_come_back() -> None:
    port, geometry = free_port(), ChainEngine.geometry
    h = Harness("ecospec")
    source = h.scheduler.footprint_source = RemoteFootprintSource(f"127.0.0.1:{port}", geometry, 0.25)
    load = Load(h)

    def predicted() -> int:
        return sum(report.predicted_actual_overlap is not None for report in h.reports)

    def missed() -> int:
        return sum(report.fallback is not None for report in h.reports)

    h.scheduler.start()
    try:
        for _ in range(2):
            with predictor_process(geometry, port=port) as (process, _):
                enough = predicted() + STEPS
                load.run(lambda enough=enough: predicted() >= enough)
                # Killed in the middle: half of the load runs before and half after.
                enough = predicted() + STEPS
                before = missed()

                def killed_and_missed(enough: int = enough, before: int = before) -> bool:
                    if process.poll() is None and predicted() >= enough:
                        process.kill()
                        process.wait()
                    return missed() >= before + STEPS

                load.run(killed_and_missed)
        reasons = {report.fallback for report in h.reports} - {None}
        assert "unavailable" in reasons and reasons <= {"unavailable", "deadline"}
        counted = sum(
            h.ledger.registry.get_sample_value("ecospec_predictor_fallbacks_total", {"reason": reason}) or 0
            for reason in reasons
        )
        assert counted == missed() >= 2 * STEPS
        assert load.right >= 10 and predicted() >= 4 * STEPS
    finally:
        h.scheduler.stop()
        source.close()
