"""Predictors that hang, die, come back as another version, are slow, wrong or talk nonsense, under a live server: every answer stays
the target's own, and the metrics and the log say what happened.

Elsewhere: a predictor that is killed over and over under load (test_predictor_lost.py), a new version in place of a running one
(test_predictor_swap.py).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import predictor_stub
import pytest
from live_system import GEOMETRY, Live
from ports import free_port
from predictor_server import predictor_process

from ecospec_orchestrator.footprint import remote, stream
from ecospec_orchestrator.footprint.remote import RemoteFootprintSource

DEADLINE = 0.1


class Watched(Live):
    """With a predictor at a port."""

    def use(self, port: int) -> RemoteFootprintSource:
        ledger = self.harness.ledger
        source = RemoteFootprintSource(
            f"127.0.0.1:{port}", GEOMETRY, DEADLINE, on_version=ledger.state.observe_version_in_use
        )
        self.harness.scheduler.footprint_source = source
        return source

    def predicted(self) -> int:
        return sum(report.predicted_actual_overlap is not None for report in self.harness.reports)

    def see_predictions(self) -> None:
        enough = self.predicted() + 10
        self.right_until(lambda: self.predicted() >= enough)

    def see_fallbacks(self, reason: str) -> None:
        def seen() -> float:
            return self.metric("predictor_fallbacks_total", reason=reason)

        enough = seen() + 3
        self.right_until(lambda: seen() >= enough)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", (0.05, 0.2))
    monkeypatch.setattr(stream, "BACKOFF_SECONDS", (0.05, 0.2))
    with Watched() as running:
        yield running


def told(caplog: pytest.LogCaptureFixture, *parts: str) -> None:
    """The log holds these, in this order."""
    messages = iter([r.getMessage() for r in caplog.records])
    for part in parts:
        assert any(part in message for message in messages), f"{part!r} was not told after what came before it"


def test_a_predictor_that_hangs_dies_and_comes_back_as_another_version(
    live: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port()
    source = live.use(port)
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
    live.see_fallbacks("unavailable")
    with predictor_process(GEOMETRY, port=port, model_dir=tmp_path / "v1") as (process, _):
        live.see_predictions()
        process.send_signal(signal.SIGSTOP)
        live.see_fallbacks("deadline")
        process.send_signal(signal.SIGCONT)
        live.see_predictions()
    live.see_fallbacks("unavailable")
    with predictor_process(GEOMETRY, port=port, model_dir=tmp_path / "v2"):
        live.see_predictions()
    source.close()
    assert live.metric("predictor_version_changes_total") == 1
    assert live.metric("predictor_version_info", version="v2") == 1
    assert live.metric("request_success_total", finished_reason="error") == 0
    told(caplog, "cannot be reached", "(model v1)", "deadlines in a row", "called again", "was lost", "(model v2)")


def test_a_predictor_that_is_slow_wrong_or_talks_nonsense(live: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stub = predictor_stub.Stub(GEOMETRY)
    server, port = predictor_stub.serve(stub)
    source = live.use(port)
    try:
        live.see_predictions()  # well-formed, and wrong for this target
        stub.delay = 2 * DEADLINE
        live.see_fallbacks("deadline")
        stub.delay = 0.0
        live.see_predictions()
        for fault in ("length", "trees", "dtype", "range"):
            stub.fault = fault
            live.see_fallbacks("error")
        stub.fault = ""
        live.see_predictions()
    finally:
        stub.stopped.set()
        server.stop(0).wait()
        source.close()
    assert live.metric("request_success_total", finished_reason="error") == 0
    told(caplog, "deadlines in a row", "called again", "is malformed")
    assert sum("is malformed" in r.getMessage() for r in caplog.records) == 1, "it is told once"
