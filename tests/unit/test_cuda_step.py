"""The forward that CUDA graphs record, without a GPU: it asks for no value of any tensor, and, where triton is installed, its
kernels in the interpreter give the CPU engine's results."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_checkpoints import CONFIGS  # noqa: E402
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen3MoeConfig
from triton_runs import run_with_triton, widen_bfloat16_products  # noqa: E402

from ecospec_orchestrator.engine.base import StepBytes, VerifyItem
from ecospec_orchestrator.engine.torch import modules
from ecospec_orchestrator.engine.torch.cache import KvPool
from ecospec_orchestrator.engine.torch.cuda import step as cuda_step
from ecospec_orchestrator.engine.torch.cuda.attention_triton import (
    OWN_WIDTH,
    PADDINGS,
    RowPlan,
    row_tensors,
    write_and_attend,
)
from ecospec_orchestrator.engine.torch.cuda.install import triton_store
from ecospec_orchestrator.engine.torch.cuda.step import DeviceStep
from ecospec_orchestrator.engine.torch.engine import TorchEngine, ancestors
from ecospec_orchestrator.engine.torch.experts import store_of
from ecospec_orchestrator.engine.torch.families import FAMILIES
from ecospec_orchestrator.engine.torch.geometry import KvLayout
from ecospec_orchestrator.engine.torch.modules import attend_dense, seen_slots
from ecospec_orchestrator.engine.torch.step_plan import Segment, StepPlan
from ecospec_proto.geometry import TargetGeometry

TREE = np.array([-1, 0, 0, 1, 1, 2])


class EagerCapture:
    """Replays by running again, into the first run's outputs."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, run):  # type: ignore[no-untyped-def]
        self.captures += 1
        static = run()
        return lambda: [static[name].copy_(value) for name, value in run().items()], static


def experts_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if getattr(getattr(m, "gate_up_proj", None), "ndim", 0) == 3]


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_no_family_asks_for_a_value_in_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device there are no values: what would wait for a GPU, and break a capture, raises."""

    class NoExperts:
        def forward(self, hidden: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            assert (hidden.dtype, index.dtype, weight.dtype) == (torch.float32, torch.int64, torch.float32)
            return torch.empty_like(hidden)

    def attended(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], value.shape[2])

    monkeypatch.setattr(cuda_step, "write_and_attend", attended)
    config = {k: v for k, v in CONFIGS[family].items() if k not in ("torch_dtype", "quantization_config")}
    modules.register()
    with torch.device("meta"):
        built = CONFIG_MAPPING[family].from_dict(config)
        model = getattr(transformers, FAMILIES[family].model_class)(built).float().eval()
        cache = torch.empty(built.num_hidden_layers, 1, 1, 1, 1)
        rows = {name: torch.empty(8, dtype=torch.int64) for name in ("tokens", "positions", *PADDINGS)}
        rows |= {"pages": torch.empty(8, 4, dtype=torch.int64), "own": torch.empty(8, OWN_WIDTH, dtype=torch.int64)}
        rows["real"] = torch.empty(8, dtype=torch.bool)
    model.set_experts_implementation(modules.NAME)
    experts = experts_modules(model)
    for module in experts:
        module.store = NoExperts()
    pool = type("Pool", (), {"keys": cache, "values": cache})()
    step = DeviceStep(model, pool, experts, list, None)
    step.warm_up()  # there is nothing to record
    with torch.inference_mode():
        results = step._with_logits(rows)
    assert results["logits"].shape == (8, built.vocab_size)
    assert results["experts"].shape == (8, len(experts), built.num_experts_per_tok)


def test_the_graphs_of_every_row_count_are_recorded_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_step, "write_and_attend", lambda query, _key, value, *_: query.new_empty(value.shape))
    modules.register()
    pool, backend, sizes = KvPool(KvLayout(1, 1, 4, 4), 2, "meta"), EagerCapture(), []

    def forward(**inputs: Any) -> Any:
        sizes.append(inputs["input_ids"].shape[1])
        assert inputs["step_plan"].rows.pages.shape == (sizes[-1], 1)
        return SimpleNamespace(last_hidden_state=torch.empty(1, sizes[-1], 4, device="meta"))

    module = SimpleNamespace(store=None, routed=torch.empty(1, 2, dtype=torch.int64, device="meta"))
    model = SimpleNamespace(model=forward, lm_head=lambda hidden: hidden, set_attn_implementation=lambda _name: None)
    step = DeviceStep(model, pool, [module], list, backend, (1, 2, 8))
    step.warm_up()
    assert backend.captures == 3 and set(sizes) == {1, 2, 8}
    assert pool.check_idle() is None and step.computed_by == "CUDA graphs"


def test_attention_and_a_whole_step_in_the_interpreter(request: pytest.FixtureRequest) -> None:
    printed = run_with_triton(__file__, "interpret", request)
    assert "attention agrees" in printed
    assert "step agrees" in printed


def filled_segments(pool: KvPool, layout: KvLayout) -> list[Segment]:
    """An empty sequence's prefill, trees behind 3 and 130 positions, a single row at the end of a page."""
    segments, start = [], 0
    for length, parents in ((0, None), (3, [-1, 0, 0, 1]), (130, [-1, 0, 1, 1, 2]), (63, [-1])):
        rows = 9 if parents is None else len(parents)
        sequence = pool.new_sequence()
        sequence.reserve(length + rows)
        page, offset = sequence.slots(0, length)
        pool.keys[0][page, :, offset] = torch.randn(length, layout.kv_heads, layout.key_size)
        pool.values[0][page, :, offset] = torch.randn(length, layout.kv_heads, layout.value_size)
        sequence.length = length
        visible = None if parents is None else torch.from_numpy(ancestors(np.array(parents))[0])
        segments.append(Segment(sequence, start, start + rows, visible))
        start += rows
    return segments


