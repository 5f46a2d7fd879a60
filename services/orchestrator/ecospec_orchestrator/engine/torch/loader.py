"""Build the embedded engine from a checkpoint: plan, check the memory, then read the weights into transformers' modules.

Weights stay in memory as stored (bfloat16, MXFP4, FP8 with block scales, float32); float16 is widened to float32. Norms,
routers and attention sinks are float32. Every tensor is read right to its device: the machine's memory never holds the model
of a GPU, only STAGING_BYTES of it at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from io import BufferedReader
from typing import Any

import torch
from torch import nn

from ...core import SettingsError
from .cache import PAGE_TOKENS
from .checkpoint import Checkpoint, TensorInfo
from .device import free_bytes
from .engine import PREFILL_CHUNK, TorchEngine
from .experts import Bfloat16Experts, ExpertStore, Float32Experts, Fp8Experts, Mxfp4Experts, Options
from .families import Family, family_of
from .geometry import geometry_of, kv_layout_of
from .modules import Bfloat16Embedding, Bfloat16Linear
from .quantised import Fp8Linear
from .slots import FilledModel, Slot, filled_model_of

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
STAGING_BYTES = 64 << 20  # of a file, on their way to another device
CPU = torch.device("cpu")


def load_engine(
    checkpoint: Checkpoint,
    *,
    max_context_tokens: int,
    kv_pages: int,
    threads: int = 1,
    feature_layers: tuple[int, ...] = (),
    prefix_reuse: bool = True,
    progress: Callable[[int, int], None] = lambda _done_bytes, _total_bytes: None,
    name: str | None = None,
    device: torch.device = CPU,
    drafter_bytes: int = 0,
) -> TorchEngine:
    """Read the weights to the device. progress(done_bytes, total_bytes) is called after every tensor; name: what the target is
    called, by default like its directory; drafter_bytes: memory that a drafter will take there beside it, its cache included.
    The geometry's revision is a digest of the routers.

    Raises SettingsError, before any weight is read where the headers show it, for files that do not fit config.json, for too
    little memory and for layers or a context that the model does not have.
    """
    _check_settings(checkpoint.config, max_context_tokens, feature_layers)
    filled = filled_model_of(checkpoint)
    kv_cache_bytes = kv_pages * PAGE_TOKENS * kv_layout_of(checkpoint.config).bytes_per_token
    _check_memory(checkpoint, filled, kv_cache_bytes, device, drafter_bytes)
    revision = _fill(filled, family_of(checkpoint.config), progress, device)
    geometry = geometry_of(checkpoint.config, name or checkpoint.directory.resolve().name, revision)
    sizes = filled.step_bytes(checkpoint.config)
    return TorchEngine(
        filled.model, geometry, sizes, feature_layers, max_context_tokens, kv_pages, threads, prefix_reuse
    )


def memory_needed_bytes(checkpoint: Checkpoint, kv_cache_bytes: int, device: torch.device = CPU) -> int:
    """Weights as they are kept, the KV cache, and an estimate of a step's working memory."""
    return _needed(checkpoint, filled_model_of(checkpoint), kv_cache_bytes, device)


def check_memory(
    checkpoint: Checkpoint, kv_cache_bytes: int, device: torch.device = CPU, drafter_bytes: int = 0
) -> None:
    """Raises SettingsError with both numbers where the model does not fit into the memory that is free on the device now."""
    _check_memory(checkpoint, filled_model_of(checkpoint), kv_cache_bytes, device, drafter_bytes)


def _check_settings(config: dict[str, Any], max_context_tokens: int, feature_layers: tuple[int, ...]) -> None:
    layers, positions = config["num_hidden_layers"], config.get("max_position_embeddings")
    wrong = [layer for layer in feature_layers if not 0 <= layer < layers]
    if wrong:
        raise SettingsError(
            f"the draft head reads layer {wrong[0]} of the target, which has layers 0 to {layers - 1}; "
            "give a head that was trained for this target."
        )
    if positions is not None and max_context_tokens > positions:
        raise SettingsError(
            f"max_context_tokens is {max_context_tokens}; the model of this config.json knows {positions} positions: "
            "lower the setting."
        )


def _needed(checkpoint: Checkpoint, filled: FilledModel, kv_cache_bytes: int, device: torch.device) -> int:
    return filled.weight_bytes + kv_cache_bytes + _working_bytes(checkpoint.config, filled, device)


