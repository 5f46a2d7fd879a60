"""Sampled traces from the plug-in's folder to whoever shares them: the state store, in the form that the embedded engine gives it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_record import encode_record

from ...accounting.state_metrics import StateMetrics
from ...state.base import StateStore
from .plugin.spool import take_records

log = logging.getLogger(__name__)


class TraceIntake:
    """poll() never fails: a trace that cannot be taken costs a sample, never a request."""

    def __init__(self, folder: Path, geometry: TargetGeometry, store: StateStore, metrics: StateMetrics) -> None:
        self._folder, self._geometry, self._store, self._metrics = folder, geometry, store, metrics
        self._complained = False

    def poll(self) -> None:
        try:
            for document in take_records(self._folder, self._geometry):
                self._metrics.sampled_tokens.inc(int((document.routes >= 0).all((1, 2)).sum()))
                self._store.append_trace(partial(encode_record, document, self._geometry))
        except OSError as error:
            if not self._complained:
                log.warning("Sampled traces cannot be taken: %s", error)
            self._complained = True
