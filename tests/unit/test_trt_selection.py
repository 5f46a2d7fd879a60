"""Node selection in the engine's graph and in eager mode: the contract, the greedy read by brute force, and no wait for the device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trt_engine import random_table, random_worker, stock_choice, unasked

from ecospec_orchestrator.core import Footprints
from ecospec_orchestrator.engine.greedy import greedy_marginal
from ecospec_orchestrator.engine.tensorrt_llm.plugin.contract import (
    Candidates,
    candidates_of,
    check_indices,
    root_tokens,
)
from ecospec_orchestrator.engine.tensorrt_llm.plugin.ranks import Ranks
from ecospec_orchestrator.engine.tensorrt_llm.plugin.select_eager import EagerSelector
from ecospec_orchestrator.engine.tensorrt_llm.plugin.select_graph import GraphSelector, Pricing, choose_indices
from ecospec_orchestrator.engine.tensorrt_llm.plugin.token_state import TableArrays, TableSize, TokenState, pack_ids
from ecospec_orchestrator.expert_buffers import BUFFER_BATCH, BUFFER_REQUEST

VOCABULARY, LAYERS, EXPERTS, TOP_K = 50, 2, 70, 3
SIZE = TableSize(VOCABULARY, LAYERS, EXPERTS, TOP_K, rows=40)


def random_state(rng: np.random.Generator) -> tuple[TokenState, np.ndarray]:
    """A loaded table for some tokens, and the ids that it answers with for each token of the vocabulary."""
    experts = random_table(rng, 31, LAYERS, EXPERTS, TOP_K)
    ids = np.sort(rng.choice(VOCABULARY, 30, replace=False))
    state = TokenState(SIZE, "cpu")
    state.load(TableArrays(ids, experts[:30], experts[30]))
    answers = np.repeat(experts[30][None], VOCABULARY, 0)
    answers[ids] = experts[:30]
    return state, answers


def pairs(answer: np.ndarray) -> frozenset[tuple[int, int]]:
    return frozenset((layer, int(expert)) for layer, experts in enumerate(answer) for expert in experts)


def brute_force(
    scores: list[list[float]],
    parents: list[list[int]],
    footprints: list[list[frozenset[tuple[int, int]]]],
    roots: list[frozenset[tuple[int, int]]],
    nodes: int,
    pricing: Pricing,
) -> list[list[int]]:
    """The greedy with sets: in rounds, every request takes its frontier's best node, priced against what all chose before."""
    considered = [
        set(sorted(range(len(s)), key=lambda n: (-s[n], n))[: max(pricing.considered, nodes)]) for s in scores
    ]
    buffer = set().union(*roots)
    chosen: list[set[int]] = [set() for _ in scores]
    for _ in range(nodes):
        taken = []
        for at, tree in enumerate(parents):
            frontier = [n for n in considered[at] - chosen[at] if tree[n] < 0 or tree[n] in chosen[at]]
            taken.append(
                min(frontier, key=lambda n: (-scores[at][n] / (len(footprints[at][n] - buffer) + pricing.eps), n))
            )
        for at, node in enumerate(taken):
            chosen[at].add(node)
            buffer |= footprints[at][node]
    return [sorted(c) for c in chosen]


def test_graph_and_eager_mode_choose_what_the_contract_and_the_greedy_say() -> None:
    rng = np.random.default_rng(0)
    differs = trees = 0
    for _ in range(300):
        branching, levels, batch = int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(1, 16))
        count = branching + branching * branching * (levels - 1)
        nodes = int(rng.integers(1, min(count, 9) + 1))
        pricing = Pricing(float(rng.choice([0.5, 1.0, 4.0])), LAYERS * TOP_K, int(rng.choice([1, 6, 64])))
        worker, parents = random_worker(rng, batch, branching, levels, nodes, VOCABULARY)
        state, answers = random_state(rng)
        tokens, indices = GraphSelector(state, pricing)(worker, batch, unasked)
        check_indices(indices, candidates_of(worker, batch), nodes)
        assert torch.equal(tokens, worker.history_draft_tokens_buffer[:batch].gather(1, indices))
        footprints = [[pairs(answers[t]) for t in row] for row in worker.history_draft_tokens_buffer[:batch].tolist()]
        roots = [pairs(answers[t]) for t in root_tokens(worker, batch).tolist()]
        scores = worker.history_score_buffer[:batch].tolist()
        assert indices.tolist() == brute_force(scores, parents, footprints, roots, nodes, pricing)

        def predict(asked, answers=answers, worker=worker):  # type: ignore[no-untyped-def]
            found = []
            for tree in asked:
                rows = [tree.context_tokens[-1], *tree.tree.tokens.tolist()]
                bits = pack_ids(answers[rows], EXPERTS).reshape(len(rows), LAYERS, -1)
                found.append(Footprints(bits, np.ones(len(rows), np.bool_)))
            return found

        eager = EagerSelector(lambda: Ranks(0, 1), predict, 30.0, pricing)
        eager_tokens, eager_indices = eager(
            worker, batch, lambda worker=worker, batch=batch: stock_choice(worker, batch)
        )
        assert torch.equal(eager_indices, indices) and torch.equal(eager_tokens, tokens)
        assert (eager.chosen, dict(eager.fallbacks)) == (1, {})
        differs += not torch.equal(indices, stock_choice(worker, batch)[1])
        trees += batch
    assert trees > 2000 and differs > 100


