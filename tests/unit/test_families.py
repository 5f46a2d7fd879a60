"""A tiny checkpoint of every family, in its published form on disk, against transformers' own model of the same weights."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, save_tiny  # noqa: E402
from torch import nn

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.base import VerifyItem
from ecospec_orchestrator.engine.torch import loader
from ecospec_orchestrator.engine.torch.checkpoint import inspect
from ecospec_orchestrator.engine.torch.engine import TorchEngine, ancestors
from ecospec_orchestrator.engine.torch.families import FAMILIES, is_draft_tensor, stored_names
from ecospec_orchestrator.engine.torch.geometry import geometry_of, step_bytes_of
from ecospec_orchestrator.engine.torch.loader import check_memory, load_engine
from ecospec_orchestrator.engine.torch.slots import filled_model_of
from ecospec_proto.memory import available_memory_bytes

VOCABULARY = 97
SINGLE = "model.safetensors"


def load(directory: Path, **options) -> TorchEngine:
    return load_engine(inspect(directory), max_context_tokens=256, kv_pages=32, **options)


def reference_path(model: nn.Module, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Last-position logits and experts [layers, k] of a plain causal forward over the whole path."""
    routed: list[torch.Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, args: routed.append(args[1][-1]))
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    ]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    return logits.numpy(), torch.stack(routed).numpy()


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes + 1)])
    return rng.integers(3, VOCABULARY, nodes + 1), parents


def path_to(row: int, tokens: np.ndarray, parents: np.ndarray) -> list[int]:
    path: list[int] = []
    while row != -1:
        path.append(int(tokens[row]))
        row = int(parents[row])
    return path[::-1]


def assert_equal_to_reference(engine: TorchEngine, model: nn.Module, seed: int = 0) -> None:
    """Packed trees of several sequences, kept and continued, against a plain forward of every path."""
    rng = np.random.default_rng(seed)
    sequences, contexts = [], []
    for length in (1, 9, 30):
        context = rng.integers(3, VOCABULARY, length)
        sequence = engine.new_sequence()
        engine.prefill(sequence, context)
        sequences.append(sequence)
        contexts.append(context.tolist())
    for _ in range(2):
        trees = [random_tree(rng, n) for n in (0, 3, 6)]
        results = engine.verify([VerifyItem(s, t, p) for s, (t, p) in zip(sequences, trees, strict=True)])
        for i, (result, (tokens, parents)) in enumerate(zip(results, trees, strict=True)):
            for row in range(len(tokens)):
                logits, experts = reference_path(model, contexts[i] + path_to(row, tokens, parents))
                np.testing.assert_allclose(result.logits[row], logits, atol=1e-4, rtol=0)
                assert [set(e) for e in result.experts[row].tolist()] == [set(e) for e in experts.tolist()]
            visible, _ = ancestors(parents)
            kept = np.flatnonzero(visible[rng.integers(0, len(tokens))])
            engine.commit(sequences[i], kept)
            contexts[i] += tokens[kept].tolist()


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_experts_equal_transformers(family: str, tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path)
    assert_equal_to_reference(load(tmp_path), model)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_row_does_not_depend_on_its_companions(family: str, tmp_path: Path) -> None:
    """Bitwise: the same rows alone, in a tree and beside other sequences."""
    save_tiny(family, tmp_path)
    engine, rng = load(tmp_path), np.random.default_rng(3)
    sequences = [engine.new_sequence() for _ in range(3)]
    for sequence, length in zip(sequences, (5, 70, 21), strict=True):
        engine.prefill(sequence, rng.integers(3, VOCABULARY, length))
    trees = [random_tree(rng, n) for n in (4, 0, 7)]
    together = engine.verify([VerifyItem(s, t, p) for s, (t, p) in zip(sequences, trees, strict=True)])
    for sequence, (tokens, parents), result in zip(sequences, trees, together, strict=True):
        (alone,) = engine.verify([VerifyItem(sequence, tokens, parents)])
        (root,) = engine.verify([VerifyItem(sequence, tokens[:1], parents[:1])])
        for other in (alone, root):
            rows = len(other.logits)
            assert np.array_equal(other.logits, result.logits[:rows])
            assert np.array_equal(other.experts, result.experts[:rows])


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_are_exactly_those_of_the_files(family: str, tmp_path: Path) -> None:
    model, engine = save_tiny(family, tmp_path), load(tmp_path)
    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            store = engine.model.get_submodule(path).store
            assert not list(engine.model.get_submodule(path).parameters())
            for expert in range(store.experts):
                gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
                if family == "gpt_oss":  # transposed, gate and up alternating
                    gate_up, down = torch.cat([gate_up.T[::2], gate_up.T[1::2]]), down.T
                assert torch.equal(store.dequantised(expert)[0], gate_up)
                assert torch.equal(store.dequantised(expert)[1], down)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral"])
