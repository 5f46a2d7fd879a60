"""Optional API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from .errors import AuthenticationError


class KeyRing:
    """Accepts `Authorization: Bearer KEY` for any of several keys; no keys at all means an open server.

    Only SHA-256 digests are kept, and every digest is compared, so timing tells nothing about the keys.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raises AuthenticationError."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthenticationError("This server needs an API key: send the header 'Authorization: Bearer KEY'.")
        # Header bytes arrive decoded as latin-1; this gives them back as they were sent.
        digest = hashlib.sha256(key.strip(" \t").encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise AuthenticationError("The API key is not one of this server's keys; check the Authorization header.")
