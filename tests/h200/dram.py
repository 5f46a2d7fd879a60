"""Bytes that the GPUs read from their memory, as Nsight Systems samples them beside whatever runs; nothing is traced or slowed down."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
SESSION = "ecospec"
# "DRAM Read Bandwidth [Throughput %]", of the peak that the same report tells; one series per GPU.
QUERY = """
SELECT m.typeId, MIN(m.timestamp), MAX(m.timestamp), AVG(m.value)
FROM GPU_METRICS m JOIN TARGET_INFO_GPU_METRICS names ON m.typeId = names.typeId AND m.metricId = names.metricId
WHERE names.metricName LIKE 'DRAM Read%' GROUP BY m.typeId
"""
PEAK = "SELECT MIN(memoryBandwidth) FROM TARGET_INFO_GPU WHERE memoryBandwidth > 0"


class Sampler:
    """problem: why nothing is measured, once that is known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problem = None if shutil.which("nsys") else "nsys is not installed"

    def during(self, work: Callable[[], T], name: str) -> tuple[T, float | None]:
        """What work returned, and the bytes that all GPUs read meanwhile."""
        report = self._folder / name
        options = ("--gpu-metrics-devices=all", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true")
        if self.problem or not self._nsys("start", f"--session-new={SESSION}", *options, f"--output={report}"):
            return work(), None
        try:
            result = work()
        finally:
            stopped = self._nsys("stop", f"--session={SESSION}")
        database = report.with_suffix(".sqlite")
        export = ("--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report) + ".nsys-rep")
        if not stopped or not self._nsys("export", *export):
            return result, None
        try:
            return result, bytes_read(database)
        except (sqlite3.Error, ValueError) as error:
            self.problem = f"{database} cannot be understood: {error}"
            return result, None

    def _nsys(self, *arguments: str) -> bool:
        done = subprocess.run(("nsys", *arguments), capture_output=True, text=True, timeout=900)
        if done.returncode:
            self.problem = f"nsys {arguments[0]} failed: {' '.join((done.stderr or done.stdout).split())[:300]}"
        return done.returncode == 0


def bytes_read(database: Path) -> float:
    """Of all GPUs, over the time that was sampled. Raises sqlite3.Error and ValueError."""
    connection = sqlite3.connect(database)
    try:
        peak = connection.execute(PEAK).fetchone()[0]
        series = connection.execute(QUERY).fetchall()
    finally:
        connection.close()
    if not peak or not series:
        raise ValueError("it has no samples of memory reads")
    return float(sum((last - first) / 1e9 * share / 100 * peak for _, first, last, share in series))
