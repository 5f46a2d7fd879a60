"""What each of two ranks does in the tests of TensorRT-LLM's plug-in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from trt_engine import random_table, random_worker, stock_choice, unasked

from ecospec_orchestrator.core import Footprints
from ecospec_orchestrator.engine.tensorrt_llm.plugin.ranks import join
from ecospec_orchestrator.engine.tensorrt_llm.plugin.select_eager import EagerSelector
from ecospec_orchestrator.engine.tensorrt_llm.plugin.select_graph import GraphSelector, Pricing
from ecospec_orchestrator.engine.tensorrt_llm.plugin.token_state import (
    TableArrays,
    TableFeed,
    TableSize,
    TokenState,
    pack_ids,
)
from ecospec_orchestrator.footprint.base import FootprintUnavailableError, TreeContext

LAYERS, EXPERTS, TOP_K, VOCABULARY, BATCH, NODES = 2, 40, 3, 50, 3, 6
PRICING = Pricing(1.0, LAYERS * TOP_K, 64)
STEPS = ("answers", "is late", "is busy", "fails", "cannot be reached", "answers nonsense", "answers again")


class Predictor:
    """Rank 0's, which behaves as the step's name says."""

    def __init__(self, answers: np.ndarray) -> None:
        self.answers, self.step, self.freed = answers, "", threading.Event()

    def __call__(self, asked: Sequence[TreeContext]) -> list[Footprints]:
        if self.step == "is late":
            self.freed.wait()
        if self.step == "fails":
            raise RuntimeError("no luck")
        if self.step == "cannot be reached":
            raise FootprintUnavailableError("unavailable", "not connected")
        rows = [[tree.context_tokens[-1], *tree.tree.tokens.tolist()] for tree in asked]
        if self.step == "answers nonsense":
            rows = [row[:-1] for row in rows]
        bits = [pack_ids(self.answers[row], EXPERTS).reshape(len(row), LAYERS, -1) for row in rows]
        return [Footprints(b, np.ones(len(b), np.bool_)) for b in bits]


def run(rank: int, address: str, results: Queue[Any]) -> None:
    """In a process of its own."""
    results.put("ready")
    try:
        results.put(run_rank(rank, address))
    except BaseException as error:
        results.put(repr(error))
        raise


def run_rank(rank: int, address: str) -> dict[str, Any]:
    ranks = join(rank, 2, address)
    rng = np.random.default_rng(7)  # the same candidates on both
    predictor = Predictor(random_table(rng, VOCABULARY, LAYERS, EXPERTS, TOP_K))
    selector = EagerSelector(lambda: ranks, predictor if rank == 0 else None, 1.0, PRICING)
    eager, stock = [], []
    for step in STEPS:
        predictor.step = step
        worker, _ = random_worker(rng, BATCH, 3, 3, NODES, VOCABULARY)
        _, indices = selector(worker, BATCH, lambda worker=worker: stock_choice(worker, BATCH))
        eager.append(indices.tolist())
        stock.append(stock_choice(worker, BATCH)[1].tolist())
        if step == "is busy":  # its step has ended, and so may the call
            predictor.freed.set()
            if selector._waiter._thread is not None:
                selector._waiter._thread.join()

    tables = [random_table(rng, 21, LAYERS, EXPERTS, TOP_K) for _ in range(2)]
    ids = np.arange(0, 40, 2)
    found = [None, ValueError("broken"), *(TableArrays(ids, table[:20], table[20]) for table in tables)]

    def read() -> TableArrays | None:
        table = found.pop(0) if found else None
        if isinstance(table, ValueError):
            raise table
        return table

    state = TokenState(TableSize(VOCABULARY, LAYERS, EXPERTS, TOP_K, 32), "cpu")
    feed = TableFeed(state, ranks, 2, read)
    graph, loads = [], []
    for _ in range(16):
        feed.step()
        if rank == 0 and feed._reader is not None:
            feed._reader.join()  # so that it is known what the next look finds
        worker, _ = random_worker(rng, BATCH, 3, 3, NODES, VOCABULARY)
        graph.append(GraphSelector(state, PRICING)(worker, BATCH, unasked)[1].tolist())
        loads.append(feed.loads)
    return {
        "eager": eager,
        "stock": stock,
        "graph": graph,
        "loads": loads,
        "bits": int(state._bits.sum()),
        "fallbacks": dict(selector.fallbacks),
        "chosen": selector.chosen,
    }
