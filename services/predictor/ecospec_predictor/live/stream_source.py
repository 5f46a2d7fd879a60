"""Live routes as documents for training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tqdm import tqdm

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.shared_state import TRACE_FIELD, StateStoreError, StoreAddress, connect, traces_key
from ecospec_proto.trace_document import TraceDocument, TraceError
from ecospec_proto.trace_record import decode_record
from ecospec_proto.traces import TraceWriter

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 10.0
PAGE_RECORDS = 32
SOURCE = "ecospec-live"


def documents_from_stream(
    url: str, geometry: TargetGeometry, limit: int | None = None, password: str = ""
) -> Iterator[TraceDocument]:
    """The newest records of the target's trace stream, newest first, `limit` at most.

    One page is in memory at a time. Records that break the format are passed over and counted in the log, and a record that was
    sent twice is told once. Raises ValueError for a wrong url and StateStoreError when the store cannot be read.
    """
    address, key = StoreAddress.parse(url, password), traces_key(geometry.fingerprint)
    return _documents(address, key, geometry, limit)


def _documents(address: StoreAddress, key: str, geometry: TargetGeometry, limit: int | None) -> Iterator[TraceDocument]:
    before: bytes = b"+"
    known: set[str] = set()
    refused = 0
    with connect(address, TIMEOUT_SECONDS) as client:
        while limit is None or len(known) < limit:
            try:
                page: Any = client.xrevrange(key, before, "-", count=PAGE_RECORDS)  # type: ignore[arg-type]  # ids are bytes
            except (RedisError, OSError) as error:
                raise StateStoreError(f"The state store at {address} cannot be read: {error}") from None
            for _, fields in page:
                try:
                    record = decode_record(fields.get(TRACE_FIELD, b""), geometry)
                except TraceError as error:
                    refused += 1
                    log.debug("A record is passed over: %s", error)
                    continue
                if record.document_id in known or (limit is not None and len(known) == limit):
                    continue
                known.add(record.document_id)
                yield record
            if len(page) < PAGE_RECORDS:
                break
            before = b"(" + page[-1][0]
    if refused:
        log.warning("%d entries of %s were passed over because they break the format.", refused, key)


def collect_stream(
    url: str, geometry: TargetGeometry, directory: Path, limit: int | None = None, password: str = ""
) -> int:
    """Adds the newest records to a trace directory, which `train` takes, and returns how many were new. What is there already is
    passed over, so that it may be called again and again. Raises as documents_from_stream(), and TraceError."""
    added = 0
    with TraceWriter(directory, geometry, SOURCE) as writer:
        for document in tqdm(documents_from_stream(url, geometry, limit, password), unit=" records", disable=None):
            added += writer.add(document)
    return added
