"""MXFP4 and FP8: the meaning of the stored bytes against transformers' own, and the linear layer against plain torch."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.torch.quantised import (
    Fp8Linear,
    check_fp8,
    check_mxfp4,
    dequantise_fp8,
    dequantise_mxfp4,
    quantise_fp8,
    quantise_mxfp4,
)


def every_mxfp4_value() -> tuple[torch.Tensor, torch.Tensor]:
    """Every byte under every scale that is a number: blocks [1, 255, 16, 16] and scales [1, 255, 16]."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    return blocks.contiguous(), torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()


def fp8_bytes(*shape: int) -> torch.Tensor:
    """Random bytes without the two that are no numbers."""
    weight = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(weight & 0x7F == 0x7F, weight ^ 1, weight)


def test_mxfp4_means_what_transformers_makes_of_it() -> None:
    blocks, scales = every_mxfp4_value()
    ours = dequantise_mxfp4(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert ours.shape == (1, 255, 512)
    assert torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32))  # every bit, -0.0 too
    rounded = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    normal = slice(16, 250)
    assert torch.equal(ours[:, normal].bfloat16(), rounded[:, normal])


def test_mxfp4_values_by_hand() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[0, 15] = 0xA7, 0x1F
    values = dequantise_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))
    assert values[:2].tolist() == [12.0, -2.0] and values[30:].tolist() == [-12.0, 1.0] and not values[2:30].any()


def test_mxfp4_keeps_what_it_can_hold_and_rounds_the_rest_to_the_nearest() -> None:
    torch.manual_seed(0)
    blocks, scales = quantise_mxfp4(torch.randn(3, 5, 96) * torch.logspace(-6, 6, 15).view(3, 5, 1))
    assert blocks.shape == (3, 5, 3, 16) and scales.shape == (3, 5, 3)
    held = dequantise_mxfp4(blocks, scales)
    again = quantise_mxfp4(held)
    assert torch.equal(dequantise_mxfp4(*again), held)
    weight = torch.randn(64)
    blocks, scales = quantise_mxfp4(weight)
    grid = dequantise_mxfp4(
        torch.arange(16, dtype=torch.uint8).repeat_interleave(16).view(16, 16), scales[:1].expand(16)
    )
    best = (weight[:32, None] - grid.view(16, 32)[:, 0]).abs().amin(1)
    torch.testing.assert_close((dequantise_mxfp4(blocks, scales)[:32] - weight[:32]).abs(), best)
    assert not dequantise_mxfp4(*quantise_mxfp4(torch.zeros(32))).any()


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 256), (256, 384)])
def test_fp8_means_what_transformers_makes_of_it(outputs: int, inputs: int) -> None:
    torch.manual_seed(1)
    weight, scale = fp8_bytes(outputs, inputs), torch.rand(outputs // 128, inputs // 128) * 1e-3
    ours = dequantise_fp8(weight, scale)
    theirs = Fp8Dequantize(None)._dequantize_one(weight.view(torch.float8_e4m3fn), scale)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 33), (200, 300), (129, 128), (1, 1)])
def test_fp8_blocks_are_cut_where_a_size_is_no_multiple_of_128(outputs: int, inputs: int) -> None:
    torch.manual_seed(2)
    weight, scale = fp8_bytes(2, outputs, inputs), torch.rand(2, -(-outputs // 128), -(-inputs // 128))
    theirs = _dequantize_fp8_weight(weight.view(torch.float8_e4m3fn), scale, [128, 128], torch.float32)
    assert torch.equal(dequantise_fp8(weight, scale), theirs)
    values, scales = quantise_fp8(torch.randn(2, outputs, inputs))
    assert values.shape == (2, outputs, inputs) and scales.shape == scale.shape and values.dtype == torch.float8_e4m3fn
    held = dequantise_fp8(values, scales)
    torch.testing.assert_close(dequantise_fp8(*quantise_fp8(held)), held, rtol=1e-6, atol=0)
    assert not dequantise_fp8(*quantise_fp8(torch.zeros(outputs, inputs))).any()


def test_fp8_rounds_by_at_most_a_sixteenth() -> None:
    torch.manual_seed(3)
    weight = torch.randn(200, 300)
    held = dequantise_fp8(*quantise_fp8(weight))
    assert bool(((held - weight).abs() <= weight.abs() / 16 + 1e-5).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(130, 200), (33, 16), (1, 70), (96, 5), (256, 128)])
def test_fp8_linear_computes_with_the_dequantised_weights(outputs: int, inputs: int) -> None:
    torch.manual_seed(4)
    weight, scale = quantise_fp8(torch.randn(outputs, inputs))
    bias = torch.randn(outputs)
    layer, plain = Fp8Linear(weight, scale, bias), Fp8Linear(weight, scale)
    exact = dequantise_fp8(weight, scale).double()
    for rows in (1, 2, 3, 4, 5, 9, 600):
        x = torch.randn(rows, inputs)
        expected = x.double() @ exact.T
        torch.testing.assert_close(layer(x), (expected + bias).float(), atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(plain(x[None])[0], expected.float(), atol=1e-4, rtol=1e-5)
        alone = torch.cat([plain(row) for row in x[:9].split(1)])
        assert torch.equal(plain(x)[:9], alone)


def test_fp8_linear_reads_every_byte_exactly() -> None:
    """One-hot inputs fetch single weights: subnormal, negative and largest values under scales of every size."""
    weight = fp8_bytes(130, 256)
    weight[0] = torch.arange(256).to(torch.uint8)
    weight[0, [0x7F, 0xFF]] = 0
    scale = torch.tensor([[3e-20, 1.7], [0.1, 2e20]])
    fetched = Fp8Linear(weight, scale)(torch.eye(256)).T
    assert torch.equal(fetched, dequantise_fp8(weight, scale))


def test_what_is_no_number_is_refused() -> None:
    blocks, scales = torch.zeros(2, 3, 16, dtype=torch.uint8), torch.full((2, 3), 127, dtype=torch.uint8)
    check_mxfp4(blocks, scales)
    for byte, message in ((0xFF, "0xFF, which means not a number"), (0xFE, r"2\^127; at most 2\^113")):
        damaged = scales.clone()
        damaged[1, 2] = byte
        with pytest.raises(SettingsError, match=message):
            check_mxfp4(blocks, damaged)
    with pytest.raises(SettingsError, match=r"uint8 \[2, 3, 16\] and scales uint8 \[2, 2\]"):
        check_mxfp4(blocks, scales[:, :2])
    weight, scale = torch.zeros(129, 20, dtype=torch.uint8), torch.ones(2, 1)
    check_fp8(weight, scale)
    for number in (float("nan"), float("inf"), 2.0**119):
        with pytest.raises(SettingsError, match="FP8 scale is not a number"):
            check_fp8(weight, torch.tensor([[1.0], [number]]))
    for byte in (0x7F, 0xFF):
        damaged = weight.clone()
        damaged[128, 3] = byte
        with pytest.raises(SettingsError, match="FP8 weight is 0x7F or 0xFF"):
            Fp8Linear(damaged, scale)
    with pytest.raises(SettingsError, match=r"scales float32 \[1, 1\]"):
        check_fp8(weight, scale[:1])
    with pytest.raises(SettingsError, match=r"float32 \[129, 20\]"):
        check_fp8(weight.float(), scale)
