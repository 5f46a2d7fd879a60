"""Expert sets and draft trees <-> the raw little-endian bytes of predictor.proto, and expert ids -> bitsets.

Everything that decodes checks first and raises CodecError with one sentence; nothing read from outside is trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ROOT = -1  # parent index of a node that hangs below the root
MAX_EXPERTS = 65536
_EXPERT_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
}  # number of the ExpertDtype enum -> numpy
_DTYPE_NUMBERS = {1: 1, 2: 2}  # bytes per expert id -> number of the ExpertDtype enum
_pack_kernel: Callable[..., int] | None = None


class CodecError(ValueError):
    """Bytes or arrays that break the wire format; the text is one sentence."""


def encode_experts(experts: np.ndarray) -> tuple[bytes, int]:
    """uint8 or uint16 [nodes, layers, k] -> its bytes and the number of its ExpertDtype. Raises CodecError."""
    if experts.dtype.kind != "u" or experts.dtype.itemsize not in _DTYPE_NUMBERS:
        raise CodecError(f"experts have dtype {experts.dtype}; uint8 or uint16 is needed.")
    number = _DTYPE_NUMBERS[experts.dtype.itemsize]
    return experts.astype(_EXPERT_DTYPES[number], copy=False).tobytes(), number


def decode_experts(data: bytes, dtype: int, nodes: int, layers: int, k: int) -> np.ndarray:
    """Inverse of encode_experts: a read-only view of data, uint8 or uint16 [nodes, layers, k]. Raises CodecError.

    The range of the ids is checked by pack_bitsets, which knows the number of experts.
    """
    if dtype not in _EXPERT_DTYPES:
        raise CodecError(f"the expert dtype is {dtype}; 1 (uint8) or 2 (uint16) is allowed.")
    numpy_dtype = _EXPERT_DTYPES[dtype]
    expected = nodes * layers * k * numpy_dtype.itemsize
    if len(data) != expected:
        raise CodecError(
            f"the experts have {len(data)} bytes; {nodes} nodes x {layers} layers x {k} experts of {numpy_dtype.name} "
            f"need {expected}."
        )
    array = np.frombuffer(data, numpy_dtype).reshape(nodes, layers, k)
    return array if sys.byteorder == "little" else array.astype(np.dtype(numpy_dtype.name))


def pack_bitsets(experts: np.ndarray, experts_count: int) -> np.ndarray:
    """Expert ids [n, layers, k], any integer dtype -> uint64 bitsets [n, layers, words], bit e of word w is expert 64 w + e.

    A repeated id counts once. Raises CodecError for an id outside 0 .. experts_count - 1.
    """
    global _pack_kernel
    if experts.ndim != 3 or experts.dtype.kind not in "ui":
        raise CodecError(
            f"experts have dtype {experts.dtype} and shape {experts.shape}; integers [nodes, layers, k] are needed."
        )
    if not 1 <= experts_count <= MAX_EXPERTS:
        raise CodecError(f"the number of experts is {experts_count}; 1 to {MAX_EXPERTS} is allowed.")
    if _pack_kernel is None:
        from .bitset_kernel import pack  # here, because only callers of the predictor need the compiler

        _pack_kernel = pack
    if experts.dtype not in (np.uint8, np.uint16):  # the two of the wire are compiled; others are rare
        experts = experts.astype(np.int64)
    nodes, layers, k = experts.shape
    bits = np.zeros((nodes, layers, -(-experts_count // 64)), np.uint64)
    rows = nodes * layers
    if (
        _pack_kernel(np.ascontiguousarray(experts).reshape(rows, k), experts_count, bits.reshape(rows, bits.shape[2]))
        >= 0
    ):
        bad = experts[(experts < 0) | (experts >= experts_count)][0]
        raise CodecError(f"an expert has id {bad}; the target has ids 0 to {experts_count - 1}.")
    return bits


def encode_tree(
    context: Sequence[int] | np.ndarray, tokens: np.ndarray, parents: np.ndarray
) -> tuple[bytes, bytes, bytes]:
    """The three fields of a TreeQuery, in its order: int32 [context], [nodes], [nodes]."""
    return _int32(context), _int32(tokens), _int32(parents)


def decode_tree(
    context: bytes,
    tokens: bytes,
    parents: bytes,
    vocab_size: int,
    max_nodes: int,
    max_context: int | None = None,
    needs_context: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inverse of encode_tree: int64 [context], [nodes], [nodes], checked in full. Raises CodecError.

    Only the last max_context tokens of the context are returned; all of it is checked. needs_context: it may not be empty.
    """
    context_ids = _from_int32("context_tokens", context)
    token_ids = _from_int32("draft_tokens", tokens)
    parent_ids = _from_int32("parents", parents)
    if needs_context and not len(context_ids):
        raise CodecError("context_tokens is empty; at least the root token is needed.")
    if len(token_ids) > max_nodes:
        raise CodecError(f"draft_tokens holds {len(token_ids)} nodes; at most {max_nodes} are allowed in one tree.")
    if len(parent_ids) != len(token_ids):
        raise CodecError(
            f"parents holds {len(parent_ids)} entries for {len(token_ids)} draft_tokens; one per node is needed."
        )
    _check_ids("context_tokens", context_ids, vocab_size)
    _check_ids("draft_tokens", token_ids, vocab_size)
    wrong = (parent_ids >= np.arange(len(parent_ids))) | (parent_ids < ROOT)
    if wrong.any():
        node = int(wrong.argmax())
        raise CodecError(
            f"parents[{node}] is {parent_ids[node]}; {ROOT} (the root) or an earlier node, below {node}, is allowed."
        )
    tail = context_ids if max_context is None else context_ids[-max_context:]
    return tail.astype(np.int64), token_ids.astype(np.int64), parent_ids.astype(np.int64)


def _int32(values: Any) -> bytes:
    array = np.asarray(values)
    if array.dtype != np.int32:
        if array.size and (array.dtype.kind not in "ui" or array.min() < -(2**31) or array.max() >= 2**31):
            raise CodecError(
                f"an array of dtype {array.dtype} does not fit int32; whole numbers below 2**31 are needed."
            )
        array = array.astype(np.int32)
    return array.astype("<i4", copy=False).tobytes()


def _from_int32(name: str, data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise CodecError(f"{name} has {len(data)} bytes; int32 values need a multiple of 4.")
    return np.frombuffer(data, "<i4")


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        at = int(((ids < 0) | (ids >= vocab_size)).argmax())
        raise CodecError(f"{name}[{at}] is {ids[at]}; token ids from 0 to {vocab_size - 1} are allowed.")
