"""Where replicas meet: the address of the shared state store (Redis 6.2 or newer), a client for it, and the names of its keys.

Needs the package redis, which is imported when a client is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

if TYPE_CHECKING:
    import redis
    import redis.asyncio

TARGETS_KEY = "ecospec:targets"  # set of the fingerprints that have published predictors
TRACE_FIELD = b"record"  # of an entry of the trace stream: a message of trace_record.py
VERSION_FIELD = b"version"  # of an entry of the version stream: a message of predictor_version.py
ALLOWED = "redis://host:6379/0, or rediss://host:6380/0?ssl_ca_certs=FILE over TLS, with user:password@ before the host"
_PORT = 6379


class StateStoreError(Exception):
    """The store cannot be used; the text is one sentence without a secret."""


def traces_key(fingerprint: str) -> str:
    """The capped stream of trace records of one target."""
    return f"ecospec:traces:{fingerprint}"


def versions_key(fingerprint: str) -> str:
    """The capped stream of published predictors of one target; the newest entry is the current one."""
    return f"ecospec:versions:{fingerprint}"


def settings_key(fingerprint: str) -> str:
    """The hash of live settings of one target's replicas; its field "revision" grows with every change."""
    return f"ecospec:settings:{fingerprint}"


def quota_key(fingerprint: str, bucket: str) -> str:
    """The hash of one token bucket. Braces keep the buckets of one target in one slot of a cluster."""
    return f"ecospec:quota:{{{fingerprint}}}:{bucket}"


@dataclass(frozen=True)
class StoreAddress:
    """str() is fit for a log: it holds no user and no password."""

    host: str
    port: int
    database: int
    tls: bool
    ca_file: str | None = None
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, password: str = "") -> StoreAddress:
        """password wins over the URL's. Raises ValueError, whose text never holds any part of the URL."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError:
            raise ValueError(f"it is no address of a state store; allowed: {ALLOWED}") from None
        ca_file = options.pop("ssl_ca_certs", None)
        database = parts.path.strip("/") or "0"
        tls = parts.scheme == "rediss"
        if (
            parts.scheme not in ("redis", "rediss")
            or not host
            or options
            or parts.fragment
            or not (database.isascii() and database.isdecimal() and len(database) < 6)
            or (ca_file is not None and not (tls and ca_file))
        ):
            raise ValueError(f"it is no address of a state store; allowed: {ALLOWED}")
        user, own = (unquote(part) if part else None for part in (parts.username, parts.password))
        return cls(host, port or _PORT, int(database), tls, ca_file, user, password or own)

    def __str__(self) -> str:
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{shown}:{self.port}/{self.database}"


def connect(address: StoreAddress, timeout_seconds: float) -> redis.Redis:
    """A client that connects when first used and leaves trying again to its owner. Every call raises redis.RedisError."""
    import redis

    return redis.Redis(**_options(address, timeout_seconds))


def connect_async(address: StoreAddress, timeout_seconds: float) -> redis.asyncio.Redis:
    import redis.asyncio

    return redis.asyncio.Redis(**_options(address, timeout_seconds, ".asyncio"))


def _options(address: StoreAddress, timeout_seconds: float, kind: str = "") -> dict[str, Any]:
    from importlib import import_module

    retry = import_module(f"redis{kind}.retry").Retry
    no_backoff = import_module("redis.backoff").NoBackoff
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": address.database,
        "username": address.user,
        "password": address.password,
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": retry(no_backoff(), 0),
        "protocol": 2,
    }
    if address.tls:
        options |= {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True}
        options |= {"ssl_ca_certs": address.ca_file} if address.ca_file else {}
    return options
