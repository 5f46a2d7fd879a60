"""PEM files of TLS, checked before a connection fails on them in a thread of gRPC's."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)


def check_pem(authorities: Path | None, certificate: Path | None = None, key: Path | None = None) -> None:
    """Raises OSError, of which ssl.SSLError is one kind, for a file that cannot be read, is no PEM, or a key that is encrypted or
    another certificate's."""
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if authorities is not None:
        trial.load_verify_locations(authorities)
    if certificate is not None:
        trial.load_cert_chain(certificate, key, password=lambda: b"")  # or an encrypted key asks the terminal


def warn_if_open(key: Path) -> None:
    """Raises OSError."""
    mode = key.stat().st_mode
    if mode & 0o077:
        log.warning(
            "The key file %s has mode %03o, so others than its owner can use it; set it to 600.", key, mode & 0o777
        )
