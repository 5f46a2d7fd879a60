"""Serve over HTTP while the model loads, say when it is ready, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ecospec_proto.background import in_daemon_thread

from .accounting.ledger import Ledger
from .api.admin import Control, create_admin
from .api.app import attach, create_app
from .api.base import SchedulerLike
from .api.connections import SOCKET_BUFFER_BYTES, ConnectionLimits, bounded_protocol
from .api.service import Service
from .core import SettingsError
from .live import LiveSettings
from .settings import ADMIN_KEY_CHARACTERS, Settings
from .state.base import StateStore
from .tls import HttpTls, http_tls

log = logging.getLogger(__name__)
POLL_SECONDS = 0.05
CLOSE_SECONDS = 30.0


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

    @property
    def store(self) -> StateStore: ...

    def reconfigure(self, settings: Settings, before: Settings) -> None:
        """Use live settings that have changed. Raises SettingsError, and then nothing has changed."""
        ...

    def close(self) -> None: ...


class _Server(uvicorn.Server):
    """Signals are handled here, not by uvicorn: the first drains, the second stops at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, setting: str = "") -> socket.socket:
    """Take the address before the model loads. setting: "admin_" for admin_host and admin_port. Raises SettingsError when it cannot
    be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it: what a client does not take is not kept for it without bounds.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    except OSError as error:
        raise SettingsError(
            f"Setting {setting}host is '{host}', which cannot be resolved ({error}); use 127.0.0.1."
        ) from error
    try:
        sock.bind(address)
        # Until here a second process could bind, too; listening makes the conflict show now.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"Port {port} on {host} cannot be used ({error.strerror}); stop what runs there"
            f" or choose another with --{setting.replace('_', '-')}port."
        ) from error
    sock.set_inheritable(True)
    return sock


def http_config(
    app: ASGIApp, settings: Settings, on_slow: Callable[[str], None], tls: HttpTls | None = None
) -> uvicorn.Config:
    """on_slow: see ConnectionLimits."""
    limits = ConnectionLimits(
        settings.client_read_seconds, settings.client_write_seconds, settings.max_connections, on_slow
    )
    factory: Callable[..., ssl.SSLContext] | None = None
    if tls is not None:
        context = tls.context
        factory = lambda _config, _default: context
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        ws="none",
        log_config=None,
        access_log=settings.log_level == "debug",
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=30,
        proxy_headers=False,  # whose word a client's address is does not matter here, and anyone could send them
        server_header=False,
        ssl_context_factory=factory,
    )


def example(host: str, port: int, scheme: str = "http", guarded: bool = False) -> str:
    """The one line that is printed when the server is ready."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    at = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    key = " -H 'Authorization: Bearer KEY'" if guarded else ""
    body = '{"messages": [{"role": "user", "content": "What is gravity?"}], "max_tokens": 64, "temperature": 0, "stream": true}'
    return (
        f"EcoSpec is ready. Try: curl -N {at}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    )


class Serving:
    """One server from start to stop. before_exit: what has to be done where a signal ends the process while it loads, since run() does
    not return then. Raises SettingsError for settings that cannot be used, before anything is loaded."""

    def __init__(
        self,
        settings: Settings,
        sock: socket.socket,
        build: Callable[[Settings], SystemLike],
        before_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._sock = sock
        self._build = build
        self._before_exit = before_exit
        self._system: SystemLike | None = None
        self._signals = 0
        self._stop = asyncio.Event()
        self._tls = http_tls(settings)
        self._admin_sock = _admin_socket(settings)

    async def run(self, before_ready: Callable[[Any], None] | None = None) -> None:
        """Returns when the server has stopped; a signal while it loads ends the process here. before_ready gets what was built, once the
        model is loaded and before requests are taken; it may block and runs in a thread.

        Raises what the build raises.
        """
        app = create_app(None, None, "", self._settings, Ledger())  # the system brings its own ledger
        service: Service = app.state.service
        control = Control(service, app.state.keys)

        def on_slow(phase: str) -> None:
            service.ledger.guard.slow_clients.labels(phase).inc()

        server = _Server(http_config(app, self._settings, on_slow, self._tls))
        servers = [(server, self._sock)]
        if self._admin_sock is not None:
            admin = create_admin(control, self._settings.admin_key.get_secret_value())
            servers.append((_Server(http_config(admin, self._settings, on_slow, self._tls)), self._admin_sock))
            log.info("Administrators are served on port %d.", self._admin_sock.getsockname()[1])
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, [each for each, _ in servers])
        serving = {asyncio.create_task(each.serve(sockets=[sock])) for each, sock in servers}
        starting = asyncio.create_task(self._start(app, control, before_ready))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({*serving, starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait({*serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            elif stopping.done() and service.scheduler is None:  # no request was taken
                self._leave()
            control.stopping = True
            await self._drain(service)
        finally:
            for each, _ in servers:
                each.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)
            stopping.cancel()
            starting.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            if self._system is not None:
                await _close(self._system)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _on_signal(self, servers: list[_Server]) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            for server in servers:
                server.force_exit = True

    def _leave(self) -> NoReturn:
        """Nothing was served, so nothing can be lost. What still compiles or expands weights in a thread would keep the interpreter
        from ending for as long as that takes, so it is not asked."""
        log.info("Stopping before the model was loaded.")
        self._before_exit()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    async def _start(self, app: FastAPI, control: Control, before_ready: Callable[[Any], None] | None) -> None:
        settings, service = self._settings, control.service
        log.info("Loading model '%s'; /health says 503 until it is done.", settings.model)
        system = await in_daemon_thread(lambda: self._build(settings))
        self._system = system
        system.scheduler.start()
        if before_ready is not None:
            await in_daemon_thread(lambda: before_ready(system))

        def use(now: Settings, before: Settings) -> None:
            system.reconfigure(now, before)
            service.settings = now
            logging.getLogger().setLevel(now.log_level.upper())

        service.ledger, service.quotas = system.ledger, system.store
        control.live = await in_daemon_thread(lambda: LiveSettings(settings, use, system.store))
        attach(app, system.scheduler, system.tokenizer, system.model_id, system.info)
        log.info("Generating a first token.")
        await service.check_ready()
        port, guarded = self._sock.getsockname()[1], not app.state.keys.open
        print(example(settings.host, port, "http" if self._tls is None else "https", guarded), flush=True)

    async def _drain(self, service: Service) -> None:
        """Refuse new work, let what was taken finish until the limit for it, then cancel the rest."""
        service.draining = True
        if service.scheduler is None or not service.posts:
            return
        seconds = service.settings.drain_limit_seconds
        log.info("Stopping: %d requests may finish within %g s; a second signal ends them now.", service.posts, seconds)
        deadline = asyncio.get_running_loop().time() + seconds
        while service.posts and self._signals < 2 and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if service.active:
            log.warning("Stopping: %d requests are cancelled.", len(service.active))
            service.cancel_all()


async def _close(system: SystemLike) -> None:
    """A step that hangs must not keep the process."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await in_daemon_thread(system.close)
    except TimeoutError:
        log.error("The engine did not stop within %g s; the process ends without it.", CLOSE_SECONDS)


def _admin_socket(settings: Settings) -> socket.socket | None:
    """None when there is no port for administrators. Raises SettingsError, also for a port without a key that is worth one."""
    if settings.admin_port is None:
        return None
    characters = len(settings.admin_key.get_secret_value())
    if characters < ADMIN_KEY_CHARACTERS:
        raise SettingsError(
            f"Setting admin_key has {characters} characters and admin_port is {settings.admin_port}; administrators need a key of at "
            f"least {ADMIN_KEY_CHARACTERS} characters: set ECOSPEC_ADMIN_KEY to what `openssl rand -hex 32` prints."
        )
    return bind(settings.admin_host, settings.admin_port, "admin_")
