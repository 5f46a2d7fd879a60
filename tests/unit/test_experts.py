"""Routed experts: every store against a loop over tokens in float64 and against transformers' own modules."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.torch.experts import (
    Bfloat16Experts,
    ExpertStore,
    Float32Experts,
    Fp8Experts,
    Mxfp4Experts,
    experts_forward,
    store_of,
)
from ecospec_orchestrator.engine.torch.quantised import dequantise_mxfp4, quantise_fp8, quantise_mxfp4

EXPERTS, TOP_K = 8, 3


def float32_store(width: int, hidden: int, **options) -> ExpertStore:
    return Float32Experts(torch.randn(EXPERTS, 2 * width, hidden), torch.randn(EXPERTS, hidden, width), **options)


def bfloat16_store(width: int, hidden: int, **options) -> ExpertStore:
    gate_up, down = torch.randn(EXPERTS, 2 * width, hidden), torch.randn(EXPERTS, hidden, width)
    return Bfloat16Experts(gate_up.bfloat16(), down.bfloat16(), **options)


def mxfp4_store(width: int, hidden: int, **options) -> ExpertStore:
    gate_up = quantise_mxfp4(torch.randn(EXPERTS, 2 * width, hidden))
    return Mxfp4Experts(*gate_up, *quantise_mxfp4(torch.randn(EXPERTS, hidden, width)), **options)


def fp8_store(width: int, hidden: int, **options) -> ExpertStore:
    parts = [quantise_fp8(torch.randn(EXPERTS, width, hidden)) for _ in range(2)]
    gate_up, scales = (torch.cat(pair, 1) for pair in zip(*parts, strict=True))
    return Fp8Experts(gate_up, scales, *quantise_fp8(torch.randn(EXPERTS, hidden, width)), **options)


SHAPES = [
    pytest.param(float32_store, 40, 24, id="float32"),
    pytest.param(float32_store, 33, 70, id="float32-odd"),
    pytest.param(bfloat16_store, 40, 24, id="bfloat16"),
    pytest.param(bfloat16_store, 33, 70, id="bfloat16-odd"),
    pytest.param(mxfp4_store, 64, 96, id="mxfp4"),
    pytest.param(mxfp4_store, 32, 160, id="mxfp4-wide"),
    pytest.param(fp8_store, 128, 256, id="fp8"),
    pytest.param(fp8_store, 70, 33, id="fp8-odd"),
    pytest.param(fp8_store, 130, 300, id="fp8-cut-blocks"),
]
Make = Callable[..., ExpertStore]


def biases(width: int, hidden: int) -> dict[str, torch.Tensor]:
    return {"gate_up_bias": torch.randn(EXPERTS, 2 * width), "down_bias": torch.randn(EXPERTS, hidden)}


def activated(gate: str, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    if gate == "silu":
        return F.silu(g) * u
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return (u + 1) * g * torch.sigmoid(1.702 * g)


def by_token(store: ExpertStore, gate: str, x: torch.Tensor, index: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in index.unique().tolist():
        gate_up, down = (w.double() for w in store.dequantised(expert))
        gate_up_bias, down_bias = (0 if b is None else b[expert] for b in (store.gate_up_bias, store.down_bias))
        for row, slot in (index == expert).nonzero().tolist():
            y = down @ activated(gate, *(gate_up @ x[row].double() + gate_up_bias).chunk(2)) + down_bias
            out[row] += share[row, slot] * y
    return out


def routing(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]), torch.rand(rows, TOP_K)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest result."""
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("gate", ["silu", "gpt_oss"])
@pytest.mark.parametrize(("make", "width", "hidden"), SHAPES)
def test_a_store_equals_a_loop_over_tokens(make: Make, width: int, hidden: int, gate: str) -> None:
    torch.manual_seed(1)
    for options in ({}, biases(width, hidden)):
        store = make(width, hidden, gate=gate, **options)
        for rows in (1, 2, 20):
            x, (index, share) = torch.randn(rows, hidden), routing(rows)
            expected = by_token(store, gate, x, index, share)
            assert_close(store.forward(x, index, share), expected)
            assert_close(store._forward_by_expert(x, index, share), expected)  # what other devices run