def _working_bytes(config: dict[str, Any], filled: FilledModel, device: torch.device) -> int:
    """A prefill chunk's activations and routed pairs, its logits if all of it were verified, and one matrix widened to float32
    or, while gpt-oss is loaded, a copy of one layer's experts, whose rows are put in order."""
    widest = max(slot.kept_bytes for slot in filled.slots if slot.kind != "experts")
    interleaved = [slot.kept_bytes for slot in filled.slots if "gate_up_proj_bias" in slot.tensors]
    # Only the CPU has kernels for FP8 matrices: elsewhere the weights, their scales and the products are float32 for a moment.
    widened = [3 * 4 * slot.kept_bytes for slot in filled.slots if "weight_scale_inv" in slot.tensors]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    row = 8 * config["hidden_size"] + config["num_experts_per_tok"] * (3 * width + config["hidden_size"])
    largest = max([2 * widest, *interleaved, *(widened if device.type != "cpu" else [])])
    return PREFILL_CHUNK * (row + config["vocab_size"]) * 4 + largest


def _check_memory(
    checkpoint: Checkpoint, filled: FilledModel, kv_cache_bytes: int, device: torch.device, drafter_bytes: int
) -> None:
    model, available = _needed(checkpoint, filled, kv_cache_bytes, device), free_bytes(device)
    needed = model + drafter_bytes
    if needed > available:
        weights, cache, drafter = filled.weight_bytes / 1e9, kv_cache_bytes / 1e9, drafter_bytes / 1e9
        where, place = ("", "machine") if device.type == "cpu" else (f" on {device}", "device")
        beside = f", {drafter:.2f} drafter" if drafter_bytes else ""
        raise SettingsError(
            f"{checkpoint.directory} needs {needed / 1e9:.2f} GB of memory{where} ({weights:.2f} weights, {cache:.2f} KV cache"
            f"{beside}, {model / 1e9 - weights - cache:.2f} working memory) and {available / 1e9:.2f} GB are available; lower the "
            f"KV cache or the context, take a smaller or quantised model, or a {place} with more memory."
        )


def _fill(filled: FilledModel, family: Family, progress: Callable[[int, int], None], device: torch.device = CPU) -> str:
    """Put the weights into filled.model, on the device; returns a digest of the routers."""
    model, digest = filled.model, hashlib.sha256()
    reader = _Reader(filled.file_bytes, progress, device)
    for slot in filled.slots:
        path, _, name = slot.path.rpartition(".")
        parent = model.get_submodule(path)
        try:
            if slot.kind == "vector":
                value = reader.read(slot.tensors["weight"], torch.float32)
                old = getattr(parent, name)
                new = nn.Parameter(value, requires_grad=False) if isinstance(old, nn.Parameter) else value
                setattr(parent, name, new)
                if ".mlp.gate." in slot.path or ".mlp.router." in slot.path:
                    digest.update(value.cpu().numpy().tobytes())
            elif slot.kind == "experts":
                _set_store(getattr(parent, name), _experts(slot, getattr(parent, name), family, reader))
            else:
                setattr(parent, name, _embedding(slot, reader) if slot.kind == "embedding" else _linear(slot, reader))
        except SettingsError as error:
            file = next(iter(slot.tensors.values())).file
            raise SettingsError(f"{slot.path} in {file} cannot be loaded: {error}") from error
    if filled.tied:
        table = model.model.embed_tokens.weight
        model.lm_head = Bfloat16Linear(table.data) if table.dtype == torch.bfloat16 else _float32_linear(table.data)
    # The frequencies follow from the configuration; on the empty model they had no values.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return digest.hexdigest()[:16]


