"""A real Redis server of a test's own: on a free port, in memory only."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import Any

import redis
from ports import free_port
from programs import require

COMMAND = "redis-server"
START_SECONDS = 20.0


def require_redis() -> None:
    """Skips the test without a server, but not where tests decide what is released."""
    require(COMMAND, "redis-server")


class RedisServer:
    """options: of the configuration, such as {"requirepass": "x"}. A context manager; start() after kill() uses the same port."""

    def __init__(self, **options: str) -> None:
        require_redis()
        self.port, self._options = free_port(), options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        options = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "no", **self._options}
        arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
        self._process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"redis-server did not start on port {self.port}") from None
                time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, **options)

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def eventually(true: Any, seconds: float = 20.0) -> None:
    """Waits until true() is; the test fails when that takes too long."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
