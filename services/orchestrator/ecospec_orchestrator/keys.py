"""The file of API keys: names, hashes and limits, never a key. It is read again when it changes, so removing a name revokes its key.

Why plain SHA-256: keys are made here, 256 random bits each, so there is nothing to guess and no table to look up, which is what
salts and slow, memory-hard hashes are for. Those would be paid for at every request, also by whoever sends wrong keys in bulk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .core import SettingsError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
PREFIX = "eco-"  # so that a leaked key is known for what it is
KEY_BYTES = 32
MAX_FILE_BYTES = 2**20
MAX_KEYS = 1000  # all are compared with at every request
FORM = '{"NAME": {"sha256": HEX, "requests_per_minute": N, "tokens_per_minute": N, "tokens_per_day": N, "max_concurrent": N}}'
Count = Annotated[int, Field(ge=1, le=10**12)]


class KeyLimits(BaseModel):
    """None: what the server's settings say. tokens: of prompts and answers together; max_concurrent: HTTP requests at a time on one
    server, the others are for all replicas together where they share a state store."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    max_concurrent: Count | None = None


class _Entry(KeyLimits):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Key:
    """name: for logs and metrics; digest: SHA-256 of the key."""

    name: str
    digest: bytes = field(repr=False)
    limits: KeyLimits = KeyLimits()


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[Key, ...]:
    """Raises SettingsError: one sentence."""
    return tuple(
        Key(name, bytes.fromhex(entry.sha256), KeyLimits(**entry.model_dump(exclude={"sha256"})))
        for name, entry in _read(path).items()
    )


def add_key(path: Path, name: str, limits: Mapping[str, int | None]) -> str:
    """Make a key, note its hash in the file, which need not exist yet, and return the key. Raises SettingsError."""
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    with _changing(path) as entries:
        if name in entries:
            raise SettingsError(f"Key {name!r} is in {path} already; revoke it first, or choose another name.")
        if len(entries) >= MAX_KEYS:
            raise SettingsError(
                f"The file of API keys {path} holds {MAX_KEYS} keys, which is all it may; revoke one first."
            )
        given = {limit: value for limit, value in limits.items() if value is not None}
        entries |= _checked(path, {name: {"sha256": digest_of(key.encode()).hex(), **given}})
    return key


def remove_key(path: Path, name: str) -> None:
    """Raises SettingsError when there is none of that name."""
    with _changing(path) as entries:
        if name not in entries:
            raise SettingsError(f"Key {name!r} is not in {path}; there are: {', '.join(entries) or 'none'}.")
        del entries[name]


def _read(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(
            f"The file of API keys {path} cannot be read ({error.strerror}); make one with: ecospec-orchestrator key new NAME."
        ) from None
    if len(raw) > MAX_FILE_BYTES:
        raise SettingsError(f"The file of API keys {path} is larger than {MAX_FILE_BYTES} bytes; allowed: {FORM}.")
    try:
        document = json.loads(raw, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"The file of API keys {path} cannot be used ({error}); allowed: {FORM}.") from None
    return _checked(path, document)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name is there twice")
    return names


def _checked(path: Path, document: Any) -> dict[str, _Entry]:
    if not isinstance(document, dict) or len(document) > MAX_KEYS:
        raise SettingsError(
            f"The file of API keys {path} is no JSON object of at most {MAX_KEYS} names; allowed: {FORM}."
        )
    entries: dict[str, _Entry] = {}
    for name, value in document.items():
        if name.startswith(PREFIX):
            raise SettingsError(
                f"A name in {path} begins with {PREFIX!r}, as keys do; names are shown in logs, so none may be a key."
            )
        try:
            _Name(name=name)
            entries[name] = _Entry.model_validate(value)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]  # never a value: it may be a key
            where = ".".join(str(part) for part in problem["loc"])
            raise SettingsError(
                f"Key {name!r:.80} in {path} has a bad {where or 'entry'} ({problem['msg']}); allowed: {FORM}."
            ) from None
    if len({entry.sha256 for entry in entries.values()}) < len(entries):
        raise SettingsError(f"The file of API keys {path} has one key under two names; make a key for each.")
    return entries


class _Name(BaseModel):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, _Entry]]:
    """The entries, which are written back in one go at the end; two commands at a time wait for each other. Raises SettingsError."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            entries = _read(path) if path.exists() else {}
            yield entries
            document = {name: entry.model_dump(exclude_none=True) for name, entry in entries.items()}
            _replace(path, json.dumps(document, indent=2) + "\n")
        finally:
            os.close(folder)
    except OSError as error:
        raise SettingsError(f"The file of API keys {path} cannot be written ({error.strerror}).") from None


def _replace(path: Path, text: str) -> None:
    """A server that reads meanwhile sees the old file or the new one. Raises OSError."""
    number, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(fresh, path.stat().st_mode & 0o777)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
