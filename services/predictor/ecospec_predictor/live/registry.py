"""The registry of predictor versions in the state store: publish one, list them, follow what is published."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError
from tqdm import tqdm

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.predictor_version import MAX_FIGURES, PredictorVersion, PredictorVersionError
from ecospec_proto.shared_state import TARGETS_KEY, VERSION_FIELD, StoreAddress, connect_async, versions_key

from ..errors import PredictorError

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)
KEPT_VERSIONS = 100  # of one target
CHUNK_BYTES = 1 << 20
MAX_CONFIG_BYTES = 1 << 20
SHOW_AFTER_SECONDS = 2.0
WATCH_TIMEOUT_SECONDS = 5.0
BLOCK_MILLISECONDS = 2000  # that one look waits for news; below the timeout
BACKOFF_SECONDS = (0.2, 5.0)
UNUSABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
)  # what a broken config.json raises


def describe(model_dir: Path, location: str | None = None) -> PredictorVersion:
    """The entry of a model directory; location: where those find it who load it, by default its own absolute path. Reads every
    file. Raises PredictorError."""
    try:
        config = _config_in(model_dir)
        geometry, training = TargetGeometry(**config["target"]), config["training"]
        figures = {
            name: float(value)
            for name, value in training.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return PredictorVersion(
            geometry.fingerprint,
            str(training.get("version", "0")),
            location or str(model_dir.resolve()),
            digest_of(model_dir),
            dict(list(figures.items())[:MAX_FIGURES]),
            time.time(),
        )
    except UNUSABLE as error:
        raise _unusable(model_dir, error) from None


def geometry_in(model_dir: Path) -> TargetGeometry:
    """The target of a model directory. Raises PredictorError."""
    try:
        return TargetGeometry(**_config_in(model_dir)["target"])
    except UNUSABLE as error:
        raise _unusable(model_dir, error) from None


def _config_in(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"config.json is larger than {MAX_CONFIG_BYTES} bytes")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _unusable(model_dir: Path, error: Exception) -> PredictorError:
    return PredictorError(
        f"{model_dir} holds no predictor that can be used ({type(error).__name__}: {error}); give a directory written by the "
        "predictor's training."
    )


def digest_of(directory: Path) -> str:
    """SHA-256 of the names and contents of the files directly in a directory. Raises OSError."""
    files = sorted((path for path in directory.iterdir() if path.is_file()), key=lambda path: path.name)
    total = sum(path.stat().st_size for path in files)
    digest = hashlib.sha256()
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", delay=SHOW_AFTER_SECONDS, disable=None) as bar:
        for path in files:
            own = hashlib.sha256()
            with path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    own.update(chunk)
                    bar.update(len(chunk))
            digest.update(json.dumps([path.name, own.hexdigest()]).encode())
    return digest.hexdigest()


def check_files(entry: PredictorVersion) -> Path:
    """The directory of an entry, once its files are those that were published. Raises PredictorError."""
    directory = Path(entry.location)
    try:
        found = digest_of(directory)
    except OSError as error:
        raise PredictorError(
            f"Version {entry.version} was published in {directory}, which cannot be read: {error}"
        ) from None
    if found != entry.digest:
        raise PredictorError(
            f"Version {entry.version} was published in {directory} with digest {entry.digest}; the files there have {found}: "
            "publish it again."
        )
    return directory


def publish(client: redis.Redis, entry: PredictorVersion) -> None:
    """Make it the current version of its target, in one transaction. A version that is there already may become current again,
    but not with other files. Raises PredictorError and RedisError."""
    key = versions_key(entry.fingerprint)

    def add(pipeline: Any) -> None:
        for known in _decoded(pipeline.xrevrange(key)):
            if known.version == entry.version and known.digest != entry.digest:
                raise PredictorError(
                    f"Version {entry.version} is published already, with digest {known.digest} instead of {entry.digest}; "
                    "callers tell versions by their names: train or export it with another one."
                )
        pipeline.multi()
        pipeline.sadd(TARGETS_KEY, entry.fingerprint)
        pipeline.xadd(key, {VERSION_FIELD: entry.encode()}, maxlen=KEPT_VERSIONS, approximate=False)

    client.transaction(add, key)


def versions(client: redis.Redis, fingerprint: str) -> list[PredictorVersion]:
    """What was published for a target, the current one first. Raises RedisError."""
    entries: Any = client.xrevrange(versions_key(fingerprint))
    return _decoded(entries)


def targets(client: redis.Redis) -> list[str]:
    """Fingerprints for which something was published. Raises RedisError."""
    members: Any = client.smembers(TARGETS_KEY)
    return sorted(member.decode(errors="replace") for member in members)


async def watch(url: str, fingerprint: str, password: str = "") -> AsyncIterator[PredictorVersion]:
    """The current version, and then every one that becomes current, for ever. What is published while the store cannot be reached
    comes when it can, the newest only; that it cannot is logged once. Raises ValueError for a wrong url."""
    address, key = StoreAddress.parse(url, password), versions_key(fingerprint)
    seen: bytes | None = None
    pause, problem = BACKOFF_SECONDS[0], ""
    while True:
        try:
            async with connect_async(address, WATCH_TIMEOUT_SECONDS) as client:
                while True:
                    newest: Any = await client.xrevrange(key, count=1)
                    if problem:
                        log.info("The registry in the state store at %s is followed again.", address)
                    pause, problem = BACKOFF_SECONDS[0], ""
                    if newest and newest[0][0] != seen:
                        seen = newest[0][0]
                        for entry in _decoded(newest):
                            yield entry
                    else:
                        await client.xread({key: seen or b"0"}, count=1, block=BLOCK_MILLISECONDS)
        except (RedisError, OSError) as error:
            if not problem:
                problem = f"{type(error).__name__}: {error}"
                log.warning("The registry in the state store at %s cannot be read (%s).", address, problem)
        await asyncio.sleep(pause)
        pause = min(2 * pause, BACKOFF_SECONDS[1])


def _decoded(entries: Any) -> list[PredictorVersion]:
    found = []
    for number, fields in entries:
        try:
            found.append(PredictorVersion.decode(fields.get(VERSION_FIELD, b"")))
        except PredictorVersionError as error:
            log.warning("Entry %s of the registry is passed over: %s", number.decode(), error)
    return found