def test_without_a_table_the_likeliest_nodes_are_chosen() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        worker, parents = random_worker(rng, 3, 3, 3, 6)
        pricing = Pricing(1.0, LAYERS * TOP_K, 64)
        _, indices = GraphSelector(TokenState(SIZE, "cpu"), pricing)(worker, 3, unasked)
        scores = worker.history_score_buffer[:3].tolist()
        wanted = [sorted(sorted(range(21), key=lambda n, s=s: (-s[n], n))[:6]) for s in scores]
        assert indices.tolist() == wanted
        assert all(p < 0 or p in set(w) for tree, w in zip(parents, wanted, strict=True) for p in (tree[n] for n in w))


def test_rows_that_pad_a_batch_may_hold_anything() -> None:
    """random_worker leaves NaN and foreign parents in the rows behind its batch."""
    rng = np.random.default_rng(2)
    for _ in range(50):
        worker, _ = random_worker(rng, 2, 3, 3, 6)
        state, _ = random_state(rng)
        _, indices = GraphSelector(state, Pricing(1.0, 6, 64))(worker, 4, unasked)
        check_indices(indices[:2], candidates_of(worker, 2), 6)
        assert indices.shape == (4, 6) and bool(((0 <= indices) & (indices < 21)).all())


def tensors_of(worker: SimpleNamespace, batch: int) -> tuple[torch.Tensor, ...]:
    candidates = candidates_of(worker, batch)
    return candidates.scores, candidates.tokens, candidates.parent_list, root_tokens(worker, batch)


def choose(state: TokenState, *tensors: torch.Tensor) -> torch.Tensor:
    scores, tokens, parent_list, roots = tensors
    return choose_indices(Candidates(scores, tokens, parent_list, 3, 3), roots, state, 6, Pricing(1.0, 6, 12))


def test_graph_mode_runs_on_fake_tensors_and_without_values() -> None:
    """Fake tensors refuse what depends on a value; on the meta device there is none to wait for, or to copy to the host."""
    rng = np.random.default_rng(3)
    worker, _ = random_worker(rng, 2, 3, 3, 6)
    tensors = tensors_of(worker, 2)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in tensors]
        indices = choose(TokenState(SIZE, "cpu"), *fake)
    assert (indices.shape, indices.dtype) == ((2, 6), torch.int64)
    assert choose(TokenState(SIZE, "meta"), *(t.to("meta") for t in tensors)).shape == (2, 6)


def test_graph_mode_compiles_as_one_graph() -> None:
    rng = np.random.default_rng(4)
    state, _ = random_state(rng)
    compiled = torch.compile(
        lambda *tensors: choose(state, *tensors), fullgraph=True, backend="aot_eager", dynamic=False
    )
    for _ in range(20):
        worker, _ = random_worker(rng, 2, 3, 3, 6, VOCABULARY)
        tensors = tensors_of(worker, 2)
        assert torch.equal(compiled(*tensors), choose(state, *tensors))


@pytest.mark.parametrize("mode", [BUFFER_BATCH, BUFFER_REQUEST])
def test_in_lockstep_one_tree_is_chosen_as_in_one_order(mode: int) -> None:
    from ecospec_orchestrator.engine.tensorrt_llm.plugin.select_graph import (
        likeliest,
        pack_considered,
        path_probabilities,
    )

    rng = np.random.default_rng(5)
    for _ in range(50):
        worker, _ = random_worker(rng, 1, 3, 3, 6)
        candidates = candidates_of(worker, 1)
        values = path_probabilities(candidates)
        pack = pack_considered(candidates, likeliest(values, 21), values)
        bits = torch.from_numpy(rng.integers(0, 1 << 40, (22, 2)))
        pack = type(pack)(bits, torch.from_numpy(rng.random(22) < 0.8), pack.values, pack.parents, pack.tree)
        options = (1, 6, 1.0, 9, True, mode)
        assert torch.equal(greedy_marginal(pack, *options), greedy_marginal(pack, *options, lockstep=True))


def test_a_table_replaces_the_one_before_it_in_place() -> None:
    rng = np.random.default_rng(6)
    state = TokenState(SIZE, "cpu")
    where = (state._bits.data_ptr(), state._row.data_ptr())
    tokens = torch.arange(VOCABULARY)[None]
    assert not state(tokens)[1].any()
    for seen in (30, 7, 0):
        experts = random_table(rng, seen + 1, LAYERS, EXPERTS, TOP_K)
        ids = np.sort(rng.choice(VOCABULARY, seen, replace=False))
        state.load(TableArrays(ids, experts[:seen], experts[seen]))
        answers = np.repeat(experts[seen][None], VOCABULARY, 0)
        answers[ids] = experts[:seen]
        bits, known = state(tokens)
        flags = np.unpackbits(bits.numpy().view(np.uint8), axis=2, bitorder="little").reshape(VOCABULARY, LAYERS, -1)
        assert known.all() and (state._bits.data_ptr(), state._row.data_ptr()) == where
        for token in range(VOCABULARY):
            assert [set(np.flatnonzero(layer)) for layer in flags[token]] == [set(a.tolist()) for a in answers[token]]


@pytest.mark.parametrize(
    ("ids", "shape", "top", "message"),
    [
        (41, (41, LAYERS, TOP_K), 0, "at most 40 tokens"),
        (3, (3, LAYERS + 1, TOP_K), 0, "of another target"),
        (3, (3, LAYERS, TOP_K), EXPERTS, "expert ids 0 to 70; 0 to 69 is allowed"),
    ],
)
def test_a_table_of_another_target_is_refused(ids: int, shape: tuple[int, ...], top: int, message: str) -> None:
    experts = np.zeros(shape, np.uint8)
    experts.flat[0] = top
    table = TableArrays(np.arange(ids), experts, np.zeros((LAYERS, TOP_K), np.uint8))
    with pytest.raises(ValueError, match=message):
        TokenState(SIZE, "cpu").load(table)
