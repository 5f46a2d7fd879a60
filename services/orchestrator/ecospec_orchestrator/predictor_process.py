"""The expert predictor as a child process of `ecospec-orchestrator demo`, started again when it dies."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .core import SettingsError
from .footprint.channel import ClientTls
from .settings import PREFIX, Settings

log = logging.getLogger(__name__)
FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a child that lived this long starts with a short back-off again
STOP_SECONDS = 10.0
STDERR = 2  # standard output carries the server's one line when it is ready
SERVICE = "ecospec.predictor.v1.ExpertPredictorService"  # says SERVING once the model has warmed up, "" before


def predictor_command(settings: Settings, embeddings: Path) -> list[str]:
    """The command line of the demo's predictor; embeddings: the target's GGUF file. Raises SettingsError when the
    predictor's files are missing."""
    model = settings.demo_dir / "predictor"
    if not model.is_dir():
        raise SettingsError(
            f"Setting demo_dir is '{settings.demo_dir}', which has no folder 'predictor'; run in the "
            "repository or name its models/demo folder."
        )
    if settings.predictor_tls_ca is not None:
        raise SettingsError(
            f"Setting predictor_tls_ca is '{settings.predictor_tls_ca}', but the demo's own predictor is reached on this machine "
            "in plain text; remove the setting, or start the predictor and the server each by its own serve command."
        )
    host, _, port = settings.predictor_address.rpartition(":")
    options = {"model-dir": model, "embeddings": embeddings, "host": host.strip("[]"), "port": port}
    command = [sys.executable, "-m", "ecospec_predictor.cli", "serve"]
    return command + [part for name, value in options.items() for part in (f"--{name}", str(value))]


def is_serving(address: str, tls: ClientTls | None = None, timeout_seconds: float = 1.0) -> bool:
    """Whether the predictor at host:port says SERVING through grpc.health.v1."""
    with grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, tls.credentials()) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_seconds
            )
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def wait_until_serving(
    address: str, timeout_seconds: float, tls: ClientTls | None = None, stopping: threading.Event | None = None
) -> bool:
    """Whether it serves within the time; a set `stopping` ends the wait."""
    stopping = stopping or threading.Event()
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and not stopping.is_set():
        if is_serving(address, tls):
            return True
        stopping.wait(0.25)
    return False


class PredictorProcess:
    """Runs a command until stop(); when it ends by itself it is started again with a bounded back-off.

    The child gets its own process group: a Ctrl-C in the terminal reaches only the server, which stops the child after
    its requests are done.
    """

    def __init__(
        self,
        command: Sequence[str],
        first_backoff_seconds: float = FIRST_BACKOFF_SECONDS,
        longest_backoff_seconds: float = LONGEST_BACKOFF_SECONDS,
    ) -> None:
        self._command = list(command)
        self._first_backoff = first_backoff_seconds
        self._longest_backoff = longest_backoff_seconds
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="predictor-process", daemon=True)
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def start(self) -> None:
        self._launch()
        self._thread.start()

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM, and SIGKILL when the child does not follow within so many seconds; safe to call twice."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def wait_until_serving(self, address: str, timeout_seconds: float) -> bool:
        return wait_until_serving(address, timeout_seconds, stopping=self._stopping)

    def _launch(self) -> None:
        # The child has settings of its own and would refuse the orchestrator's.
        ours = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
        environment = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        self._child = subprocess.Popen(
            self._command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=STDERR
        )
        self.starts += 1

    def _watch(self) -> None:
        backoff, born = self._first_backoff, time.monotonic()
        while not self._stopping.wait(0.1):
            assert self._child is not None
            code = self._child.poll()
            if code is None:
                continue
            if time.monotonic() - born > STEADY_SECONDS:
                backoff = self._first_backoff
            log.warning(
                "The predictor ended with code %d; it is started again in %g s, meanwhile drafts are chosen by "
                "likelihood.",
                code,
                backoff,
            )
            if self._stopping.wait(backoff):
                return
            backoff = min(2 * backoff, self._longest_backoff)
            born = time.monotonic()
            self._launch()
