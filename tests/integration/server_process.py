"""The HTTP server in processes of their own, around a fake step loop."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from ports import free_port

PROGRAM = """
import logging, sys, time
from concurrent.futures import ThreadPoolExecutor
import uvloop
from types import SimpleNamespace
sys.path.insert(0, {here!r})
from api_server import EchoScheduler
from conftest import make_byte_tokenizer
from ecospec_orchestrator.accounting.ledger import Ledger
from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator import server
from ecospec_orchestrator.server import Serving, bind
from ecospec_orchestrator.settings import load_settings
from ecospec_orchestrator.state.sharing import open_sharing
from ecospec_proto.geometry import TargetGeometry

GEOMETRY = TargetGeometry("echo", "1", 258, 8, 3, 32, 4)


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def build(settings):
    if settings.model == "chain":  # the real scheduler, which takes a while to import
        from fake_engine import ChainEngine
        from live_system import chain_harness, chain_tokenizer
        from ecospec_orchestrator.scheduler import Limits
        harness = chain_harness(step_seconds=0.08)
        scheduler, tokenizer, ledger, geometry = harness.scheduler, chain_tokenizer(), harness.ledger, ChainEngine.geometry
        scheduler.limits = Limits(settings.max_running, settings.max_waiting, settings.max_context_tokens)
    else:
        if settings.model == "slow":  # as loading does: in a thread that the end of the interpreter would wait for
            with ThreadPoolExecutor(1) as pool:
                pool.submit(compute, 60).result()
        time.sleep(0.5)
        scheduler, tokenizer, ledger, geometry = EchoScheduler(step_seconds=0.02), make_byte_tokenizer(), Ledger(), GEOMETRY
    sharing = open_sharing(settings, geometry, ledger.state)
    return SimpleNamespace(
        scheduler=scheduler, tokenizer=tokenizer, model_id="echo", ledger=ledger, info={{}}, store=sharing.store,
        reconfigure=lambda now, before: print("now", now.policy, now.gamma, flush=True),
        close=lambda: (
            time.sleep(600 if settings.model == "stuck" else 0), scheduler.stop(), sharing.close(), print("closed", flush=True)
        ),
    )


if "model=stuck" in sys.argv:
    server.CLOSE_SECONDS = 0.5
logging.basicConfig(level="INFO", stream=sys.stderr)
settings = load_settings(dict(arg.split("=", 1) for arg in sys.argv[1:]))
try:
    let_go = lambda: print("let go", flush=True)
    uvloop.run(Serving(settings, bind(settings.host, settings.port), build, let_go).run())
except SettingsError as error:
    print(error, flush=True)
    sys.exit(2)
"""


class ServerProcesses:
    """Call it with settings -> (process, its address). program: with {here} for the folder of this file; log: the file of what they all
    tell. All are killed by close()."""

    def __init__(self, folder: Path, program: str = PROGRAM) -> None:
        here = Path(__file__).parent
        self._program, self.log = folder / "serve.py", folder / "log"  # of all of them
        self._program.write_text(program.format(here=str(here)))
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
        self._children: list[subprocess.Popen[str]] = []

    def __call__(self, **settings: Any) -> tuple[subprocess.Popen[str], str]:
        settings.setdefault("port", free_port())
        command = [sys.executable, str(self._program), *(f"{name}={value}" for name, value in settings.items())]
        with self.log.open("a") as log:
            child = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=log, text=True)
        self._children.append(child)
        scheme = "https" if "tls_certificate" in settings else "http"
        return child, f"{scheme}://127.0.0.1:{settings['port']}"

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def read_line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def health(url: str, verify: ssl.SSLContext | bool = True) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            return httpx.get(f"{url}/health", trust_env=False, verify=verify).json()["status"]
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=20)
