"""A growing trace: chains, trees, and where the next row hangs."""

from __future__ import annotations

import numpy as np

from ecospec_proto.geometry import TargetGeometry
from ecospec_proto.trace_rows import TraceRows
from ecospec_proto.traces import check_document

GEOMETRY = TargetGeometry("tiny", "r1", vocab_size=100, hidden_size=16, moe_layers=2, experts=8, top_k=2)


def routes(rows: int) -> np.ndarray:
    return np.tile(np.array([3, 5], np.uint8), (rows, 2, 1))


def test_rows_hang_from_the_newest_accepted_one() -> None:
    rows = TraceRows(2, 2, first_position=7)
    assert len(rows) == 0 and rows.next_position == 7
    rows.add_chain(np.array([1, 2]), routes(2))
    # A root with two drafts, of which the second and its child are accepted.
    flags = np.array([True, False, True, True])
    rows.add_tree(np.array([3, 9, 4, 5]), np.array([-1, 0, 0, 2]), flags, routes(4))
    assert rows.next_position == 12
    rows.add_chain(np.array([6]))
    document = rows.document("a", "chat")
    check_document(document, GEOMETRY)
    assert document.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6]
    assert document.parents.tolist() == [-1, 0, 1, 2, 2, 4, 5]
    assert document.positions.tolist() == [7, 8, 9, 10, 10, 11, 12]
    assert document.accepted.tolist() == [True, True, True, False, True, True, True]
    assert document.routes[:6].tolist() == routes(6).tolist() and (document.routes[6] == -1).all()
    assert (document.document_id, document.domain) == ("a", "chat")


def test_a_tree_of_rejected_rows_leaves_the_end_where_it_was() -> None:
    rows = TraceRows(2, 2)
    rows.add_chain(np.array([1]), routes(1))
    rows.add_tree(np.array([8, 9]), np.array([-1, 0]), np.zeros(2, bool), routes(2))
    rows.add_chain(np.array([2]), routes(1))
    document = rows.document("a")
    check_document(document, GEOMETRY)
    assert document.parents.tolist() == [-1, 0, 1, 0] and document.positions.tolist() == [0, 1, 2, 1]


def test_nothing_is_an_empty_document() -> None:
    document = TraceRows(2, 2).document("a")
    assert len(document.tokens) == 0 and document.routes.shape == (0, 2, 2)
