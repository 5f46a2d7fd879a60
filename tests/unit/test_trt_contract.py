"""The index contract of TensorRT-LLM's dynamic trees, against a brute-force reading of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from trt_engine import random_worker

from ecospec_orchestrator.engine.tensorrt_llm.plugin.contract import (
    ROOT,
    ContractError,
    candidates_of,
    check_indices,
    root_tokens,
    tree_parents,
)


def closed_choice(rng: np.random.Generator, parents: list[int], nodes: int) -> list[int]:
    """A random ancestor-closed choice."""
    chosen: set[int] = set()
    while len(chosen) < nodes:
        open_nodes = [n for n, p in enumerate(parents) if n not in chosen and (p < 0 or p in chosen)]
        chosen.add(int(rng.choice(open_nodes)))
    return sorted(chosen)


@pytest.mark.parametrize(("branching", "levels"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 4), (10, 3)])
def test_parents_are_those_of_the_drafted_tree(branching: int, levels: int) -> None:
    rng = np.random.default_rng(branching + levels)
    for _ in range(20):
        worker, parents = random_worker(rng, 3, branching, levels, 1)
        assert candidates_of(worker, 3).parents.tolist() == parents


def test_the_root_is_the_last_decided_token() -> None:
    worker, _ = random_worker(np.random.default_rng(0), 3, 2, 3, 4)
    wanted = [int(worker._accepted_tokens_buf[at, int(worker._num_accepted_tokens_buf[at]) - 1]) for at in range(3)]
    assert root_tokens(worker, 3).tolist() == wanted


def test_a_worker_with_another_number_of_candidates_is_refused() -> None:
    worker, _ = random_worker(np.random.default_rng(0), 2, 3, 3, 4)
    worker.max_draft_len = 4
    with pytest.raises(ContractError, match="keeps 21 candidates; K 3 and max_draft_len 4 make 30"):
        candidates_of(worker, 2)


def test_closed_choices_pass_and_their_parents_and_masks_are_the_trees() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        branching, levels = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        count = branching + branching * branching * (levels - 1)
        nodes = int(rng.integers(1, count + 1))
        worker, parents = random_worker(rng, 2, branching, levels, nodes)
        choice = [closed_choice(rng, tree, nodes) for tree in parents]
        candidates, indices = candidates_of(worker, 2), torch.tensor(choice)
        check_indices(indices, candidates, nodes)
        places = tree_parents(indices, candidates).tolist()
        for tree, chosen, above in zip(parents, choice, places, strict=True):
            for place, node in enumerate(chosen):
                seen, at = set(), place
                while at != ROOT:
                    seen.add(chosen[at])
                    at = above[at]
                ancestors, walk = {node}, tree[node]
                while walk >= 0:
                    ancestors.add(walk)
                    walk = tree[walk]
                assert seen == ancestors


def test_every_breach_is_named() -> None:
    rng = np.random.default_rng(2)
    breaches = {"must ascend": 0, "without its parent": 0, "is allowed": 0, "as many nodes": 0}
    for _ in range(400):
        worker, parents = random_worker(rng, 2, 3, 3, 6)
        candidates = candidates_of(worker, 2)
        choice = np.array([closed_choice(rng, tree, 6) for tree in parents])
        kind = rng.choice(list(breaches))
        if kind == "must ascend":
            choice[1, 3] = choice[1, 2]
        elif kind == "without its parent":
            leaves = [n for n in choice[1] if parents[1][n] >= 0]
            if not leaves:
                continue
            orphan = parents[1][leaves[0]]
            unused = [n for n in range(21) if n not in choice[1] and parents[1][n] < 0]
            if not unused:
                continue
            choice[1] = sorted({*choice[1].tolist(), unused[0]} - {orphan})
        elif kind == "is allowed":
            choice[1, -1] = 21
        indices = torch.from_numpy(choice[:, :5] if kind == "as many nodes" else choice)
        with pytest.raises(ContractError, match=kind):
            check_indices(indices, candidates, 6)
        breaches[kind] += 1
    assert all(count > 10 for count in breaches.values()), breaches
