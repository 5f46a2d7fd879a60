"""The oracle against the verification that follows, on a tiny mixture of experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from ecospec_orchestrator.core import DraftTree, SettingsError
from ecospec_orchestrator.engine.base import StepBytes
from ecospec_orchestrator.engine.torch.engine import TorchEngine
from ecospec_orchestrator.footprint.base import TreeContext
from ecospec_orchestrator.footprint.oracle import OracleFootprintSource, degrade
from ecospec_orchestrator.step import subtree, verify_item
from ecospec_proto.codec import pack_bitsets
from ecospec_proto.geometry import TargetGeometry

VOCABULARY, LAYERS, EXPERTS, TOP_K = 97, 3, 8, 2


def build(experts: int = EXPERTS, top_k: int = TOP_K) -> TorchEngine:
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)
    geometry = TargetGeometry("qwen3_moe", "test", VOCABULARY, 32, LAYERS, experts, top_k)
    return TorchEngine(model, geometry, StepBytes(1, 1, 1, 1, 1), (0, 1, 2), 256, kv_pages=32)


def batch(engine: TorchEngine, sizes: tuple[int, ...]) -> list[TreeContext]:
    """One prefilled sequence and random tree per size; the root is not in the cache yet, as in a step."""
    rng = np.random.default_rng(1)
    contexts = []
    for i, nodes in enumerate(sizes):
        tokens = rng.integers(3, VOCABULARY, 5 + 9 * i)
        sequence = engine.new_sequence()
        engine.prefill(sequence, tokens[:-1])
        parents = np.array([int(rng.integers(-1, node)) for node in range(nodes)], np.int32)
        drafts = rng.integers(3, VOCABULARY, nodes).astype(np.int32)
        zeros = np.zeros(nodes, np.float32)
        contexts.append(
            TreeContext(tokens.tolist(), DraftTree(drafts, parents, zeros, zeros.astype(np.int32)), sequence)
        )
    return contexts


def every_second(tree: DraftTree) -> np.ndarray:
    """The even nodes of which all ancestors are even too: an ancestor-closed part of the tree."""
    kept: list[int] = []
    for node in range(0, len(tree), 2):
        if tree.parents[node] in (-1, *kept):
            kept.append(node)
    return np.array(kept, np.int32)


def test_a_perfect_oracle_names_the_experts_of_the_real_verification_and_does_not_disturb_it() -> None:
    asked, alone = build(), build()
    source = OracleFootprintSource(asked)
    with_oracle, without = batch(asked, (7, 0, 12)), batch(alone, (7, 0, 12))
    for _ in range(3):
        footprints = source.begin(with_oracle)()
        assert [len(f.experts) for f in footprints] == [8, 1, 13]
        kept = [every_second(t.tree) for t in without]
        real, reference = (
            engine.verify(
                [
                    verify_item(t.sequence, t.context_tokens[-1], subtree(t.tree, k))
                    for t, k in zip(contexts, kept, strict=True)
                ]
            )
            for engine, contexts in ((asked, with_oracle), (alone, without))
        )
        for f, k, got, expected in zip(footprints, kept, real, reference, strict=True):
            rows = np.append(0, k + 1)
            assert f.known.all() and f.known.shape == (len(f.experts),)
            np.testing.assert_array_equal(f.experts[rows], pack_bitsets(got.experts, EXPERTS))
            np.testing.assert_array_equal(got.logits, expected.logits)
            np.testing.assert_array_equal(got.experts, expected.experts)
        for engine, contexts in ((asked, with_oracle), (alone, without)):
            for t in contexts:
                engine.commit(t.sequence, np.array([0]))
    source.close()


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.8, 1.0])
def test_the_accuracy_is_as_asked_and_replacements_are_uniform(accuracy: float) -> None:
    rng = np.random.default_rng(2)
    experts = np.argsort(rng.random((400, 6, 16)), axis=2)[:, :, :4].astype(np.uint8)
    got = degrade(experts, 16, accuracy, rng)
    assert got.dtype == np.uint8 and got.shape == experts.shape
    ordered = np.sort(got, axis=2)
    assert (ordered[:, :, 1:] != ordered[:, :, :-1]).all()  # as many distinct experts as before
    right = (got[..., :, None] == experts[..., None, :]).any(-1)
    assert right.mean() == pytest.approx(accuracy, abs=4 * np.sqrt(0.25 / right.size))
    wrong = np.bincount(got[~right], minlength=16) / max(1, (~right).sum())
    if accuracy < 1:
        np.testing.assert_allclose(wrong, 1 / 16, atol=0.02)


@pytest.mark.parametrize("accuracy", [0.8, 0.5])
def test_predictions_have_the_accuracy(accuracy: float) -> None:
    engine = build()
    contexts = batch(engine, (40, 40))
    truth = [f.experts for f in OracleFootprintSource(engine).begin(contexts)()]
    source, again = (OracleFootprintSource(engine, accuracy, seed=5) for _ in range(2))
    right = total = 0
    for _ in range(10):
        for f, g, actual in zip(source.begin(contexts)(), again.begin(contexts)(), truth, strict=True):
            np.testing.assert_array_equal(f.experts, g.experts)  # one seed, one sequence of mistakes
            right += int(np.bitwise_count(f.experts & actual).sum())
            total += int(np.bitwise_count(f.experts).sum())
    assert total == 10 * 82 * LAYERS * TOP_K
    assert right / total == pytest.approx(accuracy, abs=0.03)


def test_bad_values_are_refused() -> None:
    engine = build()
    for bad in (1.5, -0.1, float("nan"), "high", True):
        with pytest.raises(SettingsError, match="it must be a number from 0 to 1"):
            OracleFootprintSource(engine, bad)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="with 4 experts and top_k 3"):
        OracleFootprintSource(build(4, 3), 0.9)
    OracleFootprintSource(build(4, 3), 1)
    with pytest.raises(ValueError, match="without its engine sequence"):
        OracleFootprintSource(engine).begin([TreeContext([1], DraftTree.empty())])
    assert OracleFootprintSource(engine).begin([])() == []
