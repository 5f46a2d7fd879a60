"""Attention over cache pages against a loop over every row and head, and the same bits whatever else is computed beside it."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ecospec_orchestrator.engine.torch.cache import PAGE_TOKENS, KvPool, SequenceCache
from ecospec_orchestrator.engine.torch.engine import ancestors
from ecospec_orchestrator.engine.torch.geometry import KvLayout
from ecospec_orchestrator.engine.torch.modules import attend_dense, attend_segments, seen_slots
from ecospec_orchestrator.engine.torch.step_plan import Segment, StepPlan

LAYER, SCALING = 1, 0.3
LAYOUTS = {
    "grouped": (6, KvLayout(2, 2, 24, 24)),
    "one": (1, KvLayout(2, 1, 5, 5)),
    "values": (4, KvLayout(2, 4, 40, 17)),
}


@dataclass
class Rows:
    """New rows of one sequence: parents int [n], or None for a plain run."""

    cache: SequenceCache
    query: torch.Tensor  # [heads, n, key_size]
    key: torch.Tensor
    value: torch.Tensor
    parents: np.ndarray | None

    def segment(self, start: int) -> Segment:
        visible = None if self.parents is None else torch.from_numpy(ancestors(self.parents)[0])
        return Segment(self.cache, start, start + self.query.shape[1], visible)


def some_pool(layout: KvLayout, rng: np.random.Generator) -> KvPool:
    pool = KvPool(layout, 64)
    pool.keys.normal_()
    pool.values.normal_()
    order = rng.permutation(pool.pages).tolist()
    pool._free = order  # pages in no order
    return pool


def new_rows(pool: KvPool, heads: int, length: int, parents: np.ndarray | None, n: int) -> Rows:
    cache = pool.new_sequence()
    cache.reserve(length + n)
    cache.length = length
    layout = pool.layout
    sizes = (heads, layout.key_size), (layout.kv_heads, layout.key_size), (layout.kv_heads, layout.value_size)
    return Rows(cache, *(torch.randn(h, n, size) for h, size in sizes), parents)


def attend(parts: list[Rows], window: int | None = None, sinks: torch.Tensor | None = None) -> list[torch.Tensor]:
    segments, start = [], 0
    for part in parts:
        segments.append(part.segment(start))
        start = segments[-1].stop
    query, key, value = (torch.cat([getattr(p, n) for p in parts], 1)[None] for n in ("query", "key", "value"))
    module = SimpleNamespace(layer_idx=LAYER)
    out, _ = attend_segments(
        module, query, key, value, None, SCALING, StepPlan(segments), sliding_window=window, s_aux=sinks
    )
    return list(out[0].split([s.stop - s.start for s in segments]))


def expected(part: Rows, window: int | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """Every row and head by itself, from the definition; keys and values are read where the cache says they are."""
    pool, length, n = part.cache.pool, part.cache.length, part.query.shape[1]
    parents = np.arange(-1, n - 1) if part.parents is None else part.parents
    out = torch.empty(n, part.query.shape[0], pool.layout.value_size)
    for row in range(n):
        path = []
        at = row
        while at >= 0:
            path.append(length + at)
            at = int(parents[at])
        slots = [*range(length), *reversed(path)][-(window or 10**9) :]
        place = [(part.cache.pages[s // PAGE_TOKENS], s % PAGE_TOKENS) for s in slots]
        for head in range(part.query.shape[0]):
            kv = head * pool.layout.kv_heads // part.query.shape[0]
            keys = torch.stack([pool.keys[LAYER, page, kv, offset] for page, offset in place])
            values = torch.stack([pool.values[LAYER, page, kv, offset] for page, offset in place])
            score = (keys @ part.query[head, row] * SCALING).double()
            if sinks is not None:
                score = torch.cat([score, sinks[head, None].double()])
            out[row, head] = (score.softmax(0)[: len(slots), None] * values).sum(0).float()
    return out


def random_parents(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.array([-1, *(int(rng.integers(0, i)) for i in range(1, n))])


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 70])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_attention_equals_a_loop_over_rows_and_heads(kind: str, window: int | None, sinks: bool) -> None:
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    heads, layout = LAYOUTS[kind]
    pool = some_pool(layout, rng)
    lengths = ((0, 5), (63, 1), (60, 9), (64, 7), (300, 3), (600, 1))  # over page borders, and over more than one block
    parts = [new_rows(pool, heads, length, random_parents(rng, n), n) for length, n in lengths]
    parts += [new_rows(pool, heads, length, None, n) for length, n in ((0, 66), (130, 2))]
    sink = torch.randn(heads) if sinks else None
    for part, found in zip(parts, attend(parts, window, sink), strict=True):
        torch.testing.assert_close(found, expected(part, window, sink), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 3, 100])
def test_plain_torch_for_other_devices_agrees(window: int | None) -> None:
    torch.manual_seed(4)
    rng = np.random.default_rng(4)
    pool = some_pool(LAYOUTS["grouped"][1], rng)
    part = new_rows(pool, 6, 150, random_parents(rng, 8), 8)
    sinks = torch.randn(6)
    (found,) = attend([part], window, sinks)
    keys, values = part.cache.gather(LAYER, 158)
    dense = attend_dense(part.query, keys, values, seen_slots(part.segment(0), window), SCALING, sinks)
    torch.testing.assert_close(found, dense, atol=2e-5, rtol=1e-4)


def test_rows_pending_from_earlier_forwards_are_seen() -> None:
    """A drafter runs a tree level by level: two rows are there, two more see one of them each."""
    torch.manual_seed(5)
    pool = some_pool(LAYOUTS["grouped"][1], np.random.default_rng(5))
    whole = new_rows(pool, 6, 70, np.array([-1, 0, 0, 1]), 4)
    at_once = attend([whole])[0]
    visible = torch.from_numpy(ancestors(np.array([-1, 0, 0, 1]))[0])
    for first, last in ((0, 2), (2, 4)):
        query, key, value = (t[None, :, first:last] for t in (whole.query, whole.key, whole.value))
        plan = StepPlan([Segment(whole.cache, 0, 2, visible[first:last, :last])])
        level, _ = attend_segments(SimpleNamespace(layer_idx=LAYER), query, key, value, None, SCALING, plan)
        assert torch.equal(level[0], at_once[first:last])


@pytest.mark.parametrize("length", [0, 5, 255, 300, 800])
def test_no_bit_depends_on_companions_or_on_gaps(length: int) -> None:
    torch.manual_seed(6)
    rng = np.random.default_rng(6)
    heads, layout = LAYOUTS["grouped"]
    pool = some_pool(layout, rng)
    tree = new_rows(pool, heads, length, np.array([-1, 0, 0, 2, 1, 3]), 6)
    path = [0, 2, 3, 5]
    chain = new_rows(pool, heads, length, None, 4)
    for store in (pool.keys, pool.values):  # the same context in both
        for position in range(length):
            to, source = ((c.pages[position // PAGE_TOKENS], position % PAGE_TOKENS) for c in (chain.cache, tree.cache))
            store[:, to[0], :, to[1]] = store[:, source[0], :, source[1]]
    chain.query, chain.key, chain.value = (t[:, path] for t in (tree.query, tree.key, tree.value))
    (alone,) = attend([tree])
    (of_chain,) = attend([chain])
    assert torch.equal(alone[path], of_chain)
    others = [new_rows(pool, heads, n, None, 3) for n in (0, 40, 500)] * 6  # so many that blocks are not shared out
    assert torch.equal(attend([*others, tree])[-1], alone)
    for row in range(4):  # one by one, as plain decoding does
        one = Rows(
            chain.cache, chain.query[:, row : row + 1], chain.key[:, row : row + 1], chain.value[:, row : row + 1], None
        )
        assert torch.equal(attend([one])[0][0], of_chain[row])
        chain.cache.length += 1
