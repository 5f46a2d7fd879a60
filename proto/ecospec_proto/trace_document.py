"""One traced text, what it must look like, and what it takes on disk."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import TargetGeometry

MAX_GEOMETRY = {"moe_layers": 4096, "experts": 32768, "top_k": 64}  # expert ids are int16
DTYPES: dict[str, tuple[str, Any]] = {  # column -> (name in the file, numpy)
    "tokens": ("I32", np.int32),
    "positions": ("I32", np.int32),
    "parents": ("I32", np.int32),
    "routes": ("I16", np.int16),
    "accepted": ("BOOL", np.bool_),
}
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class TraceError(ValueError):
    """A trace that breaks the format, or belongs to another target; the text is one sentence."""


@dataclass(frozen=True)
class TraceDocument:
    """One text of T rows. Accepted rows are a chain in the order of the text; a rejected draft row hangs from an earlier
    row and nothing accepted hangs from it.

    tokens     int32 [T], token ids
    positions  int32 [T], position in the text: one more than the parent's
    parents    int32 [T], the row of this document that a row follows, below its own; -1 for the first row only
    routes     int16 [T, moe_layers, top_k], logical expert ids without repeats, -1 where unknown
    accepted   bool [T], False for a draft token that the target rejected
    """

    document_id: str
    domain: str
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    routes: npt.NDArray[np.int16]
    accepted: npt.NDArray[np.bool_]


def document_id(tokens: npt.ArrayLike) -> str:
    """32 hexadecimal digits that name a text by its token ids, equal wherever and whenever it was traced."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()[:32]


def check_document(document: TraceDocument, geometry: TargetGeometry) -> None:
    """Raises TraceError for a document that breaks the format, or that geometry cannot have produced."""
    where = f"document {document.document_id!r:.80}"
    if not (isinstance(document.document_id, str) and _ID.fullmatch(document.document_id)):
        raise TraceError(f"{where} has no usable id; 1 to 64 letters, digits or _ . : - are allowed.")
    if not (isinstance(document.domain, str) and len(document.domain) <= 64 and document.domain.isprintable()):
        raise TraceError(f"{where} has domain {document.domain!r:.80}; at most 64 printable characters are allowed.")
    rows = len(document.tokens)
    for name, (_, dtype) in DTYPES.items():
        column = getattr(document, name)
        if column.dtype != dtype:
            raise TraceError(f"{where} has {name} of dtype {column.dtype}; {np.dtype(dtype)} is needed.")
        if column.shape != (shape := column_shape(name, rows, geometry)):
            raise TraceError(f"{where} has {name} of shape {column.shape}; {shape} is needed.")
    if rows == 0:
        raise TraceError(f"{where} has no rows; at least one is needed.")
    _check_ranges(where, "token id", document.tokens, 0, geometry.vocab_size - 1)
    _check_ranges(where, "expert id", document.routes, -1, geometry.experts - 1)
    _check_ranges(where, "accepted flag", document.accepted.view(np.uint8), 0, 1)
    _check_ranges(where, "position", document.positions, 0, 2**31 - 2)
    _check_tree(where, document)
    _check_repeats(where, document.routes)


def _check_ranges(where: str, what: str, values: npt.NDArray[Any], low: int, high: int) -> None:
    if values.size and (int(values.min()) < low or int(values.max()) > high):
        bad = values[(values < low) | (values > high)].flat[0]
        raise TraceError(f"{where} has {what} {bad}; {low} to {high} is allowed.")


def _check_repeats(where: str, routes: npt.NDArray[np.int16]) -> None:
    slots = np.ascontiguousarray(np.moveaxis(routes, 2, 0))  # whole slots compare 15 times as fast as sorted rows
    for apart in range(1, len(slots)):
        repeated = (slots[apart:] == slots[:-apart]) & (slots[apart:] >= 0)
        if repeated.any():
            _, row, layer = np.argwhere(repeated)[0]
            raise TraceError(f"{where} names an expert twice in row {row}, layer {layer}; the ids must differ.")


def _check_tree(where: str, document: TraceDocument) -> None:
    parents, positions, accepted = document.parents, document.positions, document.accepted
    rows = np.arange(len(parents))
    wrong = (parents < 0) | (parents >= rows)
    wrong[0] = parents[0] != -1
    if wrong.any():
        row = int(wrong.argmax())
        allowed = "-1 is needed" if row == 0 else f"0 to {row - 1} is allowed"
        raise TraceError(f"{where} has parent {parents[row]} in row {row}; {allowed}.")
    wrong[1:] = positions[1:] != positions[parents[1:]] + 1
    if wrong.any():
        row = int(wrong.argmax())
        raise TraceError(f"{where} has position {positions[row]} in row {row}; one more than its parent's is needed.")
    chain = rows[accepted]
    broken = chain[1:][parents[chain[1:]] != chain[:-1]]
    if len(broken) or not accepted[0]:
        row = int(broken[0]) if accepted[0] else 0
        raise TraceError(
            f"{where} has a wrong order in row {row}; the first row must be accepted, and every accepted row must follow "
            "the accepted row before it."
        )


def column_shape(column: str, rows: int, geometry: TargetGeometry) -> tuple[int, ...]:
    return (rows, geometry.moe_layers, geometry.top_k) if column == "routes" else (rows,)


def row_bytes(geometry: TargetGeometry) -> int:
    """Bytes that one row takes in a shard. Raises TraceError for a geometry beyond what the format holds."""
    for name, most in MAX_GEOMETRY.items():
        if (value := getattr(geometry, name)) > most:
            raise TraceError(f"the target has {name} {value}; a trace holds at most {most}.")
    return sum(
        np.dtype(dtype).itemsize * math.prod(column_shape(name, 1, geometry)) for name, (_, dtype) in DTYPES.items()
    )
