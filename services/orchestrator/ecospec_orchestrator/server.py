"""Serve over HTTP while the model loads, say when it is ready, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from ecospec_proto.background import in_daemon_thread

from .accounting.ledger import Ledger
from .api.app import attach, create_app
from .api.base import SchedulerLike
from .api.service import Service
from .core import SettingsError
from .settings import Settings

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05


class SystemLike(Protocol):
    """What build_system() returns: everything behind HTTP."""

    @property
    def scheduler(self) -> SchedulerLike:
        """Not started yet."""
        ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def model_id(self) -> str: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def info(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class _Server(uvicorn.Server):
    """Signals are handled here, not by uvicorn: the first drains, the second stops at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Take the address before the model loads. Raises SettingsError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise SettingsError(f"Setting host is '{host}', which cannot be resolved ({error}); use 127.0.0.1.") from error
    try:
        sock.bind(address)
        # Until here a second process could bind, too; listening makes the conflict show now.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"Port {port} on {host} cannot be used ({error.strerror}); stop what runs there"
            " or choose another with --port."
        ) from error
    sock.set_inheritable(True)
    return sock


def example(host: str, port: int) -> str:
    """The one line that is printed when the server is ready."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    at = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    body = '{"messages": [{"role": "user", "content": "What is gravity?"}], "max_tokens": 64, "temperature": 0, "stream": true}'
    return f"EcoSpec is ready. Try: curl -N {at}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


class Serving:
    """One server from start to stop."""

    def __init__(self, settings: Settings, sock: socket.socket, build: Callable[[Settings], SystemLike]) -> None:
        self._settings = settings
        self._sock = sock
        self._build = build
        self._system: SystemLike | None = None
        self._signals = 0
        self._stop = asyncio.Event()

    async def run(self, before_ready: Callable[[Any], None] | None = None) -> None:
        """Returns when the server has stopped. before_ready gets what was built, once the model is loaded and before requests are
        taken; it may block and runs in a thread.

        Raises what the build raises.
        """
        app = create_app(None, None, "", self._settings, Ledger())  # the system brings its own ledger
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=self._settings.log_level == "debug",
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
        )
        server = _Server(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, server)
        serving = asyncio.create_task(server.serve(sockets=[self._sock]))
        starting = asyncio.create_task(self._start(app, before_ready))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(app.state.service)
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            stopping.cancel()
            starting.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            if self._system is not None:
                await asyncio.to_thread(self._system.close)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self, server: uvicorn.Server) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            server.force_exit = True

    async def _start(self, app: FastAPI, before_ready: Callable[[Any], None] | None) -> None:
        settings = self._settings
        log.info("Loading model '%s'; /health says 503 until it is done.", settings.model)
        system = await in_daemon_thread(lambda: self._build(settings))
        self._system = system
        system.scheduler.start()
        if before_ready is not None:
            await in_daemon_thread(lambda: before_ready(system))
        app.state.service.ledger = system.ledger
        attach(app, system.scheduler, system.tokenizer, system.model_id, system.info)
        log.info("Generating a first token.")
        await app.state.service.check_ready()
        port = self._sock.getsockname()[1]
        print(example(settings.host, port), flush=True)

    async def _drain(self, service: Service) -> None:
        """Refuse new work, let running requests finish for drain_seconds, then cancel them."""
        service.draining = True
        if service.scheduler is None or not service.active:
            return
        log.info("Stopping: %d requests may finish within %g s.", len(service.active), self._settings.drain_seconds)
        deadline = asyncio.get_running_loop().time() + self._settings.drain_seconds
        while service.active and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if service.active:
            log.warning("Stopping: %d requests are cancelled.", len(service.active))
            service.cancel_all()
