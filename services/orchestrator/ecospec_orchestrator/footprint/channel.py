"""Channels to the predictor, in plain text or over TLS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ecospec_proto.pem import check_pem, warn_if_open

from ..core import SettingsError
from ..settings import Settings
from .base import FootprintUnavailableError


@dataclass(frozen=True)
class ClientTls:
    """PEM files: the authorities that may vouch for the predictor and, where it asks for one, our certificate and its key."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Read from the files now, so that a new channel uses a new certificate. Raises OSError."""
        if self.certificate is None or self.key is None:
            return grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes())


def client_tls(settings: Settings) -> ClientTls | None:
    """What the settings ask for; None is plain text. Raises SettingsError for half a configuration and for files
    that cannot be used."""
    ca, certificate, key = settings.predictor_tls_ca, settings.predictor_tls_certificate, settings.predictor_tls_key
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or (certificate is None) != (key is None):
        missing = "ca" if ca is None else "certificate" if certificate is None else "key"
        raise SettingsError(
            f"Setting predictor_tls_{missing} is missing while other TLS settings of the predictor are given; predictor_tls_ca "
            "is always needed, and predictor_tls_certificate and predictor_tls_key only together."
        )
    tls = ClientTls(ca, certificate, key)
    try:
        check_pem(ca, certificate, key)
        if key is not None:
            warn_if_open(key)
    except OSError as error:
        names = ", ".join(str(path) for path in (ca, certificate, key) if path is not None)
        raise SettingsError(
            f"Settings predictor_tls_ca, predictor_tls_certificate and predictor_tls_key are {names}, which cannot be used "
            f"({error}); PEM files with the predictor's authorities, our certificate and its unencrypted key are allowed."
        ) from None
    return tls


def channel(address: str, tls: ClientTls | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """Raises FootprintUnavailableError when a TLS file cannot be read, as in the middle of a rotation."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    try:
        return grpc.aio.secure_channel(address, tls.credentials(), options=options)
    except OSError as error:
        raise FootprintUnavailableError(
            "unavailable", f"The TLS files for the predictor at {address} cannot be read ({error})."
        ) from error
