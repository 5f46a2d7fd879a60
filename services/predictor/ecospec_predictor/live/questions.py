"""A trace record as the questions that a caller would have asked about its rows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ecospec_proto.trace_document import TraceDocument

from ..base import Query

DEPTH = 4  # accepted rows that one question covers: its root and those below, as drafts of an ordinary tree


@dataclass(frozen=True)
class Question:
    """rows int64 [1 + N]: the record's rows that the answer's rows are about, the root first."""

    query: Query
    rows: np.ndarray


def questions_of(record: TraceDocument, max_context_tokens: int, max_nodes: int) -> list[Question]:
    """Every row with routes is in exactly one question, but for nodes beyond max_nodes of one tree.

    Of the accepted rows with routes, the first and every DEPTH-th after it are roots; each other row belongs to the tree of the
    nearest root above it.
    """
    chain = np.flatnonzero(record.accepted)
    routed = (record.routes[chain] >= 0).any((1, 2))
    if not routed.any():
        return []
    first = int(routed.argmax())
    roots = chain[first::DEPTH]
    owner = np.full(len(record.tokens), -1, np.int64)
    owner[roots] = roots
    for row in range(1, len(owner)):
        if owner[row] < 0:
            owner[row] = owner[record.parents[row]]
    return [
        _question(
            record, chain[: first + 1 + DEPTH * at][-max_context_tokens:], np.flatnonzero(owner == root), max_nodes
        )
        for at, root in enumerate(roots)
    ]


def _question(record: TraceDocument, context: np.ndarray, rows: np.ndarray, max_nodes: int) -> Question:
    """rows: of the tree, ascending, so the root first."""
    rows = rows[: 1 + max_nodes]
    parents = np.searchsorted(rows, record.parents[rows[1:]]) - 1
    tokens = record.tokens.astype(np.int64)
    return Question(Query(tokens[context], tokens[rows[1:]], parents.astype(np.int64)), rows)
