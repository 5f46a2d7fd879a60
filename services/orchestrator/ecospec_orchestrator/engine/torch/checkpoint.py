"""What a Hugging Face model directory holds, read from its headers alone and checked before any weight is read.

Source: the safetensors format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then
the data without gaps; a model of several files has model.safetensors.index.json with {"weight_map": {name: file}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...core import SettingsError
from .geometry import Quantisation, quantisation_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `bytes` bytes from `begin` on in `file`. dtype as the format names it: "BF16", "F8_E4M3", ..."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


@dataclass(frozen=True)
class Checkpoint:
    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    quantisation: Quantisation


def inspect(directory: Path) -> Checkpoint:
    """Read config.json and the header of every weight file.

    Raises SettingsError naming file and tensor where a file is missing, truncated, malformed or at odds with the index.
    """
    if not directory.is_dir():
        raise SettingsError(f"{directory} is not a directory; give the directory of a Hugging Face model.")
    config = read_json(directory / "config.json")
    tensors: dict[str, TensorInfo] = {}
    files, expected = _weight_files(directory)
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise SettingsError(
                    f"tensor {name} is in both {tensors[name].file} and {file}; download the model again."
                )
            tensors[name] = info
    for name, file in expected.items():
        if name not in tensors or tensors[name].file != file:
            raise SettingsError(
                f"{directory / INDEX} says that tensor {name} is in {file.name}, which does not hold it; "
                "download both files again."
            )
    return Checkpoint(directory, config, tensors, quantisation_of(config))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file, or a SettingsError."""
    if not file.is_file():
        raise SettingsError(f"{file} is missing; a complete Hugging Face model directory has it.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} is not JSON ({error}); download it again.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{file} holds a JSON {type(content).__name__}; an object is needed: download it again.")
    return content


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, checked against its size."""
    if not file.is_file():
        raise SettingsError(f"{file} is missing; download the model again, all of its files.")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == b"version ":
            raise SettingsError(f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`.")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise SettingsError(
                f"{file} is truncated or not a safetensors file: {size} bytes, with a header of {length}; download it again."
            )
        if length > MAX_HEADER_BYTES:
            raise SettingsError(f"{file} has a header of {length} bytes; at most {MAX_HEADER_BYTES} is allowed.")
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _without_duplicates(file, pairs))
        entries = [_entry(file, name, value, 8 + length) for name, value in header.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise SettingsError(f"the header of {file} is damaged ({error}); download it again.") from None
    position = 8 + length
    for name, info in sorted(entries, key=lambda entry: (entry[1].begin, entry[1].bytes)):
        if info.begin != position:
            raise SettingsError(
                f"tensor {name} in {file} begins at byte {info.begin}, where the data before it ends at byte {position}; "
                "download the file again."
            )
        position += info.bytes
        if position > size:
            raise SettingsError(
                f"{file} is truncated: tensor {name} ends at byte {position} and the file at byte {size}; download it again."
            )
    if position != size:
        raise SettingsError(
            f"{file} has {size} bytes where its tensors end at byte {position}; download the file again."
        )
    return dict(entries)


def _entry(file: Path, name: str, value: dict[str, Any], data_begin: int) -> tuple[str, TensorInfo]:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise SettingsError(f"tensor {name} in {file} has dtype {dtype}; allowed are {', '.join(ITEM_BYTES)}.")
    if prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise SettingsError(
            f"tensor {name} in {file} has shape {list(shape)} of {dtype} and {end - begin} bytes, which do not agree; "
            "download the file again."
        )
    return name, TensorInfo(file, dtype, shape, data_begin + begin, end - begin)


def _without_duplicates(file: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise SettingsError(f"tensor {name} is twice in the header of {file}; download the file again.")
        found[name] = value
    return found


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, Path]]:
    """(weight files, tensor name -> the file that the index names for it)."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    if (directory / INDEX).is_file():
        names = read_json(directory / INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise SettingsError(f"{directory / INDEX} has no weight_map of tensors to files; download it again.")
        for name, file in names.items():
            if Path(file).name != file:
                raise SettingsError(
                    f"{directory / INDEX} puts tensor {name} in {file!r}; a file of the same directory is allowed."
                )
        expected = {name: directory / file for name, file in names.items()}
        return sorted(set(expected.values())), expected
    pickled = sorted(f.name for suffix in ("*.bin", "*.pt", "*.pth") for f in directory.glob(suffix))
    if pickled:
        raise SettingsError(
            f"{directory} has its weights as {pickled[0]}, a format that can run code when it is read; "
            "convert it to safetensors first (transformers' save_pretrained does)."
        )
    raise SettingsError(f"{directory} has neither {SINGLE} nor {INDEX}; download the model's weights.")
