"""What can be checked of the CUDA package without a GPU: selection and graph bookkeeping on CPU tensors, and, where triton is
installed, the kernels in its interpreter and the code that it generates for real GPUs.

The interpreter has to be chosen before triton is imported, so both run as `python test_cuda_kernels.py interpret|compile`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from triton_runs import run_with_triton, widen_bfloat16_products  # noqa: E402

from ecospec_orchestrator.core import SettingsError
from ecospec_orchestrator.engine.torch.cuda.experts_triton import BLOCK_K, BLOCK_ROWS, STAGES, WARPS, TritonExperts
from ecospec_orchestrator.engine.torch.cuda.graph import NO_EXPERT, StepGraphs, Tensors, only_real, padded_rows
from ecospec_orchestrator.engine.torch.cuda.install import triton_store, use_triton_experts
from ecospec_orchestrator.engine.torch.cuda.select_device import greedy_marginal, to_device
from ecospec_orchestrator.engine.torch.experts import Bfloat16Experts, Fp8Experts
from ecospec_orchestrator.engine.torch.quantised import quantise_fp8
from ecospec_orchestrator.selection import kernel
from ecospec_orchestrator.selection.pack import Pack


def random_pack(rng: np.random.Generator) -> Pack:
    """Up to four small trees. Probabilities are few and round, and experts dense or sparse, so that scores often tie."""
    sizes = rng.integers(0, 9, rng.integers(1, 5)) + 1
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows, words = int(offsets[-1]), int(rng.integers(1, 4))
    parents, values = np.full(rows, -1, np.int64), np.ones(rows)
    for start, stop in zip(offsets, offsets[1:], strict=False):
        for row in range(start + 1, stop):
            parents[row] = rng.integers(start, row)
            values[row] = values[parents[row]] * rng.choice([0.1, 0.25, 0.5, 1.0])
    if rng.random() < 0.2:  # what no drafter should send
        values = rng.choice([0.0, 0.5, np.nan, 1.0], rows)
    bits = rng.random((rows, 64 * words)) < rng.choice([0.02, 0.1, 0.5])
    experts = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    return Pack(experts, rng.random(rows) < rng.choice([0.5, 0.9, 1.0]), values, parents, offsets, 1)


@pytest.mark.parametrize("mode", [kernel.BUFFER_BATCH, kernel.BUFFER_REQUEST, kernel.BUFFER_NONE])
def test_device_selection_is_the_numpy_kernels_choice(mode: int) -> None:
    rng = np.random.default_rng(mode)
    sizes = set()
    for _ in range(350):
        pack = random_pack(rng)
        trees = len(pack.offsets) - 1
        options = (
            int(rng.integers(1, 6)),  # gamma
            float(rng.choice([0.1, 0.5, 1.0, 3.0])),  # eps
            int(rng.choice([0, 5, 30])),  # unknown_cost
            bool(rng.random() < 0.5),  # seed_root
            mode,
        )
        wanted = kernel.greedy_marginal(pack.experts, pack.known, pack.values, pack.parents, pack.offsets, *options)
        rows = len(wanted)
        chosen = greedy_marginal(to_device(pack, rows + int(rng.integers(0, 5)), "cpu"), trees, *options)
        np.testing.assert_array_equal(chosen[:rows].numpy(), wanted)
        assert not chosen[rows:].any()
        sizes.add(int(wanted.sum()))
    assert len(sizes) > 8


@pytest.mark.parametrize("mode", [kernel.BUFFER_BATCH, kernel.BUFFER_REQUEST, kernel.BUFFER_NONE])
def test_device_selection_never_asks_for_a_value(mode: int) -> None:
    """On the meta device there are no values: anything that waits for one raises."""
    pack = random_pack(np.random.default_rng(0))
    rows = len(pack.parents) + 3
    assert greedy_marginal(to_device(pack, rows, "meta"), len(pack.offsets) - 1, 4, 1.0, 8, True, mode).shape == (rows,)


def test_a_pack_that_is_too_small_is_refused() -> None:
    pack = random_pack(np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"have {len(pack.parents)} rows, .* holds 1"):
        to_device(pack, 1, "cpu")


class FakeCapture:
    """Replays by running the function again, into the outputs of the first run, as a graph would."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        self.captures += 1
        static = run()

        def replay() -> None:
            self.replays += 1
            for name, value in run().items():
                static[name].copy_(value)

        return replay, static


