"""Where the engine runs: what the setting means, what is refused, and that everything of a model and its drafter is there.

A device that only pretends to be another one (pretend_device.py) stands in for CUDA, which tests/gpu need.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pretend_device
import pytest
import tiny_heads
import torch
from pretend_device import OnDevice
from tiny_checkpoints import CONFIGS, save_tiny
from tiny_decoding import decode, load_tiny

from ecospec_orchestrator import loading
from ecospec_orchestrator.core import DraftTree, SettingsError
from ecospec_orchestrator.drafting.load import memory_needed_bytes as drafter_memory_bytes
from ecospec_orchestrator.drafting.mtp import module_view
from ecospec_orchestrator.engine.torch import device as devices
from ecospec_orchestrator.engine.torch import loader
from ecospec_orchestrator.engine.torch.checkpoint import inspect
from ecospec_orchestrator.engine.torch.device import device_of, free_bytes, name_of
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_orchestrator.engine.torch.families import FAMILIES
from ecospec_orchestrator.engine.torch.slots import filled_model_of
from ecospec_orchestrator.profiling import binding_of
from ecospec_orchestrator.settings import Settings
from ecospec_proto.geometry import TargetGeometry

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = TargetGeometry("tiny", "test", 97, 32, 3, 8, 2)
# One for each kind of drafter, and of experts, attention and routers.
CASES = [("gpt_oss", "ngram"), ("deepseek_v3", "mtp"), ("qwen3_moe", "eagle3")]


def have_cuda(monkeypatch: pytest.MonkeyPatch, count: int, build: str | None = "12.8") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", build)


def test_auto_is_cuda_where_it_is_and_never_for_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    have_cuda(monkeypatch, 2)
    assert device_of("auto") == CUDA and device_of("auto", auto_is_cpu=True) == CPU
    assert device_of("cuda") == CUDA and device_of("cuda", auto_is_cpu=True) == CUDA
    assert device_of("cuda:1") == torch.device("cuda", 1) and device_of("cpu") == CPU
    have_cuda(monkeypatch, 0)
    assert device_of("auto") == device_of("cpu") == CPU


@pytest.mark.parametrize(
    ("setting", "count", "build", "message"),
    [
        (
            "cuda",
            0,
            None,
            rf"'cuda', but torch {torch.__version__.replace('+', '.')} here is built without CUDA: install",
        ),
        (
            "cuda:1",
            0,
            "12.8",
            "'cuda:1', but .* is built for CUDA 12.8 and finds no device that it can use: see .*, or set cpu",
        ),
        ("cuda:2", 2, "12.8", "'cuda:2', but torch finds 2 CUDA devices here, numbered from 0; give"),
    ],
)
def test_cuda_that_is_not_there_is_refused_in_one_sentence(
    setting: str, count: int, build: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    have_cuda(monkeypatch, count, build)
    for model in ("demo", str(tmp_path / "nowhere")):  # before anything is looked for
        with pytest.raises(SettingsError, match=message) as caught:
            loading.load(Settings(model=model, device=setting))
        assert str(caught.value).count(". ") == 0


def test_memory_and_name_are_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 + device.index, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 200)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(devices, "available_memory_bytes", lambda: 7)
    assert free_bytes(torch.device("cuda", 1)) == 1101 and free_bytes(CPU) == 7
    assert name_of(torch.device("cuda", 1)) == "GPU 1" and name_of(CPU)


def test_too_little_memory_of_the_device_is_refused_with_the_drafters_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_tokenizer: Any
) -> None:
    save_tiny("deepseek_v3", tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    checkpoint = inspect(tmp_path)
    module = loader.memory_needed_bytes(module_view(checkpoint), 0, CUDA)
    assert drafter_memory_bytes("mtp", checkpoint, CUDA) == module > 0
    assert module > loader.memory_needed_bytes(module_view(checkpoint), 0)  # FP8 matrices are widened off the CPU
    target = loader.memory_needed_bytes(checkpoint, 0, CUDA)
    have_cuda(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (target + module + (1 << 20), 0))
    for file in tmp_path.glob("*.safetensors"):
        content = file.read_bytes()
    settings = Settings(model=str(tmp_path), drafter="mtp", device="cuda", max_context_tokens=64, kv_cache_mib=8)
    with pytest.raises(
        SettingsError, match=r"GB of memory on cuda:0 \(.* drafter, .* or a device with more memory"
    ) as caught:
        loading.load(settings)
    assert file.read_bytes() == content and f"{(target + module + (1 << 20)) / 1e9:.2f} GB are" in str(caught.value)
    heads = tiny_heads.save_safeailab(tmp_path / "head")
    size = sum(file.stat().st_size for file in heads.glob("*.safetensors"))
    assert drafter_memory_bytes(str(heads), None, CPU) == size > 0 == drafter_memory_bytes("ngram", None, CPU)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The pretended device is what the setting names, in the engine's threads, too."""
    enter_thread, here = TorchEngine.enter_thread, threading.get_ident()

    def enter(engine: TorchEngine) -> None:
        enter_thread(engine)
        if threading.get_ident() != here and engine.device == pretend_device.DEVICE:
            pretend_device.enter()

    monkeypatch.setattr(TorchEngine, "enter_thread", enter)
    monkeypatch.setattr(loading, "in_own_thread", lambda work: work())
    monkeypatch.setattr(
        loading, "device_of", lambda setting, **_: pretend_device.DEVICE if setting == "cuda" else torch.device(setting)
    )
    with pretend_device.pretend_device(monkeypatch) as made:
        yield made


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and what the stores of experts keep."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        if hasattr(module, "store"):
            store = module.store
            for name in ("gate_up", "down"):
                found |= {f"{path}.{name}.{i}": tensor for i, tensor in enumerate(getattr(store, name))}
            found |= {
                f"{path}.{n}": getattr(store, n) for n in ("gate_up_bias", "down_bias") if getattr(store, n) is not None
            }
    return found