class _Reader:
    """Reads tensors to the device and tells how far it is."""

    def __init__(self, total_bytes: int, progress: Callable[[int, int], None], device: torch.device) -> None:
        self._done, self._total, self._progress, self._device = 0, total_bytes, progress, device
        if device.type != "cpu":
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def read(self, info: TensorInfo, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of memory of its own, of the file's dtype or another; float16 becomes float32."""
        out = torch.empty(info.shape, dtype=dtype or _kept(info), device=self._device)
        self.read_into(info, out)
        return out

    def read_into(self, info: TensorInfo, out: torch.Tensor) -> None:
        """out: contiguous, of the tensor's shape, on the device; of another dtype it is converted."""
        stored = DTYPES[info.dtype]
        raw = out if out.dtype == stored else torch.empty(info.shape, dtype=stored, device=self._device)
        with info.file.open("rb") as stream:
            stream.seek(info.begin)
            read = self._read_bytes(stream, raw.view(torch.uint8))
        if read != info.bytes:
            raise SettingsError(f"{info.file} has become shorter since it was checked; download it again.")
        if raw is not out:
            out.copy_(raw)
        self._done += info.bytes
        self._progress(self._done, self._total)

    def _read_bytes(self, stream: BufferedReader, raw: torch.Tensor) -> int:
        """Fill raw, uint8 and contiguous; returns how many bytes there were."""
        if self._device.type == "cpu":
            return stream.readinto(memoryview(raw.numpy()).cast("B"))
        done = 0
        for part in raw.view(-1).split(STAGING_BYTES):
            staged = self._staging[: len(part)]
            done += stream.readinto(memoryview(staged.numpy()))
            part.copy_(staged)  # waits: the staging memory is used again
        return done

    def stack(self, experts: Iterable[list[TensorInfo]]) -> torch.Tensor:
        """[experts, rows, ...]: the tensors of each expert below each other, each read right to its place."""
        rows = list(experts)
        first = rows[0]
        shape = len(rows), sum(i.shape[0] for i in first), *first[0].shape[1:]
        out = torch.empty(*shape, dtype=_kept(first[0]), device=self._device)
        for expert, infos in enumerate(rows):
            for info, part in zip(infos, out[expert].split([i.shape[0] for i in infos]), strict=True):
                self.read_into(info, part)
        return out


def _kept(info: TensorInfo) -> torch.dtype:
    return torch.float32 if info.dtype == "F16" else DTYPES[info.dtype]


def _embedding(slot: Slot, reader: _Reader) -> nn.Module:
    weight = reader.read(slot.tensors["weight"])
    if weight.dtype == torch.bfloat16:
        return Bfloat16Embedding(weight)
    return nn.Embedding.from_pretrained(weight, freeze=True)


def _linear(slot: Slot, reader: _Reader) -> nn.Module:
    weight = reader.read(slot.tensors["weight"])
    bias = reader.read(slot.tensors["bias"], torch.float32) if "bias" in slot.tensors else None
    if weight.dtype == torch.float8_e4m3fn:
        return Fp8Linear(weight, reader.read(slot.tensors["weight_scale_inv"]), bias)
    return Bfloat16Linear(weight, bias) if weight.dtype == torch.bfloat16 else _float32_linear(weight, bias)


def _float32_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _experts(slot: Slot, module: Any, family: Family, reader: _Reader) -> ExpertStore:
    """The store of one layer; module: the family's own, still without memory."""
    tensors = slot.tensors
    options: Options = {}
    if family.gate == "gpt_oss":
        options = {
            "gate": "gpt_oss",
            "alpha": module.alpha,
            "limit": module.limit,
            "interleaved": True,
            "gate_up_bias": reader.read(tensors["gate_up_proj_bias"]),
            "down_bias": reader.read(tensors["down_proj_bias"]),
        }
    if "gate_up_proj_blocks" in tensors:
        names = (f"{part}_{kind}" for part in ("gate_up_proj", "down_proj") for kind in ("blocks", "scales"))
        gate_up, gate_up_scales, down, down_scales = (reader.read(tensors[name]) for name in names)
        return Mxfp4Experts(gate_up, gate_up_scales, down, down_scales, **options)
    if "gate_up_proj" in tensors:
        gate_up, down = reader.read(tensors["gate_up_proj"]), reader.read(tensors["down_proj"])
        if family.gate == "gpt_oss":  # [E, inputs, outputs]
            gate_up, down = gate_up.mT, down.mT
        return (Bfloat16Experts if down.dtype == torch.bfloat16 else Float32Experts)(gate_up, down, **options)
    each = range(module.num_experts)
    stack = lambda parts, suffix="": reader.stack([tensors[f"{e}.{p}{suffix}"] for p in parts] for e in each)
    gate_up_parts, down_parts = family.expert_parts[:2], family.expert_parts[2:]
    gate_up, down = stack(gate_up_parts), stack(down_parts)
    if down.dtype == torch.float8_e4m3fn:
        scales = stack(gate_up_parts, "_scale_inv"), stack(down_parts, "_scale_inv")
        return Fp8Experts(gate_up, scales[0], down, scales[1], **options)
    return (Bfloat16Experts if down.dtype == torch.bfloat16 else Float32Experts)(gate_up, down, **options)


def _set_store(module: Any, store: ExpertStore) -> None:
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        delattr(module, name)
    module.store = store