def sums(inputs: Tensors) -> Tensors:
    """A step that betrays its padding: every row's own sum, and how many real rows there are."""
    x, real = inputs["x"], inputs["real"]
    return {
        "sum": x.sum(1) * inputs["scale"],
        "rows": real.sum().repeat(len(x)),
        "padded": torch.full((len(x),), len(x)),
        "padding": x[~real].sum().repeat(len(x)),
    }


def test_graphs_pad_to_the_next_row_count_and_return_only_real_rows() -> None:
    backend = FakeCapture()
    graphs = StepGraphs(sums, {"x": 7.0, "scale": 1.0}, backend, (8, 2, 4, 2))
    torch.manual_seed(0)
    for rows, padded in ((3, 4), (1, 2), (4, 4), (7, 8), (2, 2), (3, 4)):
        x, scale = torch.randn(rows, 5), torch.randn(rows)
        got = graphs({"x": x, "scale": scale})
        torch.testing.assert_close(got["sum"], x.sum(1) * scale)
        assert got["rows"].tolist() == [rows] * rows
        assert got["padded"].tolist() == [padded] * rows
        torch.testing.assert_close(got["padding"], torch.full((rows,), 35.0 * (padded - rows)))
    assert (backend.captures, backend.replays) == (3, 6)


def test_results_of_a_graph_outlive_its_next_replay() -> None:
    graphs = StepGraphs(sums, {"x": 0.0, "scale": 1.0}, FakeCapture(), (2,))
    first = graphs({"x": torch.ones(2, 3), "scale": torch.ones(2)})
    graphs({"x": torch.zeros(2, 3), "scale": torch.ones(2)})
    assert first["sum"].tolist() == [3, 3]


def test_more_rows_than_any_graph_run_without_one() -> None:
    backend = FakeCapture()
    graphs = StepGraphs(sums, {"x": 0.0, "scale": 1.0}, backend, (1, 2))
    assert graphs({"x": torch.ones(5, 3), "scale": torch.ones(5)})["rows"].tolist() == [5] * 5
    assert backend.captures == 0


def test_another_shape_or_type_is_another_graph_and_warm_up_captures_all() -> None:
    backend = FakeCapture()
    graphs = StepGraphs(sums, {"x": 0.0, "scale": 1.0}, backend, (1, 2, 4))
    graphs.warm_up({"x": torch.ones(1, 3), "scale": torch.ones(1)})
    assert backend.captures == 3
    graphs({"x": torch.ones(3, 3), "scale": torch.ones(3)})
    assert backend.captures == 3
    graphs({"x": torch.ones(3, 6), "scale": torch.ones(3)})
    graphs({"x": torch.ones(3, 3, dtype=torch.float64), "scale": torch.ones(3)})
    assert backend.captures == 5


def test_inputs_that_do_not_fit_are_refused() -> None:
    graphs = StepGraphs(sums, {"x": 0.0, "scale": 1.0}, FakeCapture())
    with pytest.raises(ValueError, match=r"takes the inputs \['scale', 'x'\]; it was given \['x'\]"):
        graphs({"x": torch.ones(1, 3)})
    with pytest.raises(ValueError, match=r"have \{'x': 2, 'scale': 1\} rows"):
        graphs({"x": torch.ones(2, 3), "scale": torch.ones(1)})
    with pytest.raises(ValueError, match="rows; all need the same number, at least 1"):
        graphs({"x": torch.ones(0, 3), "scale": torch.ones(0)})
    with pytest.raises(ValueError, match=r"row_counts is \(0, 2\)"):
        StepGraphs(sums, {}, FakeCapture(), (0, 2))


