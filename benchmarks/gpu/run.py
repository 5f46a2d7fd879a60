"""What the CUDA package's pieces take on the device at hand: experts, graphs, selection, a predictor's size of network; and the
demo, served from it.

Prints Markdown tables and writes benchmarks/results/gpu.json; where there is no CUDA device it says so and does nothing.
Times are medians, in microseconds, of runs on the device between two events; the demo's are the host's, of whole calls.
Run: python benchmarks/gpu/run.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_engine import demo_table
from predictor_shape import Predictor, PredictorShape, tree_inputs

from ecospec_orchestrator.engine.torch.cuda.experts_triton import TritonExperts, has_triton
from ecospec_orchestrator.engine.torch.cuda.graph import ROW_COUNTS, CudaCapture, StepGraphs, Tensors, only_real
from ecospec_orchestrator.engine.torch.cuda.select_device import greedy_marginal, to_device
from ecospec_orchestrator.selection import kernel
from ecospec_orchestrator.selection.pack import Pack

RESULT = Path(__file__).parents[1] / "results" / "gpu.json"
EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768  # a MoE layer of Qwen3-30B-A3B
LAYERS = 6  # different weights one after the other: 7 GB of experts do not stay in any cache
NODES, TARGET_LAYERS, TARGET_EXPERTS, TARGET_TOP_K, GAMMA = 60, 94, 128, 8, 4  # Qwen3-235B-A22B, the paper's gamma
CONTEXT = 256  # tokens that the predictor looks back on
Row = dict[str, Any]


def device_us(call: Callable[[], object], repeats: int = 30) -> float:
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_us(call: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[1:])


def copy_gb_per_s(device: torch.device) -> float:
    """Bytes read and written by a plain copy of 4 GB, over its time."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_us(lambda: target.copy_(source)) / 1e3


