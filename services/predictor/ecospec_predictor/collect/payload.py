"""What the engines' formats have in common: arrays in JSON, token ids, and the step from both to a document."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ecospec_proto.trace_rows import TraceRows
from ecospec_proto.traces import TraceDocument, TraceError, document_id

from .target import Target

NUMPY_MAGIC = b"\x93NUMPY"


def decode_array(value: Any, raw_dtype: str | None = None) -> np.ndarray:
    """An integer array out of JSON: nested lists; base64 of a .npy file; {"data": base64, "shape", "dtype"}; or, only with
    raw_dtype, base64 of bare little-endian numbers, which becomes one-dimensional. Takes no more memory than the text has,
    whatever a header claims. Raises TraceError."""
    if isinstance(value, str):
        array = _decode_base64(value, raw_dtype)
    elif isinstance(value, Mapping):
        array = _decode_object(value)
    elif isinstance(value, list):
        try:
            array = np.array(value)
        except (ValueError, OverflowError) as error:
            raise TraceError(f"its routes are no array: {error}.") from None
    else:
        raise TraceError(
            f"its routes are {type(value).__name__}; base64 text, an object with data or lists are needed."
        )
    if array.dtype.kind not in "iu":
        raise TraceError(f"its routes have dtype {array.dtype}; whole numbers are needed.")
    return array


def _decode_base64(text: str, raw_dtype: str | None) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"its routes are no base64: {error}.") from None
    if data.startswith(NUMPY_MAGIC):
        return _decode_npy(data)
    if raw_dtype is None:
        raise TraceError("its routes are no .npy file in base64.")
    dtype = np.dtype(raw_dtype)
    if len(data) % dtype.itemsize:
        raise TraceError(f"its routes have {len(data)} bytes, which are no whole number of {dtype}.")
    return np.frombuffer(data, dtype)


def _decode_npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read_header(file)
    except (KeyError, ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise TraceError(f"its routes are no readable .npy file: {error}.") from None
    return _view(data, file.tell(), dtype, shape, "F" if fortran_order else "C")


def _decode_object(value: Mapping[str, Any]) -> np.ndarray:
    text, shape, name = value.get("data"), value.get("shape"), value.get("dtype", "int32")
    if not isinstance(text, str) or not isinstance(shape, list):
        raise TraceError("its routes have no data and shape; an object with both is needed.")
    if name not in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
        raise TraceError(f"its routes have dtype {name!r:.40}; a name of whole numbers such as 'int16' is needed.")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TraceError(f"its routes are no base64: {error}.") from None
    return _view(data, 0, np.dtype(name).newbyteorder("<"), tuple(shape), "C")


def _view(data: bytes, start: int, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any) -> np.ndarray:
    """data from start on as an array, if it is exactly that long."""
    if dtype.kind not in "iu" or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 4:
        raise TraceError(f"its routes claim dtype {dtype} and shape {str(shape):.80}; whole numbers are needed.")
    needed = math.prod(shape) * dtype.itemsize
    if needed != len(data) - start:
        raise TraceError(f"its routes claim shape {str(shape):.80} of {dtype} and have {len(data) - start} bytes.")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)


def token_ids(value: Any, what: str) -> list[int]:
    """Raises TraceError unless value is a list of token ids."""
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise TraceError(f"it has no {what}; a list of token ids is needed: ask the engine to return them.")
    return value


def text_document(
    prompt: Sequence[int], output: Sequence[int], routes: np.ndarray, target: Target, domain: str, start: int = 0
) -> TraceDocument:
    """A text without drafts. routes: int [rows, layers, top_k] of the positions from start on; the last one may be missing,
    because an engine does not compute its last token. The id begins with the prompt's, so that several answers to one prompt
    are known to belong together. Raises TraceError."""
    tokens = np.array([*prompt, *output], np.int32)
    if not len(tokens):
        raise TraceError("it has no tokens; at least one is needed.")
    if type(start) is not int or not 0 <= start <= len(tokens):
        raise TraceError(f"its routes begin at position {start!r:.40}; 0 to {len(tokens)} is possible.")
    if len(tokens) - start - len(routes) not in (0, 1):
        raise TraceError(
            f"its routes have {len(routes)} rows from position {start} on; its text of {len(tokens)} tokens has "
            f"{len(tokens) - start}, the last of which may be missing."
        )
    geometry = target.geometry
    known = normal_routes(routes, target)
    whole = np.full((len(tokens), geometry.moe_layers, geometry.top_k), -1, np.int16)
    whole[start : start + len(known)] = known
    rows = TraceRows(geometry.moe_layers, geometry.top_k)
    rows.add_chain(tokens, whole)
    return rows.document(f"{document_id(prompt)}:{document_id(tokens)[:24]}", domain)


def normal_routes(routes: np.ndarray, target: Target) -> np.ndarray:
    """int [rows, layers, top_k] -> int16 [rows, MoE layers, top_k], -1 where unknown. Raises TraceError.

    Dense layers are left out. A (row, layer) of zeros alone is unknown: engines hand out buffers that begin as zeros.
    """
    geometry = target.geometry
    if routes.ndim != 3 or routes.shape[2] != geometry.top_k:
        raise TraceError(f"its routes have shape {routes.shape}; [tokens, layers, {geometry.top_k}] is needed.")
    if routes.size and (routes.min() < -1 or routes.max() >= geometry.experts):
        bad = routes[(routes < -1) | (routes >= geometry.experts)][0]
        raise TraceError(f"its routes name expert {bad}; -1 to {geometry.experts - 1} is allowed.")
    routes = select_layers(routes, target).astype(np.int16)
    if geometry.top_k > 1:
        routes[(routes == 0).all(2)] = -1
    return routes


def select_layers(routes: np.ndarray, target: Target) -> np.ndarray:
    """[rows, layers, top_k] without the dense layers."""
    geometry, layers = target.geometry, routes.shape[1]
    if layers == geometry.moe_layers:
        return routes
    if target.routed_layers is None:
        raise TraceError(
            f"its routes have {layers} layers, the target has {geometry.moe_layers} MoE layers; if there are dense layers among "
            "them, give the target's Hugging Face directory, which tells which."
        )
    if layers <= max(target.routed_layers):
        raise TraceError(
            f"its routes have {layers} layers; {geometry.moe_layers} MoE layers or more than {max(target.routed_layers)} are "
            "needed."
        )
    return routes[:, list(target.routed_layers)]
