"""Public EAGLE-3 formats: what they mean against the published equations in plain torch, and what is refused, by name."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_heads as tiny  # noqa: E402
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.drafting.eagle3 import Eagle3Drafter
from ecospec_orchestrator.drafting.load import feature_layers_of, load_drafter
from ecospec_orchestrator.drafting.target import TargetFacts

DEPTH, TOP_K = 3, 2


def target(
    hidden: int = tiny.HIDDEN, vocabulary: int = tiny.VOCABULARY, layers: int = tiny.TARGET_LAYERS
) -> TargetFacts:
    torch.manual_seed(1)
    return TargetFacts(
        "tiny-target", hidden, vocabulary, layers, nn.Embedding(vocabulary, hidden).requires_grad_(False)
    )


def load(directory: Path, facts: TargetFacts | None = None) -> Eagle3Drafter:
    drafter = load_drafter(directory, facts or target(), DEPTH, TOP_K, kv_pages=4)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def frequencies(theta: float, llama3: dict[str, Any] | None) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, with a linear passage between."""
    plain = [theta ** (-2 * i / tiny.HEAD_DIM) for i in range(tiny.HEAD_DIM // 2)]
    if llama3 is None:
        return torch.tensor(plain)
    low, high, old = (llama3[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    scaled = []
    for f in plain:
        turns = old * f / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(share * f + (1 - share) * f / llama3["factor"])
    return torch.tensor(scaled)


def turned(x: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    """x: [heads, n, D], a complex number being (first half, second half)."""
    angle = torch.arange(x.shape[1])[:, None] * frequency
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def equations(
    stored: dict[str, torch.Tensor],
    config: dict[str, Any],
    embed: torch.Tensor,
    features: torch.Tensor,
    tokens: list[int],
    path: list[int],
) -> torch.Tensor:
    """Probabilities over the target's vocabulary after the fed tokens and a drafted path, one whole pass per drafted token."""
    w = {k.replace("layers.0.", "midlayer."): v.float() for k, v in stored.items()}
    layer = config.get("transformer_layer_config", config)
    frequency = frequencies(layer["rope_theta"], layer["rope_scaling"])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    hidden = linear("fc", rms(features, w["input_norm.weight"]) if config.get("norm_before_fc") else features)
    for at in range(len(path) + 1):
        token = embed[torch.tensor(tokens + path[:at])]
        normed = rms(hidden, w["midlayer.hidden_norm.weight"])
        x = torch.cat([rms(token, w["midlayer.input_layernorm.weight"]), normed], -1)
        q, k, v = (
            linear(f"midlayer.self_attn.{name}_proj", x).view(len(token), -1, tiny.HEAD_DIM).transpose(0, 1)
            for name in "qkv"
        )
        q, k = turned(q, frequency), turned(k, frequency)
        k, v = (t.repeat_interleave(tiny.HEADS // tiny.KV_HEADS, 0) for t in (k, v))
        score = (q @ k.transpose(1, 2) / math.sqrt(tiny.HEAD_DIM)).masked_fill(
            torch.ones(len(token), len(token)).triu(1).bool(), -math.inf
        )
        attended = (score.softmax(-1) @ v).transpose(0, 1).flatten(1)
        out = (normed if config.get("norm_before_residual") else hidden) + linear("midlayer.self_attn.o_proj", attended)
        x = rms(out, w["midlayer.post_attention_layernorm.weight"])
        out = out + linear(
            "midlayer.mlp.down_proj", F.silu(linear("midlayer.mlp.gate_proj", x)) * linear("midlayer.mlp.up_proj", x)
        )
        hidden = torch.cat([hidden, out[-1:]])
    drafted = linear("lm_head", rms(out[-1], w["norm.weight"])).softmax(-1)
    whole = torch.zeros(tiny.VOCABULARY)
    whole[torch.arange(tiny.DRAFT_VOCABULARY) + stored["d2t"]] = drafted
    return whole


def check_against_equations(
    drafter: Eagle3Drafter, stored: dict[str, torch.Tensor], config: dict[str, Any], embed: torch.Tensor, features: int
) -> None:
    torch.manual_seed(7)
    given, tokens = torch.randn(9, features), torch.randint(0, tiny.VOCABULARY, (9,)).tolist()
    state = drafter.new_state()
    drafter.extend([state], [given[:5]], [np.array(tokens[:5])])
    drafter.extend([state], [given[5:]], [np.array(tokens[5:])])
    (tree,) = drafter.draft([state])
    assert len(tree) == TOP_K + (DEPTH - 1) * TOP_K**2
    for node in range(len(tree)):
        path, at, expected = [], node, 1.0
        while at >= 0:
            path.insert(0, int(tree.tokens[at]))
            at = int(tree.parents[at])
        for depth, token in enumerate(path):
            probabilities = equations(stored, config, embed, given, tokens, path[:depth])
            assert token in probabilities.topk(TOP_K).indices
            expected *= probabilities[token].item()
        assert tree.probabilities[node] == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("changes", [{}, {"rope_theta": 500000.0, "rope_scaling": tiny.LLAMA3}])
def test_a_safeailab_head_follows_the_equations(tmp_path: Path, changes: dict[str, Any], pickled: bool) -> None:
    tiny.save_safeailab(tmp_path, pickled, **changes)
    stored = tiny.tensors("midlayer.")
    facts = target()
    check_against_equations(
        load(tmp_path, facts), stored, tiny.safeailab_config(**changes), facts.embed_tokens.weight, 72
    )


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_speculators_head_follows_the_equations(tmp_path: Path, norm_before_residual: bool) -> None:
    changes = {"norm_before_residual": norm_before_residual}
    tiny.save_speculators(tmp_path, **changes)
    facts, config = target(), tiny.speculators_config(**changes)
    check_against_equations(load(tmp_path, facts), tiny.tensors("layers.0."), config, facts.embed_tokens.weight, 72)


def test_rope_parameters_of_transformers_5_are_read(tmp_path: Path) -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": tiny.LLAMA3}
    new = {**tiny.LLAMA3, "rope_theta": 500000.0}
    layer = {k: v for k, v in tiny.LAYER.items() if k not in old}
    written = {**tiny.speculators_config(), "transformer_layer_config": {**layer, "rope_parameters": new}}
    tiny.save(tmp_path, written, tiny.tensors("layers.0."))
    facts = target()
    config = tiny.speculators_config(old)
    check_against_equations(load(tmp_path, facts), tiny.tensors("layers.0."), config, facts.embed_tokens.weight, 72)


def test_biases_and_a_norm_of_the_features_are_used(tmp_path: Path) -> None:
    stored = tiny.tensors("layers.0.")
    for name in ("fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
        stored[f"{name}.bias"] = torch.randn(len(stored[f"{name}.weight"])).bfloat16()
    stored["input_norm.weight"] = torch.rand(72).bfloat16()
    config = tiny.speculators_config(norm_before_fc=True)
    tiny.save(tmp_path, config, stored)
    facts = target()
    check_against_equations(load(tmp_path, facts), stored, config, facts.embed_tokens.weight, 72)


def test_a_head_of_another_width_brings_its_own_table(tmp_path: Path) -> None:
    stored = tiny.tensors("layers.0.", target_hidden=32, features=4)
    stored["embed_tokens.weight"] = torch.randn(tiny.VOCABULARY, tiny.HIDDEN).bfloat16()
    config = tiny.speculators_config(target_hidden_size=32, eagle_aux_hidden_state_layer_ids=[2, 4, 6, 9])
    tiny.save(tmp_path, config, stored)
    drafter = load(tmp_path, target(hidden=32))
    check_against_equations(drafter, stored, config, stored["embed_tokens.weight"].float(), 4 * 32)
    del stored["embed_tokens.weight"]
    tiny.save(tmp_path, config, stored)
    with pytest.raises(
        SettingsError, match="embed_tokens.weight is missing .* it cannot use the target's, which is 32 wide"
    ):
        load(tmp_path, target(hidden=32))


def test_a_copy_of_the_targets_table_is_not_kept_twice(tmp_path: Path) -> None:
    facts = target()
    facts.embed_tokens.weight.copy_(facts.embed_tokens.weight.bfloat16())
    stored = {**tiny.tensors("midlayer."), "embed_tokens.weight": facts.embed_tokens.weight.bfloat16()}
    tiny.save(tmp_path, tiny.safeailab_config(), stored)
    assert load(tmp_path, facts).embed_tokens is facts.embed_tokens
    stored["embed_tokens.weight"][7] += 1
    tiny.save(tmp_path, tiny.safeailab_config(), stored)
    own = load(tmp_path, facts).embed_tokens
    assert own is not facts.embed_tokens
    torch.testing.assert_close(own(torch.tensor([7])), stored["embed_tokens.weight"][7:8].float())


def test_a_head_for_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    stored = {k: v for k, v in tiny.tensors("midlayer.").items() if k not in ("d2t", "t2d")}
    stored["lm_head.weight"] = torch.randn(tiny.VOCABULARY, tiny.HIDDEN).bfloat16()
    tiny.save(tmp_path, tiny.safeailab_config(draft_vocab_size=tiny.VOCABULARY), stored)
    assert load(tmp_path).target_ids.tolist() == list(range(tiny.VOCABULARY))


def test_a_window_that_is_not_used_does_no_harm(tmp_path: Path) -> None:
    tiny.save_safeailab(tmp_path, use_sliding_window=False, sliding_window=64)
    assert load(tmp_path).max_levels == DEPTH


def test_draft_ids_map_to_the_targets_ids(tmp_path: Path) -> None:
    tiny.save_safeailab(tmp_path)
    stored = tiny.tensors("midlayer.")
    assert load(tmp_path).target_ids.tolist() == torch.nonzero(stored["t2d"]).flatten().tolist()


def safeailab_capture(layers: int) -> list[int]:
    """SafeAILab's target model keeps the hidden state as it enters layer 2, n // 2 and n - 3: after how many layers is that?"""
    return [ran for ran in range(layers) if ran in (2, layers // 2, layers - 3)]


@pytest.mark.parametrize("layers", [7, 12, 61, 94])
def test_feature_layers_are_the_outputs_before_the_published_inputs(tmp_path: Path, layers: int) -> None:
    tiny.save_safeailab(tmp_path / "safeailab")
    tiny.save_speculators(tmp_path / "speculators")
    expected = tuple(ran - 1 for ran in safeailab_capture(layers))  # output of layer i: i + 1 layers have run
    assert feature_layers_of(tmp_path / "safeailab", layers) == expected
    assert feature_layers_of(tmp_path / "speculators", layers) == expected
    if layers == 94:
        assert expected == (1, 46, 90)  # as SpecForge's own configuration for Qwen3-235B-A22B has it


def test_named_feature_layers_are_outputs_in_specforge_and_inputs_in_speculators(tmp_path: Path) -> None:
    tiny.save_safeailab(tmp_path / "s", eagle_config={"eagle_aux_hidden_state_layer_ids": [46, 1, 90]})
    tiny.save_speculators(tmp_path / "v", eagle_aux_hidden_state_layer_ids=[2, 47, 91])
    assert feature_layers_of(tmp_path / "s", 94) == feature_layers_of(tmp_path / "v", 94) == (1, 46, 90)
    tiny.save_speculators(tmp_path / "last", eagle_aux_hidden_state_layer_ids=[2, 47, 94])
    assert feature_layers_of(tmp_path / "last", 94) == (1, 46, 93)
    for wrong in ([0, 5], [3, 95], [4, 4]):
        tiny.save_speculators(tmp_path / "wrong", eagle_aux_hidden_state_layer_ids=wrong)
        with pytest.raises(SettingsError, match=r"eagle_aux_hidden_state_layer_ids \[.*\]; .* from 1 to 94"):
            feature_layers_of(tmp_path / "wrong", 94)
    with pytest.raises(SettingsError, match="names no feature layers, and a target of 4 layers is too small"):
        tiny.save_safeailab(tmp_path / "s")
        feature_layers_of(tmp_path / "s", 4)


def test_a_head_for_another_target_is_refused_by_name(tmp_path: Path) -> None:
    tiny.save_safeailab(tmp_path / "s")
    tiny.save_speculators(tmp_path / "v")
    with pytest.raises(SettingsError, match="has hidden_size 24, but the target tiny-target has 32"):
        load(tmp_path / "s", target(hidden=32))
    with pytest.raises(SettingsError, match="trained for someone/tiny-target, has hidden_size 24, but .* has 32"):
        load(tmp_path / "v", target(hidden=32))
    with pytest.raises(SettingsError, match="has vocab_size 50, but the target tiny-target has 60"):
        load(tmp_path / "s", target(vocabulary=60))
    with pytest.raises(SettingsError, match="has vocab_size 50, but the target tiny-target has 60"):
        load(tmp_path / "v", target(vocabulary=60))


@pytest.mark.parametrize("form", ["midlayer.", "layers.0."])
def test_missing_misshapen_and_unknown_tensors_are_named_with_their_file(tmp_path: Path, form: str) -> None:
    config = tiny.safeailab_config() if form == "midlayer." else tiny.speculators_config()
    stored = tiny.tensors(form)

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        tiny.save(tmp_path, config, changed)
        with pytest.raises(SettingsError, match=message):
            load(tmp_path)

    refused({k: v for k, v in stored.items() if k != "d2t"}, "tensor d2t is missing from the EAGLE-3 head in")
    refused(
        {k: v for k, v in stored.items() if "up_proj" not in k},
        r"tensor midlayer.mlp.up_proj.weight is missing from the EAGLE-3",
    )
    refused(
        {**stored, "fc.weight": stored["fc.weight"][:, :48].clone()},
        r"fc.weight in .*safetensors has shape \[24, 48\]; .*\[24, 72\]",
    )
    refused(
        {**stored, "t2d": stored["t2d"][:49].clone()}, r"tensor t2d in .*model.safetensors has shape \[49\]; .* \[50\]"
    )
    refused(
        {**stored, "fc_norm.0.weight": torch.ones(24)}, "tensor fc_norm.0.weight in .* is not part of an EAGLE-3 head"
    )
    refused(
        {**stored, "d2t": stored["d2t"] + 30},
        "tensor d2t in .* leads to target ids from .*; the target has ids from 0 to 49",
    )
    refused(
        {**stored, "norm.weight": torch.ones(24).to(torch.float8_e4m3fn)},
        "norm.weight in .* is torch.float8_e4m3fn; float32",
    )
    refused(
        {**stored, "embed_tokens.weight": torch.ones(49, 24)},
        r"embed_tokens.weight in .* has shape \[49, 24\]; .* \[50, 24\]",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has num_hidden_layers 2 in its config.json; 1 is supported"),
        ({"hidden_act": "gelu"}, "has hidden_act 'gelu' .* 'silu' is supported"),
        ({"fc_norm": True}, "has fc_norm True"),
        ({"sliding_window": 64}, "has sliding_window 64 .* None is supported"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic'; supported are default, linear, llama3",
        ),
        ({"num_attention_heads": None}, "has num_attention_heads None; an EAGLE-3 head needs a positive number there"),
        ({"speculators_model_type": "mlp"}, "has speculators_model_type 'mlp'; 'eagle3' is supported"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tiny.save_safeailab(tmp_path, **changes)
    with pytest.raises(SettingsError, match=message):
        load(tmp_path)


def test_a_speculators_head_must_say_where_its_residual_starts(tmp_path: Path) -> None:
    config = tiny.speculators_config()
    del config["norm_before_residual"]
    tiny.save(tmp_path, config, tiny.tensors("layers.0."))
    with pytest.raises(SettingsError, match="does not say norm_before_residual"):
        load(tmp_path)


def test_damaged_and_absent_files_are_named(tmp_path: Path) -> None:
    tiny.save_safeailab(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(SettingsError, match="model.safetensors is truncated"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(SettingsError, match="has neither model.safetensors nor"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(SettingsError, match="pytorch_model.bin cannot be read as tensors alone"):
        load(tmp_path)
    torch.save({"fc.weight": tmp_path}, tmp_path / "pytorch_model.bin")  # a pickle that would run a constructor
    with pytest.raises(SettingsError, match="pytorch_model.bin cannot be read as tensors alone"):
        load(tmp_path)


def test_the_demos_head_is_our_own_format(tmp_path: Path) -> None:
    config = {k: v for k, v in tiny.safeailab_config().items() if k != "num_hidden_layers"} | {
        "feature_layers": [2, 5, 9]
    }
    tiny.save(tmp_path, config, tiny.tensors("midlayer."))
    assert feature_layers_of(tmp_path, 12) == (2, 5, 9)
    facts = target()
    stored = load_file(tmp_path / "model.safetensors")
    check_against_equations(load(tmp_path, facts), stored, config, facts.embed_tokens.weight, 72)
