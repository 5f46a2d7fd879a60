"""Which network a checkpoint directory holds, and how it is read: the one place that knows the kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ecospec_proto.geometry import TargetGeometry

from .hf_network import HfConfig, HfExpertPredictor
from .network import FORMAT_VERSION, ExpertPredictor, PredictorConfig

Network = ExpertPredictor | HfExpertPredictor
MAX_LAYERS = 1024  # of a network of our own; no useful one comes near it
_tables: WeakValueDictionary[tuple[Path, int, int], torch.Tensor] = WeakValueDictionary()
EMBEDDING_NAMES = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")


def read_checkpoint_config(model_dir: Path) -> tuple[dict[str, Any], TargetGeometry]:
    """(config.json, the target it was trained for). Raises ValueError: one sentence."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{model_dir} holds no config.json; give a directory written by the predictor's training."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{model_dir}/config.json is no JSON: {error}.") from None
    version = config.get("format_version") if isinstance(config, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{model_dir} has format_version {version!r}; this release reads {FORMAT_VERSION}: train it again."
        )
    try:
        return config, TargetGeometry(**config["target"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{model_dir}/config.json names no usable target: {error}.") from None


def require_geometry(what: object, found: TargetGeometry, wanted: TargetGeometry) -> None:
    """Raises ValueError with the fields in which the two differ."""
    pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in TargetGeometry.__dataclass_fields__]
    wrong = ", ".join(f"{name} {have!r} instead of {need!r}" for name, have, need in pairs if have != need)
    if wrong:
        raise ValueError(f"{what} belongs to another target: {wrong}; use one made for {wanted.name}.")


def load_network(
    model_dir: Path, embeddings: Path | None, geometry: TargetGeometry | None = None
) -> tuple[Network, dict[str, Any]]:
    """(network with float32 weights, its config.json). Raises ValueError: one sentence.

    embeddings: of the target; only a small network needs them. geometry: the target that the caller has.
    """
    config, trained_for = read_checkpoint_config(model_dir)
    if geometry is not None:
        require_geometry(model_dir, trained_for, geometry)
    values = dict(config["predictor"])
    kind = values.get("kind", "small")
    if kind not in ("small", "hf"):
        raise ValueError(f"{model_dir} has a predictor of kind {kind!r:.40}; this release knows small and hf.")
    table = load_embeddings(embeddings) if kind == "small" else None

    def build() -> Network:
        if table is None:
            return HfExpertPredictor(HfConfig(**values), trained_for)
        sizes = {name: value for name, value in values.items() if name != "kind"}
        return ExpertPredictor(PredictorConfig(**sizes), trained_for, table)

    path = model_dir / "model.safetensors"
    if (layers := values.get("layers", 1)) > MAX_LAYERS:
        raise ValueError(f"{model_dir}/config.json has {layers!r:.40} layers; at most {MAX_LAYERS} are allowed.")
    try:
        with torch.device("meta"):  # sizes without memory: what the file does not hold is never allocated
            wanted = {name: list(value.shape) for name, value in build().state_dict().items()}
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ValueError(
                    f"{path} has {name} of shape {found.get(name)}, but config.json needs {wanted.get(name)}; copy both again."
                )
        weights = {name: value.float() for name, value in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{path} has values that are no numbers in {broken[0]}; train it again.")
    network = build()
    network.load_state_dict(weights)
    return network, config


def load_embeddings(path: Path | None) -> torch.Tensor:
    """The target's token embeddings, bfloat16 [vocabulary, hidden], from a GGUF file, a safetensors file or a Hugging Face
    model directory. A table that is in use is not read again: versions of one target share it. Raises ValueError: one
    sentence."""
    if path is None:
        raise ValueError(
            "A small predictor needs the target's token embeddings; give embeddings: a file or a directory."
        )
    if path.is_dir():
        path = _embedding_shard(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    key = (path.resolve(), stat.st_mtime_ns, stat.st_size)
    if (table := _tables.get(key)) is None:
        table = _tables[key] = (_safetensors if path.suffix == ".safetensors" else _gguf)(path)
    return table


def _safetensors(path: Path) -> torch.Tensor:
    try:
        with safe_open(path, "pt") as file:
            found = [name for name in EMBEDDING_NAMES if name in file.keys()]  # noqa: SIM118 - no mapping
            if found:
                return file.get_tensor(found[0]).bfloat16()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    raise ValueError(f"{path} holds none of the tensors {', '.join(EMBEDDING_NAMES)}; give the target's own weights.")


def _gguf(path: Path) -> torch.Tensor:
    import gguf

    for tensor in gguf.GGUFReader(str(path)).tensors:
        if tensor.name == "token_embd.weight":
            return torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
    raise ValueError(f"{path} holds no tensor token_embd.weight; give the GGUF file that the target is made from.")


def _embedding_shard(directory: Path) -> Path:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return directory / "model.safetensors"
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        name = next(shards[name] for name in EMBEDDING_NAMES if name in shards)
    except (ValueError, KeyError, TypeError, StopIteration):
        raise ValueError(f"{index} names none of the tensors {', '.join(EMBEDDING_NAMES)}.") from None
    if Path(name).name != name:
        raise ValueError(f"{index} names the file {name!r}, which lies outside its directory.")
    return directory / name
