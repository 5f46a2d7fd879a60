"""TLS of the HTTP servers: the certificate's files are looked at before every handshake, so that renewed ones are used at once."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from ecospec_proto.pem import file_marks, is_loopback, server_context, warn_if_open

from .core import SettingsError
from .settings import Settings

log = logging.getLogger(__name__)


class HttpTls:
    """context: to listen with. Open connections keep what they were made with. Raises SettingsError when the files cannot be used; a
    later bad change is logged once, and the last good certificate stays in use."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate, self._key = certificate, key
        self._marks = file_marks(certificate, key)
        try:
            self.context = self._current = server_context(None, certificate, key)
            warn_if_open(key)
        except OSError as error:
            raise SettingsError(
                f"Settings tls_certificate and tls_key are {certificate} and {key}, which cannot be used ({error}); PEM files with a "
                "certificate and its unencrypted key are allowed."
            ) from None
        self.context.sni_callback = self._on_hello

    def _on_hello(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called at the beginning of every handshake, whether the client names a server or not."""
        marks = file_marks(self._certificate, self._key)
        if marks != self._marks:
            self._marks = marks  # also of a bad change: it is told once
            try:
                self._current = server_context(None, self._certificate, self._key)
                warn_if_open(self._key)
                log.info("The certificate in %s is in use for new connections.", self._certificate)
            except OSError as error:
                log.warning(
                    "The TLS files %s and %s changed and cannot be used (%s); the certificate read before stays in use.",
                    self._certificate,
                    self._key,
                    error,
                )
        connection.context = self._current


def http_tls(settings: Settings) -> HttpTls | None:
    """What the settings ask for; None is plain text. Raises SettingsError for half a configuration, and for administrators whom other
    machines can reach in plain text."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is not None and key is not None:
        return HttpTls(certificate, key)
    if certificate is not None or key is not None:
        missing = "tls_certificate" if certificate is None else "tls_key"
        raise SettingsError(f"Setting {missing} is missing; tls_certificate and tls_key are needed together.")
    if settings.admin_port is not None and not is_loopback(settings.admin_host):
        raise SettingsError(
            f"Setting admin_host is '{settings.admin_host}', which other machines can reach in plain text; give tls_certificate and "
            "tls_key, or let administrators come by 127.0.0.1."
        )
    if (settings.keys or settings.api_keys_file is not None) and not is_loopback(settings.host):
        log.warning(
            "API keys are sent to %s in plain text, unless something in front of this server speaks TLS; give tls_certificate and "
            "tls_key.",
            settings.host,
        )
    return None
