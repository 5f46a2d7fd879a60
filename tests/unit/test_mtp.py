"""DeepSeek's MTP chain against transformers' own MTP layer, run over the whole sequence for every drafted token."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny  # noqa: E402
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.drafting.load import feature_layers_of, kv_layout_of, load_drafter
from ecospec_orchestrator.drafting.mtp import MtpDrafter
from ecospec_orchestrator.drafting.target import TargetFacts
from ecospec_orchestrator.engine.torch.checkpoint import inspect

DEPTH, LAYERS = 3, 3
PREFIX = f"model.layers.{LAYERS}."


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file) | {PREFIX + k.replace("__", "."): v for k, v in changes.items()}
    save_file({k: v for k, v in tensors.items() if v is not None}, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The checkpoint's own norms and projection are trivial; here they are not."""
    directory = tmp_path_factory.mktemp("deepseek")
    model = save_tiny("deepseek_v3", directory).requires_grad_(False)
    size, generator = model.config.hidden_size, torch.Generator().manual_seed(5)
    norms = (torch.rand(size, generator=generator).bfloat16() + 0.5 for _ in range(3))
    matrix = (torch.randn(size, 2 * size, generator=generator) * size**-0.5).bfloat16()
    names = ("enorm__weight", "hnorm__weight", "shared_head__norm__weight")
    rewrite(directory, **dict(zip(names, norms, strict=True)), eh_proj__weight=matrix)
    return directory, model


def facts(model: PreTrainedModel) -> TargetFacts:
    c = model.config
    return TargetFacts(
        "tiny", c.hidden_size, c.vocab_size, LAYERS, model.model.embed_tokens, model.model.norm, model.lm_head
    )


@pytest.fixture(scope="module")
def drafter(saved: tuple[Path, PreTrainedModel]) -> MtpDrafter:
    directory, model = saved
    made = load_drafter("mtp", facts(model), DEPTH, top_k=4, kv_pages=8, checkpoint=inspect(directory))
    assert isinstance(made, MtpDrafter)
    return made


@pytest.fixture(scope="module")
def reference(saved: tuple[Path, PreTrainedModel]) -> MtpLayer:
    """transformers' layer with the dequantised weights of the files."""
    directory, model = saved
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = "eager"
    layer = MtpLayer(config, DeepseekV3DecoderLayer, DeepseekV3RMSNorm, LAYERS).eval().requires_grad_(False)
    stored = {k.removeprefix(PREFIX): v for k, v in load_file(directory / "model.safetensors").items() if PREFIX in k}
    plain = {}
    for name, tensor in stored.items():
        if f"{name}_scale_inv" in stored:
            scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor.float()
    experts = range(config.n_routed_experts)
    state = {"post_norm.weight": plain.pop("shared_head.norm.weight")}
    for part, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        each = [torch.cat([plain.pop(f"mlp.experts.{e}.{name}.weight") for name in names]) for e in experts]
        state[f"mtp_block.mlp.experts.{part}"] = torch.stack(each)
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        del plain[name]
    own = ("enorm", "hnorm", "eh_proj")
    state |= {k if k.startswith(own) else f"mtp_block.{k}": v for k, v in plain.items()}
    layer.load_state_dict(state)
    return layer