@pytest.mark.parametrize(("make", "width", "hidden"), SHAPES)
def test_one_expert_or_all_of_them_hit(make: Make, width: int, hidden: int) -> None:
    torch.manual_seed(2)
    store = make(width, hidden)
    x, share = torch.randn(6, hidden), torch.rand(6, 1)
    for index in (torch.full((6, 1), EXPERTS - 1), torch.arange(6)[:, None]):
        assert_close(store.forward(x, index, share), by_token(store, "silu", x, index, share))
    index, share = torch.arange(EXPERTS).expand(2, -1).contiguous(), torch.rand(2, EXPERTS)
    assert_close(store.forward(x[:2], index, share), by_token(store, "silu", x[:2], index, share))


def test_the_gate_of_gpt_oss_clamps() -> None:
    torch.manual_seed(3)
    store = mxfp4_store(32, 64, gate="gpt_oss", **biases(32, 64))
    x, (index, share) = 20 * torch.randn(4, 64), routing(4)
    expected = by_token(store, "gpt_oss", x, index, share)
    assert_close(store.forward(x, index, share), expected)
    unclamped = Mxfp4Experts(
        *store.gate_up,
        *store.down,
        gate="gpt_oss",
        limit=1e9,
        gate_up_bias=store.gate_up_bias,
        down_bias=store.down_bias,
    )
    assert float((unclamped.forward(x, index, share) - expected).abs().max()) > float(expected.abs().max())


@pytest.mark.parametrize(("make", "width", "hidden"), SHAPES)
def test_a_tokens_experts_do_not_depend_on_its_companions(make: Make, width: int, hidden: int) -> None:
    torch.manual_seed(4)
    store = make(width, hidden)
    token, experts, share = torch.randn(1, hidden), torch.tensor([[6, 1, 3]]), torch.rand(1, 3)
    alone = store.forward(token, experts, share)
    for rows in (2, 3, 4, 5, 6, 9, 33, 600):
        same, others = experts.expand(rows, -1), torch.tensor([[0, 2, 7]]).expand(rows, -1)
        for place in {0, rows // 2, rows - 1}:
            for companions in (same, others, routing(rows)[0]):
                x, index, shares = torch.randn(rows, hidden), companions.clone(), torch.rand(rows, 3)
                x[place], index[place], shares[place] = token[0], experts[0], share[0]
                assert torch.equal(store.forward(x, index, shares)[place], alone[0])


def qwen3_module(dtype: torch.dtype) -> nn.Module:
    module = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=48, moe_intermediate_size=40))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype).requires_grad_(False)


