"""The greedy of cost-aware selection, compiled. Flat arrays in, a mask out; policies do the packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..expert_buffers import BUFFER_BATCH, BUFFER_NONE, BUFFER_REQUEST

__all__ = ["BUFFER_BATCH", "BUFFER_NONE", "BUFFER_REQUEST", "greedy_marginal", "warm_up"]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with a disk cache where one can be written, else without (a read-only container)."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:
        return njit(function)


@intrinsic
def _popcount(typing_context: Any, word: Any) -> Any:
    """Set bits of one uint64, as int64: one machine instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

    return types.int64(types.uint64), generate


@_compiled
def greedy_marginal(
    experts: np.ndarray,
    known: np.ndarray,
    probabilities: np.ndarray,
    parents: np.ndarray,
    offsets: np.ndarray,
    gamma: int,
    eps: float,
    unknown_cost: int,
    seed_root: bool,
    buffer_mode: int,
) -> np.ndarray:
    """Pick the node of best P / (|E_traj minus B| + eps) until every tree has gamma nodes or none left.

    Rows hold tree after tree, each with its root first: experts uint64 [rows, bits]; known bool [rows]; probabilities
    float64 [rows]; parents int64 [rows] as row numbers of the whole pack, -1 for roots; offsets int64 [trees + 1], the
    row of each tree's root and, last, the number of rows. Returns bool [rows], True for chosen nodes (never for roots).

    B is one buffer (BUFFER_BATCH) or one per tree (BUFFER_REQUEST). BUFFER_NONE: B holds the tree's own root only, if
    seeded, and never grows, so that a node costs its whole trajectory, chosen or not.

    Only the frontier (unchosen children of chosen nodes and of roots) is priced. All ancestors of a frontier node are
    in B if it grows, so |E_traj minus B| is what the node itself adds; and as a child never beats its parent and comes after it,
    the best of the frontier is the best of all. The choice is ancestor-closed whatever the input.
    """
    rows, words = experts.shape
    trees = len(offsets) - 1
    shared = buffer_mode == BUFFER_BATCH
    static = buffer_mode == BUFFER_NONE
    buffers = np.zeros((1 if shared else trees, words), np.uint64)
    path = np.zeros((rows if static else 1, words), np.uint64)  # BUFFER_NONE: experts from the root to the row
    path_unknown = np.zeros(rows if static else 1, np.int64)
    chosen = np.zeros(rows, np.bool_)
    taken = np.zeros(trees, np.int64)
    tree_of = np.zeros(rows, np.int64)
    first_child = np.full(rows, -1, np.int64)
    next_sibling = np.full(rows, -1, np.int64)

    for tree in range(trees):
        for row in range(offsets[tree], offsets[tree + 1]):
            tree_of[row] = tree
            parent = parents[row]
            if parent >= 0:
                next_sibling[row] = first_child[parent]
                first_child[parent] = row
        root = offsets[tree]
        buffer = buffers[0 if shared else tree]
        if seed_root and known[root]:
            for word in range(words):
                buffer[word] |= experts[root, word]

    # The frontier: a slot per candidate, in no order; ties are decided by row number.
    slots = 0
    slot_row = np.empty(rows, np.int64)
    slot_cost = np.empty(rows, np.int64)
    slot_score = np.empty(rows, np.float64)
    changed = np.empty(words, np.int64)
    added = np.empty(words, np.uint64)
    opened = -1  # the row whose children come next; -1: all roots
    while True:
        first_tree = 0 if opened < 0 else tree_of[opened]
        last_tree = trees - 1 if opened < 0 else first_tree
        for tree in range(first_tree, last_tree + 1):
            above = offsets[tree] if opened < 0 else opened
            buffer = buffers[0 if shared else tree]
            child = first_child[above] if taken[tree] < gamma else -1
            while child >= 0:
                cost = unknown_cost
                if static:
                    path_unknown[child] = path_unknown[above] + (0 if known[child] else 1)
                    cost *= path_unknown[child]
                    for word in range(words):
                        path[child, word] = path[above, word] | (experts[child, word] if known[child] else np.uint64(0))
                        cost += _popcount(path[child, word] & ~buffer[word])
                elif known[child]:
                    cost = 0
                    for word in range(words):
                        cost += _popcount(experts[child, word] & ~buffer[word])
                slot_row[slots] = child
                slot_cost[slots] = cost
                slot_score[slots] = probabilities[child] / (cost + eps)
                slots += 1
                child = next_sibling[child]

        best = -1
        best_score = -np.inf
        for slot in range(slots):
            score = slot_score[slot]
            if score > best_score or (best >= 0 and score == best_score and slot_row[slot] < slot_row[best]):
                best = slot
                best_score = score
        if best < 0:
            return chosen
        opened = slot_row[best]
        tree = tree_of[opened]
        chosen[opened] = True
        taken[tree] += 1

        kept = 0
        for slot in range(slots):
            row = slot_row[slot]
            if row != opened and (tree_of[row] != tree or taken[tree] < gamma):
                slot_row[kept] = row
                slot_cost[kept] = slot_cost[slot]
                slot_score[kept] = slot_score[slot]
                kept += 1
        slots = kept

        if static or not known[opened]:
            continue  # nothing is known to be in the buffer
        buffer = buffers[0 if shared else tree]
        changes = 0
        for word in range(words):
            new = experts[opened, word] & ~buffer[word]
            if new:
                buffer[word] |= new
                changed[changes] = word
                added[changes] = new
                changes += 1
        if changes == 0:
            continue
        for slot in range(slots):
            row = slot_row[slot]
            if known[row] and (shared or tree_of[row] == tree):
                saved = 0
                for change in range(changes):
                    saved += _popcount(experts[row, changed[change]] & added[change])
                if saved:
                    slot_cost[slot] -= saved
                    slot_score[slot] = probabilities[row] / (slot_cost[slot] + eps)


def warm_up() -> None:
    """Compile (or load) the kernel now, about a second the first time, so that no request waits for it."""
    greedy_marginal(
        np.zeros((2, 1), np.uint64),
        np.ones(2, np.bool_),
        np.ones(2, np.float64),
        np.array([-1, 0], np.int64),
        np.array([0, 2], np.int64),
        1,
        1.0,
        1,
        True,
        BUFFER_BATCH,
    )
