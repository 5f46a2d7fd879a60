"""SGLang's expert-distribution recorder in per_token mode -> documents in the normal form.

The file is a torch.save of {"records": [...], "last_physical_to_logical_map": int [layers, physical experts]}, with a record per
forward pass: forward_pass_id, rank, input_ids, positions, extend_seq_lens, forward_mode, and topk_ids_of_layer int32 [layers,
tokens, at least top_k] with physical ids, -1 where nothing was routed (python/sglang/srt/eplb/expert_distribution.py).

A record does not say whose rows it holds. So one request at a time must have run, and draft trees must have been chains: their
rows say at which position they are, but not which row they follow. Rejected drafts are kept; whether the drafts of the last
verification of a text were accepted is told by no record, so they are left out.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ecospec_proto.trace_rows import TraceRows
from ecospec_proto.traces import TraceDocument, TraceError, document_id

from .payload import normal_routes
from .target import Target

MAX_FILE_BYTES = 8 << 30
MAX_PICKLE_BYTES = 256 << 20  # of the file, what is not tensors
MAX_MAP = 1 << 24  # layers x physical experts
_EXTEND, _DECODE, _IDLE, _VERIFY, _DRAFT_EXTEND = 1, 2, 4, 5, 6  # SGLang's ForwardMode
_SKIPPED = (_IDLE, _DRAFT_EXTEND)  # nothing, and the draft model's own rows


def load_recording(path: Path) -> Any:
    """The file's object; its code is not run and its tensors stay on disk until they are used. Raises TraceError."""
    import torch  # heavy

    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TraceError(f"it has {size} bytes; at most {MAX_FILE_BYTES} are allowed: record in shorter parts.")
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise TraceError(f"its entry {entry.filename!r:.80} is compressed, which torch.save never does.")
                if entry.filename.endswith(".pkl") and entry.file_size > MAX_PICKLE_BYTES:
                    raise TraceError(f"its lists take {entry.file_size} bytes; at most {MAX_PICKLE_BYTES} are allowed.")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except TraceError:
        raise
    except Exception as error:  # whatever torch and zipfile raise on broken files
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise TraceError(f"it is no recording that can be loaded safely: {first_line:.300}") from None


def from_sglang_recorder(payload: Any, target: Target, domain: str) -> Iterator[TraceDocument]:
    """The texts of a recording, in order. Ranks of tensor parallelism saw the same texts, which then have the same ids.
    Raises TraceError."""
    records = payload.get("records") if isinstance(payload, Mapping) else None
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise TraceError("it has no records; a recording of SGLang's expert-distribution recorder is needed.")
    logical = _integers(payload.get("last_physical_to_logical_map"), "last_physical_to_logical_map", 2)
    ranks: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        ranks.setdefault(_number(record, "rank", 0), []).append(record)
    for rank in sorted(ranks):
        passes = sorted(ranks[rank], key=lambda record: _number(record, "forward_pass_id"))
        yield from _texts(passes, logical, target, domain)


def _texts(
    passes: Iterable[Mapping[str, Any]], logical: np.ndarray, target: Target, domain: str
) -> Iterator[TraceDocument]:
    text: _Text | None = None
    for record in passes:
        number, mode = _number(record, "forward_pass_id"), _number(record, "forward_mode")
        if mode in _SKIPPED or isinstance(ids := record.get("input_ids"), list) and not ids:
            continue
        tokens = _integers(ids, "input_ids", 1)
        positions = _integers(record.get("positions"), "positions", 1)
        if len(positions) != len(tokens):
            raise TraceError(f"its pass {number} has {len(tokens)} input_ids and {len(positions)} positions.")
        routes = _routes(record, len(tokens), logical, target)
        if mode == _EXTEND:
            for part in _parts(record, len(tokens)):
                follows = (
                    text is not None and len(tokens) == part.stop - part.start and text.goes_on_at(positions[part])
                )
                if not follows:
                    if text is not None:
                        yield text.document(domain)
                    text = _Text(target, int(positions[part][0]))
                assert text is not None
                text.extend(tokens[part], positions[part], routes[part], number)
        elif mode in (_DECODE, _VERIFY):
            if text is None or not text.goes_on_at(positions) or mode == _DECODE and len(tokens) != 1:
                raise TraceError(
                    f"its pass {number} continues at positions {str(positions.tolist()):.60}, which no text before it does; "
                    "record with one request at a time."
                )
            if (np.diff(positions) != 1).any():
                raise TraceError(
                    f"its pass {number} has a draft tree that is no chain (positions {str(positions.tolist()):.60}), and does "
                    "not say which row follows which; record with --speculative-eagle-topk 1."
                )
            text.step(tokens, positions, routes)
        else:
            raise TraceError(
                f"its pass {number} has forward_mode {mode}; 1 (extend), 2 (decode) and 5 (verify) can be used."
            )
    if text is not None:
        yield text.document(domain)