@pytest.mark.parametrize("family", CONFIGS)
def test_every_tensor_is_read_to_the_device_in_pieces(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(family, tmp_path)
    monkeypatch.setattr(loader, "STAGING_BYTES", 1000)
    checkpoint = inspect(tmp_path)
    kept, revisions = [], []
    for where in (CPU, device):
        filled = filled_model_of(checkpoint)
        revisions.append(loader._fill(filled, FAMILIES[family], lambda _done, _of: None, where))
        kept.append(tensors_of(filled.model))
    assert revisions[0] == revisions[1]
    assert {name: type(tensor) for name, tensor in kept[1].items()} == dict.fromkeys(kept[0], OnDevice)
    for name, tensor in kept[0].items():
        here, there = (t.contiguous().view(torch.uint8) for t in (tensor, kept[1][name].cpu()))
        assert torch.equal(here, there), name


def test_what_runs_on_the_cpu_alone_is_not_used_elsewhere(tmp_path: Path, device: torch.device) -> None:
    save_tiny("qwen3_moe", tmp_path)
    engine = loader.load_engine(inspect(tmp_path), max_context_tokens=64, kv_pages=2, device=device)
    assert isinstance(engine.kv_pool.keys, OnDevice) and isinstance(engine.kv_pool.values, OnDevice)
    assert engine.fused_layers == 0 and engine._stack is None
    kinds = {type(module).__module__ for module in engine.model.modules()}
    assert not {kind for kind in kinds if kind.endswith(("fused_layer", "row_modules", "layer_stack"))}


def drafted(loaded: loading.Loaded) -> DraftTree:
    """The tree after a text that repeats itself."""
    engine, drafter = loaded.engine, loaded.drafter
    assert drafter is not None
    tokens, sequence, state = np.tile(np.arange(3, 8), 4), engine.new_sequence(), drafter.new_state()
    drafter.extend([state], [engine.prefill(sequence, tokens[:-1])], [tokens[1:]])
    (tree,) = drafter.draft([state])
    engine.release(sequence)
    drafter.release(state)
    return tree


@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_a_model_and_its_drafter_decode_there_what_they_decode_on_the_cpu(
    family: str, drafter: str, tmp_path: Path, device: torch.device, byte_tokenizer: Any
) -> None:
    outputs, trees = [], []
    for where in ("cuda", "cpu"):
        loaded = load_tiny(family, drafter, tmp_path / where, byte_tokenizer, where)
        pool = getattr(loaded.drafter, "kv_pool", loaded.engine.kv_pool)
        assert pool.keys.device == loaded.engine.device == (device if where == "cuda" else CPU)
        said = [line for line in loading.summary(loaded) if line.startswith("device: ")]
        assert len(said) == 1 and str(loaded.engine.device) in said[0] and name_of(loaded.engine.device) in said[0]
        trees.append(drafted(loaded))
        outputs.append(decode(loaded, "likelihood", count=3)[0])
        assert loaded.engine.check_idle() is None
    assert outputs[0] == outputs[1] and all(len(tokens) == 3 for tokens in outputs[0].values())
    assert len(trees[0]) > 0
    np.testing.assert_array_equal(trees[0].tokens, trees[1].tokens)
    np.testing.assert_array_equal(trees[0].parents, trees[1].parents)
    np.testing.assert_allclose(trees[0].probabilities, trees[1].probabilities, rtol=1e-3)


def test_a_profile_is_bound_to_the_gpu_and_how_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight:
        dtype, device = torch.bfloat16, CUDA

        def numel(self) -> int:
            return 1

        element_size = numel

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Some GPU")
    model = type("Model", (), {"parameters": lambda _self: [Weight()]})()
    engine: Any = type("Engine", (), {"model": model, "computed_by": "CUDA graphs", "geometry": TINY})()
    assert binding_of(engine, None, None).device == "Some GPU, CUDA graphs"
