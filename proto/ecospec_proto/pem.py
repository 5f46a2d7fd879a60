"""PEM files of TLS, checked before a connection fails on them in a thread of gRPC's or in the middle of a handshake."""

from __future__ import annotations

import ipaddress
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)
Marks = tuple[tuple[int, int, int], ...]


def file_marks(*paths: Path | None) -> Marks:
    """What changes when one of the files does, whether written in place, renamed over, or reached by another symlink; empty while
    one is missing."""
    try:
        stats = [path.stat() for path in paths if path is not None]
    except OSError:
        return ()
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def server_context(
    authorities: Path | None, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """A server's side of TLS 1.2 or newer with what the files hold. Raises OSError, of which ssl.SSLError is one kind, for a file that
    cannot be read, is no PEM, or a key that is encrypted or another certificate's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authorities is not None:
        context.load_verify_locations(authorities)
    if certificate is not None:
        context.load_cert_chain(certificate, key, password=lambda: b"")  # or an encrypted key asks the terminal
    return context


def check_pem(authorities: Path | None, certificate: Path | None = None, key: Path | None = None) -> None:
    """Raises OSError as server_context() does."""
    server_context(authorities, certificate, key)


def is_loopback(host: str) -> bool:
    """Whether what listens there is out of reach of other machines, so that plain text will do."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_if_open(key: Path) -> None:
    """A group may have access: it is how Kubernetes lets a process that is not root read a Secret. Raises OSError."""
    mode = key.stat().st_mode
    if mode & 0o007:
        log.warning(
            "The key file %s has mode %03o, so everybody on this machine can use it; set it to 600, or 640 for a group.",
            key,
            mode & 0o777,
        )
