"""What the rows of a packed step belong to and what each of them sees, in the form that attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .cache import SequenceCache


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of the packed step belong to `cache`; visible: bool [n, m], True where a row may attend to one of the
    last m >= n rows behind the committed positions (itself and its ancestors; the first m - n rows are pending from earlier
    forwards), None for a plain causal run."""

    cache: SequenceCache
    start: int
    stop: int
    visible: torch.Tensor | None

    @property
    def begin(self) -> int:
        """The first row's slot in the cache."""
        pending = 0 if self.visible is None else self.visible.shape[1] - (self.stop - self.start)
        return self.cache.length + pending


@dataclass(frozen=True)
class StepPlan:
    """One packed step. All caches belong to one pool."""

    segments: list[Segment]

    @cached_property
    def cache_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The pool's keys and values, of all layers."""
        pool = self.segments[0].cache.pool
        return pool.keys.numpy(), pool.values.numpy()

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """For the kernels, int64 each: page tables [S, P]; each row's sequence [R]; how many slots from 0 on a row sees [R]; the
        slots behind these that it sees, ascending [R, M], and how many [R]; its own slot [R]."""
        segments, rows = self.segments, self.segments[-1].stop
        tables = np.zeros((len(segments), max(len(s.cache.pages) for s in segments)), np.int64)
        sequence, run, own_count, slot = (np.zeros(rows, np.int64) for _ in range(4))
        width = max(0 if s.visible is None or s.visible.numel() == 1 else s.visible.shape[1] for s in segments)
        own = np.zeros((rows, width), np.int64)
        for number, s in enumerate(segments):
            part = slice(s.start, s.stop)
            tables[number, : len(s.cache.pages)] = s.cache.pages
            sequence[part], slot[part] = number, np.arange(s.begin, s.begin + s.stop - s.start)
            if s.visible is None or s.visible.numel() == 1:
                run[part] = slot[part] + 1
            else:
                visible = s.visible.numpy()
                run[part], own_count[part] = s.cache.length, visible.sum(1)
                # A stable sort puts the visible columns first.
                own[part, : visible.shape[1]] = np.argsort(~visible, axis=1, kind="stable") + s.cache.length
        return tables, sequence, run, own, own_count, slot