def test_row_counts_and_padding_rows() -> None:
    assert [padded_rows(rows, (1, 2, 4)) for rows in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    index = torch.tensor([[3, 1], [0, 2]])
    assert only_real(index, torch.tensor([True, False])).tolist() == [[3, 1], [NO_EXPERT, NO_EXPERT]]


def random_weights(experts: int, hidden: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(experts, 2 * width, hidden) / hidden**0.5,
        torch.randn(experts, hidden, width) / width**0.5,
    )


def fp8_store(gate_up: torch.Tensor, down: torch.Tensor) -> Fp8Experts:
    halves, scales = quantise_fp8(gate_up.unflatten(1, (2, -1)))
    return Fp8Experts(halves.flatten(1, 2), scales.flatten(1, 2), *quantise_fp8(down))


def test_the_kernels_store_means_the_same_weights() -> None:
    torch.manual_seed(1)
    gate_up, down = random_weights(3, 160, 200)  # blocks of 128 that neither size fills
    for store in (Bfloat16Experts(gate_up.bfloat16(), down.bfloat16()), fp8_store(gate_up, down)):
        experts = triton_store(store)
        assert experts is not None
        assert (experts.experts, experts.bytes_per_expert) == (store.experts, store.bytes_per_expert)
        for got, wanted in zip(experts.dequantised(2), store.dequantised(2), strict=True):
            assert torch.equal(got, wanted)


def test_experts_that_the_kernel_cannot_compute_keep_their_store() -> None:
    gate_up, down = (t.bfloat16() for t in random_weights(2, 32, 32))
    assert triton_store(Bfloat16Experts(gate_up, down, gate="gpt_oss")) is None
    biases = {"gate_up_bias": torch.zeros(2, 64), "down_bias": torch.zeros(2, 32)}
    assert triton_store(Bfloat16Experts(gate_up, down, **biases)) is None

    class Module:
        store = Bfloat16Experts(gate_up, down)  # on the CPU

    assert use_triton_experts([Module()]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(2, 64, 32)}, "expert weights are torch.float32 and torch.bfloat16"),
        ({"gate_up": torch.zeros(2, 60, 32, dtype=torch.bfloat16)}, r"gate_up must be \(2, 64, 32\)"),
        ({"down_scale": torch.ones(2, 1, 1)}, "down_scale was given for torch.bfloat16 weights"),
        ({"gate_up": torch.zeros(2, 32, 64, dtype=torch.bfloat16).mT}, "strided"),
        (
            {
                "gate_up": torch.zeros(2, 64, 32).to(torch.float8_e4m3fn),
                "down": torch.zeros(2, 32, 32).to(torch.float8_e4m3fn),
                "gate_up_scale": torch.ones(2, 1, 1),
            },
            r"gate_up_scale is torch.float32 \(2, 1, 1\); float8_e4m3fn weights need torch.float32 \(2, 2, 1\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    weights = {
        "gate_up": torch.zeros(2, 64, 32, dtype=torch.bfloat16),
        "down": torch.zeros(2, 32, 32, dtype=torch.bfloat16),
    }
    TritonExperts(**weights)
    with pytest.raises(SettingsError, match=message):
        TritonExperts(**weights | change)


def test_kernels_in_the_interpreter_agree_with_float64(request: pytest.FixtureRequest) -> None:
    assert "12 cases agree" in run_with_triton(__file__, "interpret", request)


def test_kernels_compile_to_one_instruction_for_every_token_count(request: pytest.FixtureRequest) -> None:
    """A token's result may not depend on how many others chose its expert, so the widths may not differ in instruction."""
    products = set(re.findall(r"(?:mma|wgmma|tcgen05)\.[\w.:]*", run_with_triton(__file__, "compile", request)))
    assert products == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


