"""A newcomer's path: what the documents tell to type works on the demo, and the memory that they name is enough."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_process import Demo, running
from documents import ROOT, code

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """As `make run` starts it, but on free ports and without measuring the machine first."""
    with running(tmp_path_factory.mktemp("cache"), "--policy", "ecospec") as found:
        yield found


@pytest.mark.parametrize("name", ("README.md", "docs/quickstart.md", "docs/deploying.md"))
def test_what_the_documents_tell_to_type_is_answered(demo: Demo, name: str) -> None:
    lines = [line for line in code((ROOT / name).read_text(encoding="utf-8")) if re.match(r"curl .*:8000/", line)]
    assert lines
    for line in lines:
        typed = line.replace("http://127.0.0.1:8000", demo.url)
        done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (line, done.stderr)
        if '"stream": true' in line:
            assert done.stdout.rstrip().endswith("data: [DONE]") and '"content":' in done.stdout
        elif "/v1/" in line:
            assert json.loads(done.stdout)["metrics"]["ecospec"]["steps"] > 0
        else:
            assert "ecospec_steps_total" in done.stdout


def test_the_memory_that_the_readme_names_is_enough(demo: Demo) -> None:
    demo.complete("Write a Python function that adds two numbers.", 64)
    peaks = (
        re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
        for pid in (demo.process.pid, *demo.predictor_pids())
    )
    used = sum(int(peak[1]) * 1024 for peak in peaks if peak is not None)
    named = re.search(r"needs (\d+) GB of memory", README)
    assert named is not None and 1e9 < used < int(named[1]) * 1e9, f"{used / 1e9:.1f} GB at most"