def test_float32_files_are_kept_exactly(family: str, tmp_path: Path) -> None:
    """Every family can be stored unquantised too; here with transformers' own fused names, in float32."""
    model = save_tiny(family, tmp_path)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / SINGLE)
    change_config(tmp_path, lambda c: c.pop("quantization_config", None) and None or c.update(torch_dtype="float32"))
    engine = load(tmp_path)
    assert engine.step_bytes == step_bytes_of(inspect(tmp_path).config)
    assert_equal_to_reference(engine, model)


def test_float16_files_are_widened_exactly(tmp_path: Path) -> None:
    model = save_tiny("mixtral", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file({n: t.half() for n, t in tensors.items()}, tmp_path / SINGLE)
    change_config(tmp_path, lambda c: c.update(torch_dtype="float16"))
    for tensor in model.state_dict().values():
        tensor.copy_(tensor.half())
    engine = load(tmp_path)
    assert engine.step_bytes == step_bytes_of(inspect(tmp_path).config)
    assert_equal_to_reference(engine, model)


def test_a_tied_head_is_the_embedding_table(tmp_path: Path) -> None:
    model = save_tiny("qwen3_moe", tmp_path, tie_word_embeddings=True)
    checkpoint = inspect(tmp_path)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    engine = load(tmp_path)
    assert engine.model.lm_head.weight.data_ptr() == engine.model.model.embed_tokens.weight.data_ptr()
    assert engine.step_bytes == step_bytes_of(checkpoint.config)
    assert_equal_to_reference(engine, model)


def test_dense_layers_between_mixtures(tmp_path: Path) -> None:
    model = save_tiny("qwen3_moe", tmp_path, mlp_only_layers=[1])
    engine = load(tmp_path)
    assert engine.geometry.moe_layers == 2
    assert engine.step_bytes == step_bytes_of(inspect(tmp_path).config)
    assert_equal_to_reference(engine, model)


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_from_the_configuration_are_those_of_the_tensors(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    checkpoint, seen = inspect(tmp_path), []
    engine = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert engine.step_bytes == step_bytes_of(checkpoint.config)
    assert engine.geometry == geometry_of(checkpoint.config, tmp_path.name, engine.geometry.revision)
    stores = [m.store for n, m in engine.model.named_modules() if n.endswith("mlp.experts")]
    assert {s.bytes_per_expert for s in stores} == {engine.step_bytes.per_expert}
    assert len(stores) == engine.geometry.moe_layers and stores[0].experts == engine.geometry.experts
    # Everything but draft-only layers is read, once.
    target = [i.bytes for n, i in checkpoint.tensors.items() if not is_draft_tensor(checkpoint.config, n)]
    assert seen[-1] == (sum(target), sum(target)) and len(seen) == len(target) and seen == sorted(seen)


@pytest.mark.parametrize("family", CONFIGS)
def test_memory_needed_is_what_the_filled_model_takes(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    filled = filled_model_of(inspect(tmp_path))
    loader._fill(filled, FAMILIES[family], lambda _done, _total: None)
    model = filled.model
    kept = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    kept -= sum(b.nbytes for n, b in model.named_buffers() if n.endswith(("inv_freq", "_kernel_scales")))
    stores = [module.store for module in model.modules() if hasattr(module, "store")]
    assert kept + sum(s.bytes_per_expert * s.experts for s in stores) == filled.weight_bytes


def test_the_revision_is_the_routers(tmp_path: Path) -> None:
    revisions = []
    for seed in (0, 0, 1):
        save_tiny("gpt_oss", tmp_path, seed)
        revisions.append(load(tmp_path).geometry.revision)
    assert revisions[0] == revisions[1] != revisions[2]


def test_layers_behind_the_targets_are_the_drafters(tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    checkpoint = inspect(tmp_path)
    draft = [name for name in checkpoint.tensors if is_draft_tensor(checkpoint.config, name)]
    assert "model.layers.3.eh_proj.weight" in draft and all(".layers.3." in name for name in draft)
    assert load(tmp_path).geometry.moe_layers == 2


def test_features_are_the_layers_outputs(tmp_path: Path) -> None:
    model = save_tiny("olmoe", tmp_path)
    engine, tokens = load(tmp_path, feature_layers=(0, 2)), np.arange(3, 20)
    features = engine.prefill(engine.new_sequence(), tokens)
    seen: dict[int, torch.Tensor] = {}
    for number in (0, 2):
        model.model.layers[number].register_forward_hook(lambda _m, _i, out, n=number: seen.update({n: out[0]}))
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None], use_cache=False)
    torch.testing.assert_close(features, torch.cat([seen[0], seen[2]], -1), atol=1e-4, rtol=0)


def test_mixtral_names() -> None:
    names = stored_names(FAMILIES["mixtral"], "model.layers.0.mlp.gate.weight")
    assert names == ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight")


def test_derived_frequencies_in_old_files_are_ignored(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    change_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path)


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def change_config(directory: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


Q_A = "model.layers.1.self_attn.q_a_proj.weight"
W3 = "model.layers.2.block_sparse_moe.experts.5.w3.weight"
BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", lambda t: t.pop(W3), f"has no tensor {W3}, which a mixtral model"),
        ("mixtral", lambda t: t.update({W3: t[W3][:, :-1].contiguous()}), rf"{W3} in .*{SINGLE} has shape \[24, 31\]"),
        ("mixtral", lambda t: t.update({W3: t[W3].to(torch.int8)}), f"{W3} in .*{SINGLE} has dtype I8; BF16 or F16"),
        ("mixtral", lambda t: t.update({W3: t[W3].float()}), "experts are BF16 and F32 in"),
        ("mixtral", lambda t: t.update({"a.b": torch.ones(1)}), f"a.b in .*{SINGLE} has no place in a mixtral model"),
        ("mixtral", lambda t: t.update({"a": torch.ones(1), "b": torch.ones(1)}), r"\(and 1 more\) has no place"),
        ("deepseek_v3", lambda t: t.pop(f"{Q_A}_scale_inv"), f"has no tensor {Q_A}_scale_inv"),
        (
            "deepseek_v3",
            lambda t: t.update({f"{Q_A}_scale_inv": torch.ones(1, 3)}),
            rf"{Q_A}_scale_inv in .* has shape \[1, 3\] where config.json asks for \[1, 2\]",
        ),
        (
            "deepseek_v3",
            lambda t: t[Q_A].view(torch.uint8).fill_(0x7F),
            "q_a_proj in .*model.safetensors cannot be loaded",
        ),
        ("deepseek_v3", lambda t: t.pop("model.layers.1.mlp.gate.e_score_correction_bias"), "has no tensor .*_bias"),
        ("gpt_oss", lambda t: t.pop(BLOCKS), "has no tensor model.layers.0.mlp.experts.gate_up_proj,"),
        (
            "gpt_oss",
            lambda t: t.update({BLOCKS: t[BLOCKS][..., :8].contiguous()}),
            rf"{BLOCKS} in .* has shape \[8, 192, 2, 8\] where config.json asks for \[8, 192, 2, 16\]",
        ),
        ("gpt_oss", lambda t: t[BLOCKS.replace("blocks", "scales")].fill_(255), "mlp.experts in .* cannot be loaded"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(family: str, change, message: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    change_tensors(tmp_path, change)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(model_type="llama"), "model_type 'llama'; supported mixture-of-experts families are deepseek_v3"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'; only 'silu'"),
        (dict(num_attention_heads="four"), "not a valid configuration of mixtral"),
        (dict(num_hidden_layers=4), "has no tensor model.layers.3.self_attn.q_proj.weight"),
        (
            dict(num_local_experts=9),
            r"gate.weight in .* has shape \[8, 32\] where config.json asks for \[9, 32\]|experts.8.w1",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    change_config(tmp_path, lambda c: c.update(change))
    with pytest.raises(SettingsError, match=message):
        load(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    checkpoint = inspect(tmp_path)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:20000])
    with pytest.raises(SettingsError, match=f"{SINGLE} has become shorter"):
        load_engine(checkpoint, max_context_tokens=256, kv_pages=1)


def test_settings_that_the_model_does_not_have(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    with pytest.raises(SettingsError, match="reads layer 3 of the target, which has layers 0 to 2"):
        load(tmp_path, feature_layers=(0, 3))
    with pytest.raises(SettingsError, match="max_context_tokens is 5000; .* knows 4096 positions"):
        load_engine(inspect(tmp_path), max_context_tokens=5000, kv_pages=1)


def test_too_little_memory_is_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("mixtral", tmp_path)
    checkpoint = inspect(tmp_path)
    needed = loader.memory_needed_bytes(checkpoint, 3_000_000_000)
    assert needed > filled_model_of(checkpoint).weight_bytes + 3_000_000_000
    monkeypatch.setattr(loader, "free_bytes", lambda _device: needed)
    check_memory(checkpoint, 3_000_000_000)
    monkeypatch.setattr(loader, "free_bytes", lambda _device: 2_000_000_000)
    with pytest.raises(
        SettingsError, match=r"needs 3\.\d\d GB of memory \(0.00 weights, 3.00 KV cache, .* 2.00 GB are"
    ):
        check_memory(checkpoint, 3_000_000_000)
    (tmp_path / SINGLE).unlink()  # nothing is read any more
    with pytest.raises(SettingsError, match="are available; lower the KV cache"):
        load_engine(checkpoint, max_context_tokens=256, kv_pages=10**9)


def test_available_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:    800 kB\n")
    assert available_memory_bytes(tmp_path, tmp_path / "none") == 800 * 1024
    for name, content in (
        ("memory.max", "max\n"),
        ("memory.current", "300\n"),
        ("memory.stat", "anon 1\ninactive_file 40\n"),
    ):
        (tmp_path / name).write_text(content)
    assert available_memory_bytes(tmp_path, tmp_path) == 800 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_memory_bytes(tmp_path, tmp_path) == 740
    assert available_memory_bytes(tmp_path / "none", tmp_path) > 0
