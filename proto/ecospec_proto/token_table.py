"""A table from token id to the experts that the target uses most for it: the cheap fallback of the expert predictor, and
the baseline that it must beat. Numpy only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .geometry import TargetGeometry
from .traces import TraceDocument

FORMAT_VERSION = 1
MAX_TOKENS = 65536  # the most frequent ones; rarer tokens get the popular experts
COUNT_BYTES = 256 << 20  # memory for the counts of one pass over the traces
_CHUNK = 4096  # tokens that are ranked at a time


class TableError(ValueError):
    """A file that is no token table, or one of another target; the text is one sentence."""


class Traces(Protocol):
    """What a table is built from; each iteration starts from the first document."""

    @property
    def geometry(self) -> TargetGeometry: ...

    def __iter__(self) -> Iterator[TraceDocument]: ...


@dataclass(frozen=True)
class TokenTable:
    """token_ids  int32 [seen], ascending
    experts    uint8, or uint16 above 256 experts, [seen, moe_layers, top_k]
    popular    of the same dtype, [moe_layers, top_k]: the answer for a token that is not in the table
    """

    geometry: TargetGeometry
    token_ids: np.ndarray
    experts: np.ndarray
    popular: np.ndarray

    def lookup(self, tokens: np.ndarray) -> np.ndarray:
        """tokens: integers [n] -> experts [n, moe_layers, top_k]."""
        tokens = np.asarray(tokens)
        answer = np.broadcast_to(self.popular, (len(tokens), *self.popular.shape)).copy()
        if len(self.token_ids):
            at = np.searchsorted(self.token_ids, tokens).clip(max=len(self.token_ids) - 1)
            known = self.token_ids[at] == tokens
            answer[known] = self.experts[at[known]]
        return answer

    @classmethod
    def build(cls, traces: Traces, max_tokens: int = MAX_TOKENS) -> TokenTable:
        """Count each token's experts, rejected rows included; ties go to the more popular expert of the layer.

        Reads the traces once to find the tokens and then once for as many layers as COUNT_BYTES can count.
        """
        geometry = traces.geometry
        layers, experts, k = geometry.moe_layers, geometry.experts, geometry.top_k
        frequency = np.zeros(geometry.vocab_size, np.int64)
        for document in traces:
            np.add.at(frequency, document.tokens, 1)
        token_ids = np.sort(np.argsort(-frequency, kind="stable")[: min(max_tokens, np.count_nonzero(frequency))])
        slots = np.full(geometry.vocab_size, len(token_ids), np.int64)  # the last slot counts the rare tokens together
        slots[token_ids] = np.arange(len(token_ids))
        dtype = np.uint8 if experts <= 256 else np.uint16
        table, popular = np.zeros((len(token_ids), layers, k), dtype), np.zeros((layers, k), dtype)
        block = max(1, COUNT_BYTES // (4 * (len(token_ids) + 1) * experts))
        for first in range(0, layers, block):
            part = slice(first, min(first + block, layers))
            counts = _count(traces, slots, part, len(token_ids) + 1)
            totals = counts.sum(0, dtype=np.int64)  # [layers, experts]
            popular[part] = _top(totals, k)
            share = (totals / (totals.max() + 1)).astype(np.float32)
            for at in range(0, len(token_ids), _CHUNK):
                end = min(at + _CHUNK, len(token_ids))
                table[at:end, part] = _top(counts[at:end] + share, k)
        return cls(geometry, token_ids.astype(np.int32), table, popular)

    def save(self, path: Path) -> None:
        """Write a safetensors file that says which target it is of; whoever reads it sees the old or the new one whole."""
        metadata = {"format_version": str(FORMAT_VERSION), "geometry": json.dumps(asdict(self.geometry))}
        arrays = {"token_ids": self.token_ids, "experts": self.experts, "popular": self.popular}
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, geometry: TargetGeometry | None = None) -> TokenTable:
        """geometry: the target that the caller serves. Raises TableError for another one, or for a broken file."""
        try:
            with safe_open(path, "numpy") as file:
                found = _check_header(path, file)
                if geometry is not None and found != geometry:
                    raise TableError(
                        f"{path} is a table of {found.name}, revision {found.revision}, but {geometry.name}, revision "
                        f"{geometry.revision}, is served; build a table from its own traces."
                    )
                table = cls(found, *(file.get_tensor(name) for name in ("token_ids", "experts", "popular")))
        except (SafetensorError, OSError) as error:
            raise TableError(f"{path} cannot be read as a token table: {error}.") from None
        ids = table.token_ids
        if len(ids) and (ids[0] < 0 or ids[-1] >= found.vocab_size or (np.diff(ids) <= 0).any()):
            raise TableError(
                f"{path} has token ids that do not ascend within 0 to {found.vocab_size - 1}; build it again."
            )
        for array in (table.experts, table.popular):
            if array.size and array.max() >= found.experts:
                raise TableError(f"{path} names expert {array.max()}; 0 to {found.experts - 1} is allowed.")
        return table


def _count(traces: Traces, slots: np.ndarray, part: slice, rows: int) -> np.ndarray:
    """int32 [rows, layers of part, experts]: how often a token's slot met an expert."""
    layers, experts = part.stop - part.start, traces.geometry.experts
    counts = np.zeros(rows * layers * experts, np.int32)
    layer_offset = (np.arange(layers) * experts)[:, None]
    for document in traces:
        routes = document.routes[:, part].astype(np.int64)
        keys = (slots[document.tokens] * (layers * experts))[:, None, None] + layer_offset + routes
        np.add.at(counts, keys[routes >= 0], 1)
    return counts.reshape(rows, layers, experts)


def _top(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest along the last axis, in no order."""
    if k == scores.shape[-1]:
        return np.broadcast_to(np.arange(k), scores.shape)
    return np.argpartition(-scores, k - 1, axis=-1)[..., :k]


def _check_header(path: Path, file: safe_open) -> TargetGeometry:
    """The table's geometry; raises TableError before any tensor is read."""
    metadata = file.metadata() or {}
    if metadata.get("format_version") != str(FORMAT_VERSION):
        raise TableError(
            f"{path} has format_version {metadata.get('format_version')!r:.80}; a token table has {FORMAT_VERSION}."
        )
    try:
        geometry = TargetGeometry(**json.loads(metadata["geometry"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise TableError(f"{path} has no usable geometry: {error}.") from None
    kind = "U8" if geometry.experts <= 256 else "U16"
    shapes = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    seen = shapes["token_ids"].get_shape()[:1] if "token_ids" in shapes else []
    wanted = {
        "token_ids": ("I32", seen),
        "experts": (kind, [*seen, geometry.moe_layers, geometry.top_k]),
        "popular": (kind, [geometry.moe_layers, geometry.top_k]),
    }
    found = {name: (part.get_dtype(), part.get_shape()) for name, part in shapes.items()}
    if found != wanted:
        raise TableError(f"{path} holds {found!r:.200}, but its geometry needs {wanted!r:.200}; build it again.")
    return geometry