def gpt_oss_module() -> nn.Module:
    module = GptOssExperts(GptOssConfig(num_local_experts=EXPERTS, hidden_size=64, intermediate_size=32))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=2.0)  # so that the clamps are active
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qwen3_experts_equal_transformers_own(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    module, x = qwen3_module(dtype), torch.randn(9, 48)
    index, share = routing(9)
    module.store = store_of(module)
    expected = module.float()(x, index, share)
    assert_close(experts_forward(module, x, index, share), expected)
    assert torch.equal(module.routed, index)


def test_gpt_oss_experts_equal_transformers_own() -> None:
    torch.manual_seed(6)
    module, x = gpt_oss_module(), torch.randn(9, 64)
    index, share = routing(9)
    assert_close(store_of(module).forward(x, index, share), module(x, index, share))


def test_mxfp4_gpt_oss_experts_equal_transformers_own_over_the_dequantised_weights() -> None:
    torch.manual_seed(7)
    module, x = gpt_oss_module(), torch.randn(9, 64)
    index, share = routing(9)
    gate_up, down = (
        quantise_mxfp4(p.mT) for p in (module.gate_up_proj, module.down_proj)
    )  # [E, 2 I, H/32, 16]: as in the files
    bias = {"gate_up_bias": module.gate_up_proj_bias.bfloat16(), "down_bias": module.down_proj_bias.bfloat16()}
    store = Mxfp4Experts(*gate_up, *down, gate="gpt_oss", interleaved=True, **bias)
    module.gate_up_proj.copy_(convert_moe_packed_tensors(*gate_up, dtype=torch.float32))
    module.down_proj.copy_(convert_moe_packed_tensors(*down, dtype=torch.float32))
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        getattr(module, name).copy_(getattr(module, name).bfloat16())
    assert_close(store.forward(x, index, share), module(x, index, share))
    for expert in range(EXPERTS):
        ours, down_ours = store.dequantised(expert)
        theirs = module.gate_up_proj[expert].T
        assert torch.equal(ours, torch.cat([theirs[::2], theirs[1::2]])) and torch.equal(
            down_ours, module.down_proj[expert].T
        )
    per_expert = 64 * 64 // 2 + 64 * 2 + 64 * 32 // 2 + 64 * 1 + (64 + 64) * 2
    assert store.bytes_per_expert == per_expert and store.experts == EXPERTS


def test_mxfp4_kernels_read_every_value_exactly() -> None:
    """One-hot inner vectors fetch single weights: every byte, half of them in each of two experts, under every scale in use."""
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 1, 8, 16).expand(-1, 256, -1, -1)
    scales = (torch.arange(256) % 240 + 1).to(torch.uint8).view(1, 256, 1).expand(2, -1, 8)
    # Gates of 64, which SiLU leaves as they are, and an identity of 1/64 behind them.
    gate_up = torch.cat([torch.full((256, 256), 64.0), torch.eye(256) / 64]).expand(2, -1, -1)
    store, one_hot = Mxfp4Experts(*quantise_mxfp4(gate_up), blocks, scales), torch.eye(256)
    for expert in range(2):
        expected = dequantise_mxfp4(blocks, scales)[expert].T
        index, share = torch.full((256, 1), expert), torch.ones(256, 1)
        assert torch.equal(store.forward(one_hot, index, share), expected)
        for start, rows in ((0, 1), (31, 2), (100, 3), (252, 4)):
            few = slice(start, start + rows)
            assert torch.equal(store.forward(one_hot[few], index[few], share[few]), expected[few])


@pytest.mark.parametrize(
    ("make", "per_weight"),
    [(float32_store, 4), (bfloat16_store, 2), (mxfp4_store, 17 / 32), (fp8_store, 1 + 4 / 128**2)],
)
def test_bytes_per_expert_are_as_stored(make: Make, per_weight: float) -> None:
    assert make(128, 256).bytes_per_expert == 3 * 128 * 256 * per_weight
    with_biases = make(128, 256, **biases(128, 256))
    assert with_biases.bytes_per_expert == 3 * 128 * 256 * per_weight + 4 * (2 * 128 + 256)


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    with pytest.raises(SettingsError, match="float32; Bfloat16Experts keeps torch.bfloat16"):
        Bfloat16Experts(gate_up, down)
    with pytest.raises(SettingsError, match="both or none"):
        Float32Experts(gate_up, down, down_bias=torch.zeros(2, 32))
    blocks, scales = quantise_mxfp4(gate_up)
    scales[1, 63, 0] = 0xFF
    with pytest.raises(SettingsError, match="0xFF"):
        Mxfp4Experts(blocks, scales, *quantise_mxfp4(down))
    weight, scale = quantise_fp8(gate_up)
    with pytest.raises(SettingsError, match="64 rows and 1 rows of scales"):
        Fp8Experts(weight, scale, *quantise_fp8(down))
    with pytest.raises(SettingsError, match="interleaved"):
        Fp8Experts(weight, scale, *quantise_fp8(down), interleaved=True)
    module = qwen3_module(torch.float32)
    module.act_fn = nn.GELU()
    with pytest.raises(SettingsError, match="GELU"):
        store_of(module)
    with pytest.raises(SettingsError, match="float16"):
        store_of(qwen3_module(torch.float16))
