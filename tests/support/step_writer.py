"""Writes rows of equal numbers into a step file as fast as it can: the other process in the tests of step files."""

from __future__ import annotations

from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from ecospec_orchestrator.engine.tensorrt_llm.plugin.step_file import StepShape, StepWriter


def keep_writing(path: Path, shape: StepShape, ready: Event, stop: Event) -> None:
    writer, number = StepWriter(path, shape), 0
    ready.set()
    while not stop.is_set():
        number += 1
        writer.append(np.full(shape.width, number, np.int32))
