"""API keys: who may ask."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from ecospec_proto.pem import file_marks

from ..core import SettingsError
from ..keys import Key, digest_of, read_keys
from .errors import AuthenticationError

log = logging.getLogger(__name__)
ANONYMOUS = Key("anonymous", b"")  # everybody, on an open server


class KeyRing:
    """Accepts `Authorization: Bearer KEY` for any of several keys; without keys and without a file everybody is ANONYMOUS.

    Only SHA-256 digests are kept, and every digest is compared, so timing tells nothing about the keys. The file is looked at before
    every check: a name that was taken out is refused from then on, while answers that have begun are finished. A file that became
    unreadable is told once, and the keys read before stay valid; an empty one lets nobody in.
    """

    def __init__(self, keys: Iterable[str], file: Path | None = None) -> None:
        """keys: in plain text, from the settings; they are named settings:1 and so on. Raises SettingsError for the file."""
        # ":" is no part of a name in the file.
        self._own = tuple(Key(f"settings:{i}", digest_of(key.encode())) for i, key in enumerate(keys, 1))
        self._file, self._marks = file, file_marks(file)
        self._of_file = read_keys(file) if file is not None else ()
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        return self._file is None and not self._own

    def names(self) -> list[str]:
        return [key.name for key in (*self._own, *self._of_file)]

    def check(self, authorization: str | None) -> Key:
        """authorization: the header as it came, decoded as latin-1. Raises AuthenticationError."""
        if self.open:
            return ANONYMOUS
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip(" \t"):
            raise AuthenticationError("This server needs an API key: send the header 'Authorization: Bearer KEY'.")
        digest = digest_of(key.strip(" \t").encode("latin-1"))
        found = [known for known in (*self._own, *self._of_file) if hmac.compare_digest(digest, known.digest)]
        if not found:
            raise AuthenticationError("The API key is not one of this server's keys; check the Authorization header.")
        return found[0]

    def _look(self) -> None:
        if self._file is None:
            return
        with self._lock:
            marks = file_marks(self._file)
            if marks == self._marks:
                return
            self._marks = marks  # also of a bad change: it is told once
            try:
                self._of_file = read_keys(self._file)
            except SettingsError as error:
                log.error("%s The keys read before stay valid.", error)
                return
        log.info("The file of API keys %s was read again: %d keys.", self._file, len(self._of_file))
