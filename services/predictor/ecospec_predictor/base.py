"""The seam to the model. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ecospec_proto.geometry import TargetGeometry


@dataclass(frozen=True)
class Query:
    """One draft tree. context_tokens int64 [C], C >= 1, the root last; draft_tokens int64 [N]; parents int64 [N], an
    earlier node or -1 for the root. Checked before it comes here."""

    context_tokens: np.ndarray
    draft_tokens: np.ndarray
    parents: np.ndarray


class ExpertModel(Protocol):
    geometry: TargetGeometry
    version: str
    max_context_tokens: int  # a longer context is of no use

    def predict(self, queries: Sequence[Query]) -> list[np.ndarray]:
        """One array per query: uint8, or uint16 above 256 experts, [1 + N, layers, top_k]; row 0 is the root.

        Called from one thread only.
        """
        ...
