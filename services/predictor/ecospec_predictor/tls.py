"""The server's side of TLS: which transport the settings ask for, and certificates that are read again when their files change."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from ecospec_proto.pem import Marks, check_pem, file_marks, is_loopback, warn_if_open

from .errors import SettingsError
from .settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. With client_ca every caller must present a certificate that it has signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def marks(self) -> Marks:
        return file_marks(self.certificate, self.key, self.client_ca)

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError."""
        check_pem(self.client_ca, self.certificate, self.key)
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        roots = self.client_ca.read_bytes() if self.client_ca is not None else None
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)


class ServerTls:
    """Credentials whose files are looked at before every handshake; open connections keep what they were made with. Raises
    SettingsError when the files cannot be used; a later bad change is logged, and the last good certificate stays in use."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()  # handshakes come from gRPC's own threads
        try:
            self._marks = files.marks()
            self._first = files.read()
        except OSError as error:
            raise SettingsError(
                f"Settings tls_certificate, tls_key and tls_client_ca are {_names(files)}, which cannot be used ({error}); PEM "
                "files with a certificate, its unencrypted key, and the certificates of those who may sign callers are allowed."
            ) from None

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError."""
        warn_if_open(self._files.key)
        return grpc.dynamic_ssl_server_credentials(
            self._first, self._changed, require_client_authentication=self._files.client_ca is not None
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificate, or None to keep the one in use."""
        with self._lock:
            marks = self._files.marks()
            if marks == self._marks:
                return None
            self._marks = marks  # also of a bad change: it is told once
            try:
                fresh = self._files.read()
                warn_if_open(self._files.key)
            except OSError as error:
                log.warning(
                    "The TLS files %s changed and cannot be used (%s); the certificate read before stays in use.",
                    _names(self._files),
                    error,
                )
                return None
        log.info("The certificate in %s is in use for new connections.", self._files.certificate)
        return fresh


def server_tls(settings: Settings) -> ServerTls | None:
    """What the settings ask for; None is plain text. Raises SettingsError for half a configuration, and for plain text that
    would leave this machine without being asked for."""
    certificate, key, client_ca = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is not None and key is not None:
        return ServerTls(TlsFiles(certificate, key, client_ca))
    if certificate is not None or key is not None or client_ca is not None:
        missing = "tls_certificate" if certificate is None else "tls_key"
        raise SettingsError(
            f"Setting {missing} is missing while other TLS settings are given; TLS needs tls_certificate and tls_key, and "
            "tls_client_ca where callers must present certificates."
        )
    if not settings.allow_plaintext and not is_loopback(settings.host):
        raise SettingsError(
            f"Setting host is '{settings.host}', which other machines can reach in plain text; give tls_certificate and tls_key "
            "(and tls_client_ca for mutual TLS), listen on 127.0.0.1, or set allow_plaintext to true."
        )
    return None


def _names(files: TlsFiles) -> str:
    return ", ".join(str(path) for path in (files.certificate, files.key, files.client_ca) if path is not None)