CASES = (  # experts, hidden, width, tokens, top_k
    (8, 64, 48, 1, 2),
    (5, 160, 96, 4, 3),  # a width that is no whole number of tiles, in 128 x 128 blocks that are cut
    (3, 96, 136, 36, 1),  # all tile widths: some experts get over 16 tokens
    (3, 64, 64, 64, 3),  # one tile of 64
    (2, 32, 32, 70, 1),  # more rows than one tile
    (200, 32, 32, 3, 8),  # more experts than pairs
)


def interpret() -> None:
    widen_bfloat16_products()
    torch.manual_seed(0)
    for experts, hidden, width, tokens, top_k in CASES:
        weights = random_weights(experts, hidden, width)
        for store in (Bfloat16Experts(*(w.bfloat16() for w in weights)), fp8_store(*weights)):
            kernel_store = triton_store(store)
            assert kernel_store is not None
            x, shares = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
            index = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
            if tokens > 2:
                index[-2] = NO_EXPERT
            got = kernel_store.forward(x, index, shares)
            wanted = exact(kernel_store, x, index, shares)
            # Two truncated bfloat16 parts (a GPU rounds them) are off by 2^-15.
            assert (got - wanted).abs().max() < 6e-5 * wanted.abs().max(), (experts, hidden, width, tokens, top_k)
            assert tokens <= 2 or not got[-2].any()
            for row in (0, tokens - 1):  # numpy multiplies another width in another order: exact where there is one
                one = slice(row, row + 1)
                alone = kernel_store.forward(x[one], index[one], shares[one])
                assert torch.equal(alone[0], got[row]) or tokens > 16 and torch.allclose(alone[0], got[row], atol=1e-5)
    print(f"{2 * len(CASES)} cases agree")


def exact(store: TritonExperts, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """float64, one (token, slot) after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in np.ndindex(*index.shape):
        expert = int(index[token, slot])
        if expert != NO_EXPERT:
            gate_up, down = (w.double() for w in store.dequantised(expert))
            gate, up = (gate_up @ x[token].double()).chunk(2)
            out[token] += shares[token, slot].double() * (down @ (gate * torch.sigmoid(gate) * up))
    return out


def compile_for_gpus() -> None:
    """Generate code for Ampere (bfloat16 only) and Hopper in a shape like Qwen3-30B-A3B's; print the products."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ecospec_orchestrator.engine.torch.cuda import experts_kernels

    groups = dict.fromkeys(("hit_experts", "starts", "counts", "pairs"), "*i32")
    floats = dict.fromkeys(("hidden", "inner", "parts", "scales", "shares", "out"), "*fp32")
    sizes = {"HIDDEN": 2048, "WIDTH": 768, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_K": BLOCK_K, "TOP_K": 8, "EXPERTS": 128}
    sizes |= {"BINS": 256, "PAIRS": 512, "BLOCK": 512}
    for capability, weights in ((80, "*bf16"), (90, "*bf16"), (90, "*fp8e4nv")):
        types = {"index": "*i64", "pair_count": "i32", "weights": weights} | groups | floats
        for name in ("group_pairs", "gate_up", "down", "combine"):
            function = getattr(experts_kernels, name)
            names = function.arg_names
            for most in (16, 32, 64) if name in ("gate_up", "down") else (64,):
                values = sizes | {"MOST_TOKENS": most, "QUANTISED": weights != "*bf16"}
                source = ASTSource(
                    function,
                    {n: types.get(n, "constexpr") for n in names},
                    {(names.index(n),): value for n, value in values.items() if n in names},
                    {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types.get(n, "").startswith("*")},
                )
                options = {"num_warps": WARPS, "num_stages": STAGES}
                built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
                assert built.metadata.shared <= 96 * 1024, (
                    name,
                    most,
                    built.metadata.shared,
                )  # two programs on every GPU
                for product in set(re.findall(r"(?:mma|wgmma|tcgen05\.mma)[\w.:]*\.[\w.:]*", built.asm["ptx"])):
                    print(capability, name, most, product)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_gpus}[sys.argv[1]]()
