"""The experts kernel on the device against plain torch in float64, and what a row's result may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ecospec_orchestrator.engine.torch.cuda.experts_triton import TritonExperts
from ecospec_orchestrator.engine.torch.cuda.graph import NO_EXPERT, CudaCapture, StepGraphs, Tensors, only_real
from ecospec_orchestrator.engine.torch.cuda.install import triton_store
from ecospec_orchestrator.engine.torch.cuda.linear import bfloat16_linear
from ecospec_orchestrator.engine.torch.experts import Bfloat16Experts, Fp8Experts
from ecospec_orchestrator.engine.torch.quantised import quantise_fp8

DEVICE = torch.device("cuda")
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="FP8 needs compute capability 8.9")
FORMATS = ["bfloat16", pytest.param("fp8", marks=needs_fp8)]


def make_experts(kind: str, experts: int, hidden: int, width: int) -> TritonExperts:
    torch.manual_seed(0)
    gate_up = torch.randn(experts, 2 * width, hidden, device=DEVICE) / hidden**0.5
    down = torch.randn(experts, hidden, width, device=DEVICE) / width**0.5
    if kind == "bfloat16":
        store = triton_store(Bfloat16Experts(gate_up.bfloat16(), down.bfloat16()))
    else:
        halves, scales = quantise_fp8(gate_up.unflatten(1, (2, -1)))
        store = triton_store(Fp8Experts(halves.flatten(1, 2), scales.flatten(1, 2), *quantise_fp8(down)))
    assert store is not None
    return store


def make_rows(tokens: int, experts: int, hidden: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices
    return torch.randn(tokens, hidden, device=DEVICE), index, torch.rand(tokens, top_k, device=DEVICE)


def exact(store: TritonExperts, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for token, slot in np.ndindex(*index.shape):
        expert = int(index[token, slot])
        if expert != NO_EXPERT:
            gate_up, down = (w.double() for w in store.dequantised(expert))
            gate, up = (gate_up @ x[token].double()).chunk(2)
            out[token] += shares[token, slot].double() * (down @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("experts", "hidden", "width", "tokens", "top_k"),
    [
        (8, 64, 48, 1, 2),
        (8, 576, 768, 16, 4),
        (4, 320, 200, 33, 2),
        (32, 2048, 768, 64, 8),
        (3, 64, 64, 64, 3),
        (256, 512, 256, 8, 8),
    ],
)
def test_kernel_against_float64(kind: str, experts: int, hidden: int, width: int, tokens: int, top_k: int) -> None:
    store = make_experts(kind, experts, hidden, width)
    x, index, shares = make_rows(tokens, experts, hidden, top_k)
    if tokens > 2:
        index[1] = NO_EXPERT
    got, wanted = store.forward(x, index, shares), exact(store, x, index, shares)
    assert (got - wanted).abs().max() < 2e-5 * wanted.abs().max()
    assert tokens <= 2 or not got[1].any()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_does_not_depend_on_its_companions_in_any_bit(kind: str) -> None:
    store = make_experts(kind, 4, 512, 256)  # few experts: tiles of 16, 32 and 64 tokens all occur
    x, index, shares = make_rows(64, 4, 512, 2)
    whole = store.forward(x, index, shares)
    for begin, end in ((0, 1), (5, 6), (0, 16), (3, 35), (40, 64)):
        part = slice(begin, end)
        assert torch.equal(store.forward(x[part], index[part], shares[part]), whole[part])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_graph_of_a_mixture_layer_equals_the_eager_run(kind: str) -> None:
    """Router, experts and a linear layer, at row counts that need padding; padding rows are routed nowhere."""
    experts, hidden, top_k = 16, 256, 4
    store = make_experts(kind, experts, hidden, 128)
    router = torch.randn(experts, hidden, device=DEVICE)
    head = torch.randn(500, hidden, device=DEVICE).bfloat16()

    def step(inputs: Tensors) -> Tensors:
        x = inputs["x"]
        shares, index = (x @ router.t()).softmax(-1).topk(top_k)
        index = only_real(index, inputs["real"])
        return {"logits": bfloat16_linear(x + store.forward(x, index, shares), head), "experts": index}

    graphs = StepGraphs(step, {"x": 1.0}, CudaCapture(DEVICE))
    graphs.warm_up({"x": torch.randn(1, hidden, device=DEVICE)})
    for rows in (1, 3, 16, 37, 64, 3):
        x = torch.randn(rows, hidden, device=DEVICE)
        wanted = step({"x": x, "real": torch.ones(rows, dtype=torch.bool, device=DEVICE)})
        got = graphs({"x": x})
        assert torch.equal(got["experts"], wanted["experts"])
        torch.testing.assert_close(got["logits"], wanted["logits"], rtol=1e-4, atol=1e-3)


def test_linear_against_float64() -> None:
    x, weight = torch.randn(2, 5, 300, device=DEVICE), torch.randn(70, 300, device=DEVICE).bfloat16()
    bias = torch.randn(70, device=DEVICE)
    wanted = x.double() @ weight.double().t() + bias.double()
    assert (bfloat16_linear(x, weight, bias) - wanted).abs().max() < 1e-5 * wanted.abs().max()
