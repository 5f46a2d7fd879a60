"""What the plug-in counted of each verify step, from its file into the ledger."""

from __future__ import annotations

import logging
from pathlib import Path

from ...accounting.ledger import Ledger
from .plugin.step_file import StepFileError, StepReader

log = logging.getLogger(__name__)


class StepTally:
    """poll() never fails: what cannot be read costs figures, never a request."""

    def __init__(self, path: Path, ledger: Ledger) -> None:
        self._ledger = ledger
        self._reader: StepReader | None = None
        try:
            self._reader = StepReader(path)
        except StepFileError as error:
            log.warning("How many experts a step reads cannot be counted: %s", error)

    def poll(self) -> None:
        if self._reader is None:
            return
        missed = self._reader.missed
        for step in self._reader.poll():
            self._ledger.observe_distinct_experts(step.distinct_experts.tolist())
        if self._reader.missed > missed:
            log.warning("The experts of %d steps were not counted in time", self._reader.missed - missed)
