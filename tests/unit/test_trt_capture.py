"""Counting experts by step on the device, and the file that takes the counts to another process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from step_writer import keep_writing
from torch._subclasses.fake_tensor import FakeTensorMode
from trt_engine import model_config, stand_in_engine

from ecospec_orchestrator.engine.tensorrt_llm.plugin.capture import (
    CaptureError,
    CaptureShape,
    RouterCapture,
    StepFeed,
    experts_modules,
    step_row,
)
from ecospec_orchestrator.engine.tensorrt_llm.plugin.spool import MAX_FILES, TraceSpool, take_records
from ecospec_orchestrator.engine.tensorrt_llm.plugin.step_file import (
    StepCounts,
    StepFileError,
    StepReader,
    StepShape,
    StepWriter,
)
from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_record import encode_record
from ecospec_proto.trace_rows import TraceRows

LAYERS, EXPERTS, TOP_K, LEVELS = 3, 12, 2, 4


def test_a_steps_counts_are_those_of_its_real_rows() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        requests, per = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        real = int(rng.integers(0, requests + 1))
        routes = rng.integers(0, EXPERTS, (LAYERS, requests * per, TOP_K)).astype(np.int16)
        lengths = rng.integers(1, LEVELS + 2, requests).astype(np.int32)
        row = step_row(torch.from_numpy(routes), torch.tensor(real), torch.from_numpy(lengths), LEVELS, EXPERTS)
        counts = StepCounts.of(row.numpy(), StepShape(LAYERS, LEVELS))
        assert (counts.requests, counts.rows, counts.emitted) == (real, real * per, lengths[:real].sum())
        assert counts.accepted.tolist() == np.bincount(lengths[:real] - 1, minlength=LEVELS + 1).tolist()
        assert counts.distinct_experts.tolist() == [len(np.unique(layer[: real * per])) for layer in routes]


def test_counting_waits_for_nothing_and_is_one_graph() -> None:
    routes, lengths = torch.zeros(LAYERS, 6, TOP_K, dtype=torch.int16), torch.ones(2, dtype=torch.int32)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (routes, torch.tensor(2), lengths)]
        assert step_row(*fake, LEVELS, EXPERTS).shape == (3 + LEVELS + 1 + LAYERS,)
    meta = [t.to("meta") for t in (routes, torch.tensor(2), lengths)]
    assert step_row(*meta, LEVELS, EXPERTS).dtype == torch.int32
    compiled = torch.compile(step_row, fullgraph=True, backend="aot_eager")
    real = torch.tensor(1)
    assert torch.equal(
        compiled(routes, real, lengths, LEVELS, EXPERTS), step_row(routes, real, lengths, LEVELS, EXPERTS)
    )


class Routing:
    def apply(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.topk(TOP_K)
        return ids.int(), values


def run_step(capture: RouterCapture, rng: np.random.Generator, requests: int, contexts: int = 0) -> list[int]:
    """One forward and its end; returns the distinct experts by layer."""
    rows, distinct = 3 * requests, []
    for layer in range(LAYERS):
        logits = torch.from_numpy(rng.random((rows, EXPERTS), np.float32))
        capture.routed(layer, SimpleNamespace(routing_method=Routing()), logits)
        distinct.append(len(torch.unique(logits.topk(TOP_K).indices)))
    capture.finished(contexts, torch.ones(requests, dtype=torch.int32))
    return distinct


def test_the_feed_hands_over_every_step_once_and_counts_what_it_lost() -> None:
    rng = np.random.default_rng(1)
    capture = RouterCapture(CaptureShape(LAYERS, EXPERTS, TOP_K, 12, LEVELS, ring=8), "cpu")
    rows: list[np.ndarray] = []
    feed = StepFeed(capture, rows.append, period_steps=3)
    wanted = []
    for step in range(30):
        feed.step()
        real = 0 if step % 5 == 0 else 2  # nothing but padding is not handed over
        capture.real.fill_(real)
        distinct = run_step(capture, rng, 2)
        if real:
            wanted.append(distinct)
        run_step(capture, rng, 2, contexts=1)  # reads prompts: no verify step
        run_step(capture, rng, 5)  # more rows than a verify step has
    found = [StepCounts.of(row, StepShape(LAYERS, LEVELS)).distinct_experts.tolist() for row in rows]
    assert found == wanted[: len(found)] and len(found) > 18 and feed.missed == 0
    slow = StepFeed(capture, rows.append, period_steps=20)
    for _ in range(41):
        slow.step()
        run_step(capture, rng, 2)
    assert slow.missed > 0 and int(capture.steps) == 71


def test_draft_layers_and_dense_layers_are_left_out_of_the_hooks() -> None:
    with stand_in_engine():
        from tensorrt_llm._torch.models.modeling_deepseekv3 import DeepseekV3ForCausalLM

        model = DeepseekV3ForCausalLM(model_config(layers=3))
    found = experts_modules(model, 3)
    assert found == [model.model.layers[1].mlp.experts, model.model.layers[2].mlp.experts]
    with pytest.raises(CaptureError, match="with its 9 layers"):
        experts_modules(model, 9)
    with pytest.raises(CaptureError, match="has no experts with a routing method in its 1 layers"):
        experts_modules(model, 1)


def random_rows(shape: StepShape, count: int, first: int) -> list[np.ndarray]:
    return [np.full(shape.width, number, np.int32) for number in range(first, first + count)]


def test_a_reader_gets_every_step_in_order_and_counts_those_it_missed(tmp_path: Path) -> None:
    shape = StepShape(LAYERS, LEVELS, slots=8)
    writer = StepWriter(tmp_path / "steps", shape)
    writer.append(random_rows(shape, 1, 99)[0])  # before anybody reads
    reader = StepReader(tmp_path / "steps")
    assert reader.shape == shape and list(reader.poll()) == []
    written = 0
    for count in (1, 5, 7, 0, 3):
        for row in random_rows(shape, count, written):
            writer.append(row)
        assert [c.requests for c in reader.poll()] == list(range(written, written + count))
        written += count
    for row in random_rows(shape, 20, 100):
        writer.append(row)
    # The slot of the oldest is the one that a writer would be at: it is not trusted.
    assert [c.requests for c in reader.poll()] == list(range(113, 120)) and reader.missed == 13
    assert (tmp_path / "steps").stat().st_mode & 0o777 == 0o600


def test_a_reader_in_another_process_never_sees_half_a_row(tmp_path: Path) -> None:
    shape = StepShape(94, 7, slots=64)
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=keep_writing, args=(tmp_path / "steps", shape, ready, stop))
    process.start()
    try:
        assert ready.wait(60)
        reader, last, polls = StepReader(tmp_path / "steps"), 0, 0
        while polls < 300 or not last:
            polls += 1
            for counts in reader.poll():
                assert counts.requests == counts.rows > last
                last = counts.requests
                assert (counts.distinct_experts == last).all() and (counts.accepted == last).all()
    finally:
        stop.set()
        process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:10], "10 bytes; a header of 24"),
        (lambda data: b"nope" + data[4:], "begins with b'nope'"),
        (lambda data: data + b"x", "its header needs"),
        (lambda data: data[:12] + b"\xff\xff\xff\x7f" + data[16:], "2147483647 slots"),
    ],
)
def test_another_file_is_refused_before_it_is_mapped(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "steps"
    StepWriter(path, StepShape(2, 2, 4))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StepFileError, match=message):
        StepReader(path)
    with pytest.raises(StepFileError, match="cannot be read"):
        StepReader(tmp_path / "other")


def test_records_are_taken_once_and_dropped_when_nobody_takes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    geometry = TargetGeometry("tiny", "test", 97, 32, 2, 8, 2)
    spool = TraceSpool(tmp_path / "traces")
    for number in range(3):
        rows = TraceRows(2, 2, number)
        rows.add_chain(np.array([number + 1]), np.array([[[0, 1], [2, 3]]]))
        spool.put(encode_record(rows.document(f"{number:032x}"), geometry))
    spool.put(b"broken")
    taken = list(take_records(tmp_path / "traces", geometry))
    assert [document.tokens.tolist() for document in taken] == [[1], [2], [3]]
    assert "is left out" in caplog.text and list(take_records(tmp_path / "traces", geometry)) == []
    for _ in range(MAX_FILES + 2):
        spool.put(b"x")
    assert spool.dropped == 2 and caplog.text.count("nobody took") == 1
