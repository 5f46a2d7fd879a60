"""A port of 127.0.0.1 on which nothing listens, for a server of a test."""

from __future__ import annotations

import socket


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