@torch.no_grad()
def target_states(model: PreTrainedModel, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of the last layer, which the engine hands out; what lm_head reads), both [n, hidden]."""
    kept: list[torch.Tensor] = []
    layer = model.model.layers[feature_layers_of("mtp", LAYERS)[0]]
    hook = layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output[0]))
    final = model.model(torch.tensor([tokens])).last_hidden_state[0]
    hook.remove()
    return kept[0], final


@torch.no_grad()
def chain(
    model: PreTrainedModel, reference: MtpLayer, final: torch.Tensor, next_tokens: list[int]
) -> tuple[list[int], list[float]]:
    """Drafted tokens and the product of their probabilities."""
    hidden, tokens, drafted, products, product = final, list(next_tokens), [], [], 1.0
    for _ in range(DEPTH):
        n = len(tokens)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        embedding = model.model.embed_tokens(torch.tensor([tokens]))
        turns = model.model.rotary_emb(embedding, position_ids=positions)
        out = reference(embedding, hidden[None], turns, mask, positions, None)[0]
        probability, token = model.lm_head(out[-1]).softmax(-1).max(-1)
        product *= probability.item()
        drafted.append(int(token))
        products.append(product)
        hidden, tokens = torch.cat([hidden, out[-1:]]), [*tokens, int(token)]
    return drafted, products


def sequence(model: PreTrainedModel, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """(features, what lm_head reads, next tokens) of a random text."""
    tokens = torch.randint(
        0, model.config.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return *target_states(model, tokens[:-1]), tokens[1:]


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 70]])
def test_the_chain_is_what_transformers_layer_computes(
    saved: tuple[Path, PreTrainedModel], drafter: MtpDrafter, reference: MtpLayer, cuts: list[int]
) -> None:
    model = saved[1]
    features, final, tokens = sequence(model, 75, 1)
    expected_tokens, expected = chain(model, reference, final, tokens)
    state = drafter.new_state()
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        drafter.extend([state], [features[start:stop]], [np.array(tokens[start:stop])])
        (tree,) = drafter.draft([state])
    assert tree.tokens.tolist() == expected_tokens
    assert tree.parents.tolist() == [-1, 0, 1] and tree.depths.tolist() == [1, 2, 3]
    np.testing.assert_allclose(tree.probabilities, expected, rtol=1e-3)
    drafter.release(state)
    assert drafter.check_idle() is None


def test_requests_drafted_together_get_what_they_get_alone(
    saved: tuple[Path, PreTrainedModel], drafter: MtpDrafter
) -> None:
    inputs = [sequence(saved[1], n, n) for n in (2, 6, 4)]
    alone = []
    for features, _, tokens in inputs:
        state = drafter.new_state()
        drafter.extend([state], [features], [np.array(tokens)])
        alone += drafter.draft([state])
        drafter.release(state)
    states = [drafter.new_state() for _ in inputs]
    drafter.extend(states, [features for features, _, _ in inputs], [np.array(tokens) for _, _, tokens in inputs])
    for a, b in zip(alone, drafter.draft(states), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.probabilities, b.probabilities, rtol=1e-5)
    for state in states:
        drafter.release(state)


def test_bytes_count_the_experts_that_were_hit_as_draft(
    saved: tuple[Path, PreTrainedModel], drafter: MtpDrafter
) -> None:
    directory, model = saved
    checkpoint = inspect(directory)
    kept = {k.removeprefix(PREFIX): v for k, v in checkpoint.tensors.items() if k.startswith(PREFIX)}
    per_expert = sum(v.bytes for k, v in kept.items() if k.startswith("mlp.experts.0."))
    head = kept["shared_head.head.weight"].bytes
    fixed = 0
    for name, info in kept.items():
        if not name.startswith(("mlp.experts.", "shared_head.head", "embed_tokens")):
            vector = len(info.shape) == 1 or name == "mlp.gate.weight"  # kept as float32
            fixed += int(np.prod(info.shape)) * 4 if vector else info.bytes
    features, _, tokens = sequence(model, 1, 3)
    state = drafter.new_state()
    drafter.extend([state], [features], [np.array(tokens)])
    drafter.draft([state])
    top_k = model.config.num_experts_per_tok
    assert drafter.bytes_read(DEPTH, True) == DEPTH * (fixed + head + top_k * per_expert)
    assert drafter.bytes_read(DEPTH, False) == DEPTH * head + (DEPTH - 1) * (fixed + top_k * per_expert)
    assert drafter.bytes_read(0, True) == fixed + top_k * per_expert and drafter.bytes_read(0, False) == 0
    features, _, tokens = sequence(model, 60, 4)
    drafter.extend([state], [features], [np.array(tokens)])
    assert drafter.bytes_read(0, True) == fixed + model.config.n_routed_experts * per_expert
    drafter.release(state)


def test_the_target_keeps_the_one_table_and_head(saved: tuple[Path, PreTrainedModel], drafter: MtpDrafter) -> None:
    model = saved[1]
    assert drafter.embed_tokens is model.model.embed_tokens and drafter.lm_head is model.lm_head
    assert not any(isinstance(module, nn.Embedding) for module in drafter.module.modules())
    assert kv_layout_of("mtp", LAYERS, inspect(saved[0])) == drafter.kv_pool.layout
    assert (drafter.kv_pool.layout.key_size, drafter.kv_pool.layout.value_size) == (12, 6)
    assert drafter.max_nodes == drafter.max_levels == DEPTH


def test_a_checkpoint_without_the_module_is_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny("deepseek_v3", tmp_path)

    def refused(message: str) -> None:
        with pytest.raises(SettingsError, match=message):
            load_drafter("mtp", facts(model), DEPTH, 1, kv_pages=1, checkpoint=inspect(tmp_path))

    rewrite(tmp_path, mlp__gate__weight=torch.ones(3, 160))
    refused(r"tensor model.layers.3.mlp.gate.weight in .*safetensors has shape \[3, 160\]")
    rewrite(tmp_path, mlp__gate__weight=None)
    refused("no tensor model.layers.3.mlp.gate.weight")
    rewrite(tmp_path, eh_proj__weight=torch.ones(160, 160))
    refused(r"model.layers.3.eh_proj.weight in .*safetensors is F32 \[160, 160\]; \[160, 320\] as BF16")
    rewrite(tmp_path, eh_proj__weight=None)
    refused("tensor model.layers.3.eh_proj.weight is missing .* holds no MTP module; use an EAGLE-3 head or 'ngram'")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "qwen3_moe", "quantization_config": None})
    )
    refused("is of model_type 'qwen3_moe'; MTP drafting is there for 'deepseek_v3'")
    with pytest.raises(SettingsError, match="part of a DeepSeek checkpoint, and this target has none"):
        load_drafter("mtp", facts(model), DEPTH, 1, kv_pages=1)