def make_layers(fp8: bool, device: torch.device) -> list[TritonExperts]:
    def layer() -> TritonExperts:
        gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device=device, dtype=torch.bfloat16) * 0.02
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, device=device, dtype=torch.bfloat16) * 0.02
        if not fp8:
            return TritonExperts(gate_up, down)
        scales = (
            torch.full((EXPERTS, rows // 128, columns // 128), 0.02, device=device)
            for rows, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        return TritonExperts(*((w * 50).to(torch.float8_e4m3fn) for w in (gate_up, down)), *scales)

    return [layer() for _ in range(LAYERS)]


def routing(rows: int, distinct: int, device: torch.device) -> torch.Tensor:
    """int64 [rows, TOP_K]: random experts of exactly `distinct`, each hit at least once."""
    chosen = torch.randperm(EXPERTS)[:distinct]
    pairs = torch.arange(rows * TOP_K) % distinct  # a row's are different: TOP_K <= distinct
    return chosen[pairs].view(rows, TOP_K).to(device)


def run_layers(
    layers: Sequence[TritonExperts], x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    for layer in layers:
        x = x + layer.forward(x, index, shares)
    return x


def experts_tables(device: torch.device, copy: float, fp8: bool) -> tuple[list[Row], list[Row]]:
    """(time of the experts against how many distinct ones are hit, replay against eager by rows)."""
    layers, capture = make_layers(fp8, device), CudaCapture(device)
    name = "fp8" if fp8 else "bfloat16"
    by_distinct = []
    for rows, distinct in ((1, 8), (4, 16), (4, 32), (16, 32), (16, 64), (16, 128), (64, 64), (64, 128)):
        x, shares = torch.randn(rows, HIDDEN, device=device), torch.full((rows, TOP_K), 1 / TOP_K, device=device)
        arguments = layers, x, routing(rows, distinct, device), shares
        replay, _ = capture.capture(lambda arguments=arguments: {"x": run_layers(*arguments)})  # type: ignore[misc]
        us = device_us(replay) / LAYERS
        gb_per_s = distinct * layers[0].bytes_per_expert / us / 1e3
        by_distinct.append(
            {"weights": name, "rows": rows, "distinct_experts": distinct, "layer_us": us, "gb_per_s": gb_per_s}
            | {"share_of_copy": gb_per_s / copy}
        )
    router = torch.randn(EXPERTS, HIDDEN, device=device)

    def step(inputs: Tensors) -> Tensors:
        shares, index = (inputs["x"] @ router.t()).softmax(-1).topk(TOP_K)
        return {"x": run_layers(layers, inputs["x"], only_real(index, inputs["real"]), shares)}

    graphs, by_rows = StepGraphs(step, {"x": 0.0}, capture), []
    for rows in ROW_COUNTS:
        inputs = {"x": torch.randn(rows, HIDDEN, device=device)}
        real = {"real": torch.ones(rows, dtype=torch.bool, device=device)}
        eager, replayed = device_us(lambda: step(inputs | real)), device_us(lambda: graphs(inputs))  # noqa: B023
        by_rows.append({"weights": name, "rows": rows, "eager_us": eager, "graph_us": replayed})
    return by_distinct, by_rows


def random_pack(trees: int) -> Pack:
    """Trees of NODES in levels of ten, each node with TARGET_TOP_K random experts per layer: the worst case for sharing."""
    rng = np.random.default_rng(0)
    rows = trees * (NODES + 1)
    parents, values = np.full(rows, -1, np.int64), np.ones(rows)
    for row in range(rows):
        start, node = row - row % (NODES + 1), row % (NODES + 1) - 1
        if node >= 0:
            parents[row] = start if node < 10 else start + 1 + (node // 10 - 1) * 10 + rng.integers(10)
            values[row] = values[parents[row]] * rng.beta(1.0, 3.0)
    ids = rng.random((rows, TARGET_LAYERS, TARGET_EXPERTS), np.float32).argpartition(TARGET_TOP_K, -1)[
        ..., :TARGET_TOP_K
    ]
    used = np.zeros((rows, TARGET_LAYERS, TARGET_EXPERTS), bool)
    np.put_along_axis(used, ids, True, -1)
    experts = np.packbits(used.reshape(rows, -1), axis=1, bitorder="little").view(np.uint64)
    offsets = np.arange(0, rows + 1, NODES + 1)
    return Pack(experts, np.ones(rows, bool), values, parents, offsets, TARGET_LAYERS)


def selection_table(device: torch.device) -> list[Row]:
    table = []
    for trees in (1, 4, 16):
        pack = random_pack(trees)
        options = (GAMMA, 1.0, TARGET_LAYERS * TARGET_TOP_K, True, kernel.BUFFER_BATCH)
        arrays = (pack.experts, pack.known, pack.values, pack.parents, pack.offsets)
        static = to_device(pack, len(pack.parents), device)
        choose = lambda static=static, trees=trees, options=options: {
            "chosen": greedy_marginal(static, trees, *options)
        }
        replay, outputs = CudaCapture(device).capture(choose)
        replay()
        wanted = kernel.greedy_marginal(*arrays, *options)
        table.append(
            {
                "trees": trees,
                "host_us": host_us(lambda arrays=arrays, options=options: kernel.greedy_marginal(*arrays, *options)),
                "eager_us": device_us(choose, 10),
                "graph_us": device_us(replay),
                "same_choice": bool(np.array_equal(outputs["chosen"].cpu().numpy(), wanted)),
            }
        )
    return table


def predictor_table(device: torch.device) -> list[Row]:
    shape, dtype = PredictorShape(), torch.bfloat16
    predictor = Predictor(shape, CONTEXT, device, dtype)
    inputs = tree_inputs(shape, torch.from_numpy(random_pack(1).parents), CONTEXT, device, dtype)
    forward = lambda: {"logits": predictor(*inputs)}
    replay, _ = CudaCapture(device).capture(forward)
    graph_us = device_us(replay)
    return [
        {
            "parameters_millions": shape.parameters / 1e6,
            "rows": NODES + 1,
            "context": CONTEXT,
            "eager_us": device_us(forward),
            "graph_us": graph_us,
            "weights_gb_per_s": 2 * shape.parameters / graph_us / 1e3,
        }
    ]


def markdown(title: str, table: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows that share their keys."""
    names = list(table[0])
    lines = [f"### {title}", "", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(_shown(row[name]) for name in names)} |" for row in table]
    return "\n".join([*lines, ""])


def _shown(value: object) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULT, help="where the JSON goes (%(default)s)")
    output = parser.parse_args().output
    if not torch.cuda.is_available():
        print("GPU benchmarks did not run: no CUDA device here.")
        return
    device = torch.device("cuda")
    with torch.inference_mode():
        tables = measure(device)
    tables["The demo as served: greedy text of 64 tokens, and a tree of 11 rows each"] = demo_table(("cpu", "cuda"))
    for title, table in tables.items():
        print(markdown(title, table))
    about = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
    output.write_text(json.dumps(about | tables, indent=2) + "\n", encoding="utf-8")


def measure(device: torch.device) -> dict[str, list[Row]]:
    copy = copy_gb_per_s(device)
    tables: dict[str, list[Row]] = {"Plain copy": [{"gb_per_s": copy}]}
    distinct, replayed = [], []
    if has_triton():
        for fp8 in (False, True) if torch.cuda.get_device_capability(device) >= (8, 9) else (False,):
            by_distinct, by_rows = experts_tables(device, copy, fp8)
            distinct += by_distinct
            replayed += by_rows
        tables |= {
            "Experts, one layer, by distinct experts": distinct,
            f"{LAYERS} layers, graph against eager": replayed,
        }
    tables[f"Selection, {NODES}-node trees, gamma {GAMMA}"] = selection_table(device)
    tables["0.6B-shaped predictor, one tree"] = predictor_table(device)
    return tables


if __name__ == "__main__":
    main()
