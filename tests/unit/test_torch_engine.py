"""Tiny mixtures with distinct random experts: packed, tree-masked rows against transformers' own forward of every path."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

from ecospec_orchestrator.engine.base import StepBytes, VerifyItem
from ecospec_orchestrator.engine.torch.engine import TorchEngine, ancestors
from ecospec_orchestrator.engine.torch.modules import Bfloat16Linear, experts_forward
from ecospec_proto.geometry import TargetGeometry

COMMON = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "glm4_moe": lambda: Glm4MoeConfig(
        **COMMON,
        intermediate_size=48,
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=0,
    ),
    "mixtral": lambda: MixtralConfig(
        **COMMON, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
}


def build(layout: str) -> tuple[nn.Module, TorchEngine]:
    """(transformers' own model, our engine over a copy of it)."""
    torch.manual_seed(7)
    reference = AutoModelForCausalLM.from_config(CONFIGS[layout](), attn_implementation="eager").eval().float()
    for name, parameter in reference.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)
        elif "norm" not in name:
            nn.init.normal_(parameter, std=0.1)
    geometry = TargetGeometry(layout, "test", 97, 32, 3, 8, 2)
    engine = TorchEngine(copy.deepcopy(reference), geometry, StepBytes(1, 1, 1, 1, 1), (0, 1, 2), 256)
    reference.set_experts_implementation("eager")
    return reference, engine


def reference_path(model: nn.Module, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Last-position logits and experts [layers, k] of a plain causal forward over the whole path."""
    routed: list[torch.Tensor] = []
    handles = [
        m.register_forward_pre_hook(lambda _m, args: routed.append(args[1][-1]))
        for m in model.modules()
        if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3
    ]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    for handle in handles:
        handle.remove()
    return logits.numpy(), torch.stack(routed).numpy()


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes + 1)])
    return rng.integers(3, 97, nodes + 1), parents


def path_to(row: int, tokens: np.ndarray, parents: np.ndarray) -> list[int]:
    path: list[int] = []
    while row != -1:
        path.append(int(tokens[row]))
        row = int(parents[row])
    return path[::-1]


@pytest.mark.parametrize("layout", CONFIGS)
def test_packed_trees_equal_a_plain_forward_of_every_path(layout: str) -> None:
    reference, engine = build(layout)
    rng = np.random.default_rng(0)
    sequences, contexts = [], []
    for length in (1, 9, 30):
        context = rng.integers(3, 97, length)
        sequence = engine.new_sequence()
        engine.prefill(sequence, context)
        sequences.append(sequence)
        contexts.append(context.tolist())
    for _ in range(3):
        trees = [random_tree(rng, n) for n in (0, 4, 9)]
        results = engine.verify([VerifyItem(s, t, p) for s, (t, p) in zip(sequences, trees, strict=True)])
        for i, (result, (tokens, parents)) in enumerate(zip(results, trees, strict=True)):
            for row in range(len(tokens)):
                logits, experts = reference_path(reference, contexts[i] + path_to(row, tokens, parents))
                np.testing.assert_allclose(result.logits[row], logits, atol=1e-4, rtol=0)
                assert [set(e) for e in result.experts[row].tolist()] == [set(e) for e in experts.tolist()]
            # Keep a random path: the next round fails if a dropped row stayed or a kept one moved wrongly.
            visible, _ = ancestors(parents)
            kept = np.flatnonzero(visible[rng.integers(0, len(tokens))])
            engine.commit(sequences[i], kept)
            contexts[i] += tokens[kept].tolist()


def test_commit_refuses_rows_that_were_not_verified() -> None:
    _, engine = build("glm4_moe")
    sequence = engine.new_sequence()
    engine.prefill(sequence, np.array([5, 6]))
    engine.verify([VerifyItem(sequence, np.array([4, 5]), np.array([-1, 0]))])
    with pytest.raises(ValueError, match="the last step holds 2 rows"):
        engine.commit(sequence, np.array([0, 2]))


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_bfloat16_linear_computes_in_float32(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, 48).bfloat16(), torch.randn(rows, 48)
    torch.testing.assert_close(Bfloat16Linear(weight)(x), x @ weight.float().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 6, 64, 65])
def test_expert_kernel_equals_a_loop_over_tokens(rows: int) -> None:
    torch.manual_seed(1)
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.randn(8, 2 * 40, 24).bfloat16(), requires_grad=False)
    module.down_proj = nn.Parameter(torch.randn(8, 24, 40).bfloat16(), requires_grad=False)
    module.intermediate_dim, module.act_fn = 40, nn.SiLU()
    x, index = torch.randn(rows, 24), torch.stack([torch.randperm(8)[:3] for _ in range(rows)])
    share = torch.rand(rows, 3)
    expected = torch.zeros(rows, 24)
    for row in range(rows):
        for slot in range(3):
            gate, up = (module.gate_up_proj[index[row, slot]].float() @ x[row]).chunk(2)
            expected[row] += share[row, slot] * (
                module.down_proj[index[row, slot]].float() @ (nn.functional.silu(gate) * up)
            )
    torch.testing.assert_close(experts_forward(module, x, index, share), expected, atol=2e-3, rtol=1e-4)
    assert torch.equal(module.routed, index)


def test_a_row_does_not_depend_on_the_other_rows_of_its_step() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(7, 64)
    layer = Bfloat16Linear(weight)
    assert torch.equal(layer(x)[3], layer(x[3:4])[0])
