"""These tests need a CUDA device. Elsewhere they are taken out of the run, and one line at its end says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_CUDA:
        items[:] = [item for item in items if HERE not in item.path.parents]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not HAS_CUDA:
        terminalreporter.write_line("GPU tests did not run: no CUDA device here.")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """`pytest tests/gpu` alone is no failure where there is nothing to run."""
    if not HAS_CUDA and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
