"""Tiny mixtures with distinct random experts: packed, tree-masked rows against transformers' own forward of every path."""

import copy
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen3MoeConfig

from ecospec_orchestrator.engine.base import StepBytes, VerifyItem
from ecospec_orchestrator.engine.torch import kernels
from ecospec_orchestrator.engine.torch.engine import TorchEngine, ancestors
from ecospec_orchestrator.engine.torch.modules import Bfloat16Linear
from ecospec_orchestrator.loading import in_own_thread
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
    engine = TorchEngine(copy.deepcopy(reference), geometry, StepBytes(1, 1, 1, 1, 1), (0, 1, 2), 256, kv_pages=32)
    reference.set_experts_implementation("eager")
    assert engine.fused_layers == 3, "the fast path is not the one under test"
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


def test_a_path_is_kept_in_a_cache_that_grew_in_the_forward() -> None:
    reference, engine = build("glm4_moe")
    context = np.random.default_rng(1).integers(3, 97, 300)  # more than a new cache holds
    sequence = engine.new_sequence()
    engine.prefill(sequence, context)
    tokens, parents = np.array([4, 5, 6]), np.array([-1, 0, 0])
    engine.verify([VerifyItem(sequence, tokens, parents)])
    engine.commit(sequence, np.array([0, 2]))
    (result,) = engine.verify([VerifyItem(sequence, np.array([7]), np.array([-1]))])
    logits, _ = reference_path(reference, [*context.tolist(), 4, 6, 7])
    np.testing.assert_allclose(result.logits[0], logits, atol=1e-4, rtol=0)


def test_commit_refuses_rows_that_were_not_verified() -> None:
    _, engine = build("glm4_moe")
    sequence = engine.new_sequence()
    engine.prefill(sequence, np.array([5, 6]))
    engine.verify([VerifyItem(sequence, np.array([4, 5]), np.array([-1, 0]))])
    with pytest.raises(ValueError, match="the last step holds 2 rows"):
        engine.commit(sequence, np.array([0, 2]))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 512, 513])
@pytest.mark.parametrize(("outputs", "inner"), [(70, 48), (33, 16), (1, 70), (96, 5)])
def test_bfloat16_linear_computes_in_float32(outputs: int, inner: int, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inner).bfloat16(), torch.randn(rows, inner)
    torch.testing.assert_close(Bfloat16Linear(weight)(x), x @ weight.float().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("inner", [5, 16, 24, 40, 48, 64, 70, 576])
def test_a_row_does_not_depend_on_the_other_rows_of_its_step(inner: int) -> None:
    torch.manual_seed(2)
    x = torch.randn(9, inner)
    for outputs in (1, 38, 96):
        layer = Bfloat16Linear(torch.randn(outputs, inner).bfloat16())
        alone = torch.cat([layer(row) for row in x.split(1)])
        for rows in range(1, 10):
            for start in range(10 - rows):
                assert torch.equal(layer(x[start : start + rows]), alone[start : start + rows])
        assert torch.equal(layer(x[:1].expand(64, -1)), alone[:1].expand(64, -1))


@pytest.mark.parametrize("layout", CONFIGS)
def test_no_bit_of_a_row_depends_on_the_other_rows_of_a_step(layout: str) -> None:
    """Prefill, plain decoding, a tree and a batch of trees give the same features, experts and logits."""
    _, engine = build(layout)
    rng = np.random.default_rng(8)
    context, path = rng.integers(3, 97, 70), rng.integers(3, 97, 4)
    whole, plain, tree, batch = (engine.new_sequence() for _ in range(4))
    prefilled = engine.prefill(whole, np.concatenate([context, path]))
    for sequence in (plain, tree, batch):
        assert torch.equal(engine.prefill(sequence, context), prefilled[:70])
    decoded = []
    for token in path:
        decoded += engine.verify([VerifyItem(plain, np.array([token]), np.array([-1]))])
        engine.commit(plain, np.array([0]))
    tokens, parents = np.array([path[0], 5, path[1], 9, path[2], path[3]]), np.array([-1, 0, 0, 1, 2, 4])
    others = [VerifyItem(engine.new_sequence(), *random_tree(rng, n)) for n in (0, 3, 6)]
    (in_tree,) = engine.verify([VerifyItem(tree, tokens, parents)])
    in_batch = engine.verify([*others, VerifyItem(batch, tokens, parents)])[-1]
    for step, row in enumerate((0, 2, 4, 5)):
        for found in (in_tree, in_batch):
            assert torch.equal(found.features[row], prefilled[70 + step])
            assert torch.equal(found.features[row], decoded[step].features[0])
            np.testing.assert_array_equal(found.logits[row], decoded[step].logits[0])
            np.testing.assert_array_equal(found.experts[row], decoded[step].experts[0])


def test_a_layer_that_is_not_the_one_we_know_runs_as_its_family_wrote_it() -> None:
    """The proof by random rows must notice a changed forward pass."""

    def changed() -> nn.Module:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"](), attn_implementation="eager").eval().float()
        attention = model.model.layers[1].self_attn
        original = attention.forward
        attention.forward = lambda *args, **kwargs: (2 * original(*args, **kwargs)[0], None)
        return model

    reference = changed()
    reference.set_experts_implementation("eager")
    geometry = TargetGeometry("other", "test", 97, 32, 3, 8, 2)
    engine = TorchEngine(changed(), geometry, StepBytes(1, 1, 1, 1, 1), (0, 1, 2), 256, kv_pages=32)
    assert engine.fused_layers == 2
    sequence, context = engine.new_sequence(), [5, 6, 7]
    engine.prefill(sequence, np.array(context))
    (result,) = engine.verify([VerifyItem(sequence, np.array([8]), np.array([-1]))])
    logits, _ = reference_path(reference, [*context, 8])
    np.testing.assert_allclose(result.logits[0], logits, atol=1e-4, rtol=0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them")
def test_computing_in_an_own_thread_leaves_no_workers_behind() -> None:
    """Left-over OpenMP workers doubled the time of every later step."""
    layer, x = Bfloat16Linear(torch.randn(4096, 64).bfloat16()), torch.randn(8, 64)
    threads = lambda: len(list(Path("/proc/self/task").iterdir()))
    layer(x)  # this thread's own workers
    before, seen = threads(), []

    def compute() -> None:
        kernels.set_threads(2)
        layer(x)
        seen.append(threads())

    in_own_thread(compute)
    deadline = time.monotonic() + 30
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before
    assert seen[0] >= before + kernels.numba.get_num_threads()  # it had workers
