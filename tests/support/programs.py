"""Programs that tests start and that pip does not bring."""

from __future__ import annotations

import os
import shutil

import pytest


def require(command: str, package: str) -> str:
    """Skips the test without it, but not where tests decide what is released. package: Debian's name."""
    if shutil.which(command) is None:
        text = f"{command} is not installed; install it (Debian: apt-get install {package}) to run this test."
        pytest.fail(text) if os.environ.get("CI") == "true" else pytest.skip(text)
    return command
