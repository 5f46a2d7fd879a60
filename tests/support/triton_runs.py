"""Running a test's own `python FILE MODE` with triton: its interpreter has to be chosen before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest


class NoTriton:
    """Says once, in pytest's last lines, what did not run."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("Triton kernels were not checked: triton is not installed here.")


def run_with_triton(file: str, mode: str, request: pytest.FixtureRequest) -> str:
    """What `python file mode` prints; mode "interpret" runs kernels on CPU tensors. Skips where triton is not installed."""
    plugins = request.config.pluginmanager
    if find_spec("triton") is None:
        if not plugins.has_plugin("no-triton"):
            plugins.register(NoTriton(), "no-triton")
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if mode == "interpret" else "0"}
    done = subprocess.run(
        [sys.executable, file, mode], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def widen_bfloat16_products() -> None:
    """The interpreter keeps bfloat16 as whole numbers and would multiply these; give it the float32 that they stand for."""
    import triton.language as tl
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle: object) -> object:
        if handle.dtype.scalar != tl.bfloat16:  # type: ignore[attr-defined]
            return handle
        bits = handle.data.view(np.uint16).astype(np.uint32)  # type: ignore[attr-defined]
        return interpreter.TensorHandle((bits << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest)
