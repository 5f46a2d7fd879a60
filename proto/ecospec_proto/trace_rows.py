"""A traced text while it grows: rows come in the order in which a target computes them."""

from __future__ import annotations

import numpy as np

from .trace_document import TraceDocument


class TraceRows:
    """Gathers the rows of one text; moe_layers and top_k are the target's, first_position the text's first row's."""

    def __init__(self, moe_layers: int, top_k: int, first_position: int = 0) -> None:
        self._shape = (moe_layers, top_k)
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._rows, self._last, self._position = 0, -1, first_position - 1

    def __len__(self) -> int:
        return self._rows

    @property
    def next_position(self) -> int:
        """Behind the newest accepted row."""
        return self._position + 1

    def add_chain(self, tokens: np.ndarray, routes: np.ndarray | None = None) -> None:
        """Accepted rows that follow one another and the newest accepted one. tokens: int [n]; routes: int [n, MoE layers,
        top_k], None where nobody knows them."""
        if routes is None:
            routes = np.full((len(tokens), *self._shape), -1, np.int16)
        self.add_tree(tokens, np.arange(-1, len(tokens) - 1), np.ones(len(tokens), np.bool_), routes)

    def add_tree(self, tokens: np.ndarray, parents: np.ndarray, accepted: np.ndarray, routes: np.ndarray) -> None:
        """Rows of one verification. parents: int [n], an earlier one of these rows, or -1 for those that follow the newest
        accepted row; accepted: bool [n], a chain from such a row."""
        depths = np.zeros(len(tokens), np.int64)
        for row, parent in enumerate(parents.tolist()):
            depths[row] = 0 if parent < 0 else depths[parent] + 1
        positions = self._position + 1 + depths
        followed = np.where(parents < 0, self._last, self._rows + parents)
        integers = tuple(np.asarray(column).astype(np.int32) for column in (tokens, positions, followed))
        self._parts.append((*integers, np.asarray(routes).astype(np.int16), accepted))
        for row in np.flatnonzero(accepted)[-1:].tolist():
            self._last, self._position = self._rows + row, int(positions[row])
        self._rows += len(tokens)

    def document(self, document_id: str, domain: str = "") -> TraceDocument:
        """Everything so far; unchecked."""
        none = np.zeros(0, np.int32)
        empty = (none, none, none, np.zeros((0, *self._shape), np.int16), np.zeros(0, np.bool_))
        columns = zip(*self._parts, strict=True) if self._parts else ([column] for column in empty)
        return TraceDocument(document_id, domain, *(np.concatenate(parts) for parts in columns))