class _Text:
    """One request. Rows of a verification wait until the next pass tells how many of them were accepted."""

    def __init__(self, target: Target, first_position: int) -> None:
        self._rows = TraceRows(target.geometry.moe_layers, target.geometry.top_k, first_position)
        self._tokens: list[int] = []
        self._prompt = 0
        self._waiting: tuple[np.ndarray, np.ndarray] | None = None

    def goes_on_at(self, positions: np.ndarray) -> bool:
        waiting = 0 if self._waiting is None else len(self._waiting[0])
        first = self._rows.next_position
        return first + (waiting > 0) <= positions[0] <= first + waiting

    def extend(self, tokens: np.ndarray, positions: np.ndarray, routes: np.ndarray, number: int) -> None:
        if (np.diff(positions) != 1).any():
            raise TraceError(f"its pass {number} has positions that do not follow one another within a text.")
        self._settle(int(positions[0]))
        self._accept(tokens, routes)
        self._prompt = len(self._tokens)

    def step(self, tokens: np.ndarray, positions: np.ndarray, routes: np.ndarray) -> None:
        self._settle(int(positions[0]))
        self._waiting = tokens, routes

    def _settle(self, next_position: int | None) -> None:
        """None: nobody knows how many drafts were accepted; the root was."""
        if self._waiting is None:
            return
        tokens, routes = self._waiting
        if next_position is None:
            self._accept(tokens[:1], routes[:1])
        else:
            accepted = np.arange(len(tokens)) < next_position - self._rows.next_position
            self._rows.add_tree(tokens, np.arange(-1, len(tokens) - 1), accepted, routes)
            self._tokens += tokens[accepted].tolist()
        self._waiting = None

    def _accept(self, tokens: np.ndarray, routes: np.ndarray) -> None:
        self._rows.add_chain(tokens, routes)
        self._tokens += tokens.tolist()

    def document(self, domain: str) -> TraceDocument:
        self._settle(None)
        prompt = self._tokens[: self._prompt]
        return self._rows.document(f"{document_id(prompt)}:{document_id(self._tokens)[:24]}", domain)


def _parts(record: Mapping[str, Any], rows: int) -> list[slice]:
    """The rows of each text in an extend pass."""
    lengths = record.get("extend_seq_lens")
    lengths = [rows] if lengths is None else _integers(lengths, "extend_seq_lens", 1).tolist()
    if sum(lengths) != rows or min(lengths) < 1:
        raise TraceError(f"its extend_seq_lens are {str(lengths):.60} for {rows} input_ids.")
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _routes(record: Mapping[str, Any], rows: int, logical: np.ndarray, target: Target) -> np.ndarray:
    """int16 [rows, MoE layers, top_k], logical ids."""
    value, top_k = record.get("topk_ids_of_layer"), target.geometry.top_k
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 3 or shape[0] != len(logical) or shape[1] != rows or not top_k <= shape[2] <= top_k + 64:
        raise TraceError(
            f"its topk_ids_of_layer have shape {shape}; [{len(logical)} layers, {rows} tokens, {top_k} or more] is needed: "
            "record in per_token mode."
        )
    physical = _integers(value, "topk_ids_of_layer", 3)
    if (physical[..., top_k:] >= 0).any():
        raise TraceError(f"its topk_ids_of_layer name more than {top_k} experts; the target has top_k {top_k}.")
    physical = physical[..., :top_k]
    if physical.size and (physical.min() < -1 or physical.max() >= logical.shape[1]):
        raise TraceError(f"its topk_ids_of_layer name an expert beyond the {logical.shape[1]} of the map.")
    layers = np.arange(len(logical))[:, None, None]
    routes = np.where(physical < 0, -1, logical[layers, physical])
    return normal_routes(routes.swapaxes(0, 1), target)


def _number(record: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = record.get(name, default)
    if type(value) is not int:
        raise TraceError(f"one of its records has {name} {value!r:.40}; a whole number is needed.")
    return value


def _integers(value: Any, name: str, axes: int) -> np.ndarray:
    """int64 from a list, or from a tensor of two or three axes, whose claimed shape the caller or MAX_MAP bounds."""
    shape = tuple(getattr(value, "shape", ()))
    if not (
        isinstance(value, list) if axes == 1 else len(shape) == axes and (axes == 3 or math.prod(shape) <= MAX_MAP)
    ):
        raise TraceError(f"it has no {name}, or of shape {shape}; {'a list' if axes == 1 else 'a tensor'} is needed.")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"its {name} cannot be read: {error}.") from None
    if array.dtype.kind not in "iu" or array.ndim != axes or array.size == 0:
        raise TraceError(f"its {name} have dtype {array.dtype} and shape {array.shape}; whole numbers are needed.")
    return array.astype(np.int64)