def check_attention() -> None:
    for heads, kv_heads, key_size, value_size, window, sinks in (
        (4, 2, 8, 8, None, False),
        (6, 3, 24, 16, None, True),
        (8, 1, 16, 16, 5, True),
        (4, 4, 12, 6, 70, False),
    ):
        layout = KvLayout(1, kv_heads, key_size, value_size)
        pool = KvPool(layout, 12)
        segments = filled_segments(pool, layout)
        rows, padding = segments[-1].stop, 2
        query, key, value = (
            torch.randn(rows + padding, *s) for s in ((heads, key_size), (kv_heads, key_size), (kv_heads, value_size))
        )
        logits = torch.randn(heads) if sinks else None
        plan = {
            name: torch.cat([t, torch.full((padding, *t.shape[1:]), PADDINGS[name])])
            for name, t in row_tensors(StepPlan(segments), "cpu").items()
        }
        scaling = key_size**-0.5
        got = write_and_attend(
            query, key, value, pool.keys[0], pool.values[0], RowPlan(**plan), scaling, window, logits
        )
        assert not got[rows:].any()
        for s in segments:
            part, end = slice(s.start, s.stop), s.begin + s.stop - s.start
            page, offset = s.cache.slots(s.begin, end)
            assert torch.equal(pool.keys[0][page, :, offset], key[part])
            cache = s.cache.gather(0, end)
            wanted = attend_dense(query[part].transpose(0, 1), *cache, seen_slots(s, window), scaling, logits)
            torch.testing.assert_close(got[part], wanted, rtol=1e-5, atol=1e-5)
    print("attention agrees")


def tiny_model() -> nn.Module:
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        if "experts." in name:
            parameter.data = parameter.data.bfloat16()
    return model  # type: ignore[no-any-return]


@torch.inference_mode()
def check_step() -> None:
    """Two prompts, one over a page long, then two trees with a branch kept, through the graphs' bookkeeping."""
    model, backend = tiny_model(), EagerCapture()
    geometry = TargetGeometry("tiny", "test", 97, 32, 2, 8, 2)
    engine = TorchEngine(copy.deepcopy(model), geometry, StepBytes(1, 1, 1, 1, 1), (0, 1), 512, kv_pages=16)
    kept: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output[0]))
    model.set_experts_implementation(modules.NAME)
    experts = experts_modules(model)
    for module in experts:
        module.store = triton_store(store_of(module))

    def features() -> list[torch.Tensor]:
        taken = list(kept)
        kept.clear()
        return taken

    pool = KvPool(engine.kv_pool.layout, 16)
    step = DeviceStep(model, pool, experts, features, backend, (8, 16))
    rng = np.random.default_rng(0)
    theirs, ours = ([cache.new_sequence() for _ in range(2)] for cache in (engine, pool))
    for their, our, length in zip(theirs, ours, (5, 70), strict=True):
        tokens = rng.integers(3, 97, length)
        wanted, routed = engine.prefill_with_experts(their, tokens)
        our.reserve(length)
        got = step(tokens, np.arange(length), [Segment(our, 0, length, None)], head=False)
        our.length = length
        assert_near(got["features"], wanted)
        # Where TorchEngine._routed() finds them after a step without a head.
        np.testing.assert_array_equal(torch.stack([module.routed for module in experts], 1).numpy(), routed)
    visible, depth = ancestors(TREE)
    size = len(TREE)
    for _ in range(2):
        trees = [rng.integers(3, 97, size) for _ in ours]
        verified = engine.verify([VerifyItem(s, tokens, TREE) for s, tokens in zip(theirs, trees, strict=True)])
        for our in ours:
            our.reserve(our.length + size)
        segments = [Segment(our, size * i, size * i + size, torch.from_numpy(visible)) for i, our in enumerate(ours)]
        positions = np.concatenate([our.length + depth for our in ours])
        got = step(np.concatenate(trees), positions, segments, head=True)
        for segment, wanted in zip(segments, verified, strict=True):
            part = slice(segment.start, segment.stop)
            np.testing.assert_array_equal(got["experts"][part].numpy(), wanted.experts)
            assert_near(got["logits"][part], torch.from_numpy(wanted.logits))
            assert_near(got["features"][part], wanted.features)
        for their, our in zip(theirs, ours, strict=True):
            engine.commit(their, np.array([0, 2, 5]))
            our.pending = size
            our.commit(np.array([0, 2, 5]))
    assert backend.captures == 1
    assert all(module.store is not None and hasattr(module.store, "gate_up") for module in experts)
    print("step agrees")


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter truncates what a GPU rounds: 2^-15 per product."""
    assert (got - wanted).abs().max() < 2e-4 * wanted.abs().max()


if __name__ == "__main__":
    widen_bfloat16_products()
    torch.manual_seed(0)
    check_attention()
    check_step()
