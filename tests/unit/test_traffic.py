"""Traffic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ecospec_orchestrator.accounting.traffic import (
    autoregressive_bytes,
    bytes_of_step,
    distinct_per_layer,
    overlap_by_layer,
    union_size,
    upper_bound_bytes,
)
from ecospec_orchestrator.core import BytesRead
from ecospec_orchestrator.engine.base import StepBytes

SIZES = StepBytes(per_expert=100, attention=7, shared=11, head=13, kv_per_token=2)


def test_distinct_experts_are_counted_once_per_layer():
    experts = np.array([[[0, 1], [5, 4]], [[1, 0], [5, 3]], [[1, 2], [3, 4]]], np.uint8)  # 3 rows, 2 layers, top-2
    assert distinct_per_layer(experts, 6).tolist() == [3, 3]
    assert distinct_per_layer(experts[:1], 6).tolist() == [2, 2]
    assert distinct_per_layer(experts[:0], 6).tolist() == [0, 0]


def test_distinct_experts_equal_sets_for_many_experts():
    experts = np.random.default_rng(0).integers(0, 300, (40, 5, 8)).astype(np.uint16)
    expected = [len({int(e) for e in experts[:, layer].ravel()}) for layer in range(5)]
    assert distinct_per_layer(experts, 300).tolist() == expected


def test_distinct_experts_refuses_what_it_cannot_count():
    with pytest.raises(ValueError, match="expert ids run from 0 to 6; 0 to 5 is allowed"):
        distinct_per_layer(np.array([[[0, 6]]], np.uint8), 6)
    with pytest.raises(ValueError, match="expert ids run from -1"):
        distinct_per_layer(np.array([[[0, -1]]]), 6)
    with pytest.raises(ValueError, match=r"\[rows, layers, top_k\] is needed"):
        distinct_per_layer(np.zeros((2, 3), np.uint8), 6)


def test_bytes_of_a_step_by_component():
    read = bytes_of_step(SIZES, np.array([3, 4]), rows=5, context_tokens=1000, draft_bytes=17)
    assert read == BytesRead(experts=700, attention=7, shared=11, head=13, kv=2000, draft=17)
    assert read.total == 700 + 7 + 11 + 13 + 2000 + 17
    assert bytes_of_step(SIZES, np.array([0, 0]), rows=0, context_tokens=9, draft_bytes=17) == BytesRead(draft=17)


def test_upper_bound_shares_nothing_and_stops_at_all_experts():
    # 5 rows * top-2 = 10 experts in each of 3 layers
    assert upper_bound_bytes(SIZES, layers=3, top_k=2, num_experts=32, rows=5, context_tokens=10) == 3000 + 31 + 20
    # of which there are only 8
    capped = upper_bound_bytes(SIZES, layers=3, top_k=2, num_experts=8, rows=5, context_tokens=10, draft_bytes=1)
    assert capped == 2400 + 31 + 20 + 1


def test_autoregressive_equivalent_reads_the_fixed_part_once_for_the_batch():
    # A plain step of 4 requests: 12 experts + fixed 31 + KV 200 = 1431 bytes for 4 tokens; 10 tokens: 2.5 such steps.
    value = autoregressive_bytes(SIZES, np.array([5, 7]), requests=4, emitted=10, context_tokens=100)
    assert value == pytest.approx(1431 * 2.5)
    assert autoregressive_bytes(SIZES, np.array([2, 2]), requests=1, emitted=3, context_tokens=0) == 3 * 431
    assert autoregressive_bytes(SIZES, np.array([0, 0]), requests=0, emitted=0, context_tokens=0) == 0.0


def test_overlap_counts_pairs_by_layer():
    # 2 nodes, 2 layers, 2 words
    predicted = np.array([[[0b0111, 1], [1, 0]], [[0b1000, 0], [3, 0]]], np.uint64)
    actual = np.array([[[0b0110, 2], [2, 0]], [[0b1100, 0], [2, 0]]], np.uint64)
    assert overlap_by_layer(predicted, actual).tolist() == [[5, 3], [5, 2], [3, 1]]
    assert overlap_by_layer(predicted[:1], actual[:1]).tolist() == [[4, 1], [3, 1], [2, 0]]
    assert overlap_by_layer(predicted[:0], actual[:0]).tolist() == [[0, 0]] * 3
    with pytest.raises(ValueError, match="must be equal"):
        overlap_by_layer(predicted, actual[:1])


def test_a_union_counts_every_expert_once():
    bits = np.array([[[0b0111, 1], [1, 0]], [[0b1001, 1], [1, 0]]], np.uint64)
    assert union_size(bits).tolist() == [5, 1]
    assert union_size(bits[:0]).tolist() == [0, 0]


def test_table_2_of_the_paper_for_qwen3_235b():
    per_expert = 3 * 4096 * 1536 * 2  # gate, up and down in BF16: 37.75 MB
    rest = StepBytes(per_expert, attention=9_000_000_000, shared=5_000_000_000, head=1_200_000_000, kv_per_token=0)
    distinct = np.full(94, 23)
    distinct[:66] += 1  # 23.7 per layer on average
    assert distinct.mean() == pytest.approx(23.7, abs=0.01)
    read = bytes_of_step(rest, distinct, rows=5, context_tokens=0)
    assert read.experts / 1e9 == pytest.approx(84.1, abs=0.05)
    assert read.total / 1e9 == pytest.approx(99.3, abs=0.05)
    assert upper_bound_bytes(rest, 94, 8, 128, rows=5, context_tokens=0) == 94 * 40 * per_expert + 15_200_000_000
