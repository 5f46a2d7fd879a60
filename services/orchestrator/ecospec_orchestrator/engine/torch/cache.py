"""The paged KV cache: one pool of pages for all sequences, bounded when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ...core import EcoSpecError
from ..base import CacheUse
from .geometry import KvLayout
from .prefix import Node, PrefixTree

PAGE_TOKENS = 64


class CacheFullError(EcoSpecError):
    """No page is left; the caller has to wait until a request ends."""


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens of one sequence."""
    return -(-tokens // PAGE_TOKENS)


def pages_in_budget(budget_bytes: int, layouts: Sequence[KvLayout], feature_size: int = 0) -> int:
    """Pages that the target's pool and the drafter's (one layout each) may have, the same number, beside float32 features
    [feature_size] of every token, which prefix reuse keeps with a page; 0 without it."""
    return budget_bytes // (PAGE_TOKENS * (sum(layout.bytes_per_token for layout in layouts) + feature_size * 4))


class KvPool:
    """keys: float32 [layers, pages, kv_heads, PAGE_TOKENS, key_size]; values the same with value_size. A page holds
    PAGE_TOKENS consecutive positions of a sequence, in every layer. With prefix_reuse a full page may belong to several
    sequences that begin alike, and outlives them until its place is needed."""

    def __init__(
        self, layout: KvLayout, pages: int, device: torch.device | str = "cpu", prefix_reuse: bool = False
    ) -> None:
        if pages < 1:
            raise ValueError(f"a pool of {pages} pages holds nothing; at least 1 is needed.")
        self.layout, self.pages, self.prefix_reuse = layout, pages, prefix_reuse
        shape = (layout.layers, pages, layout.kv_heads, PAGE_TOKENS)
        # Not touched before use: a page costs memory when it is first written.
        self.keys = torch.empty(*shape, layout.key_size, device=device)
        self.values = torch.empty(*shape, layout.value_size, device=device)
        self.generation = -1
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Forget every page. Sequences of an earlier generation give nothing back."""
        self.generation += 1
        self.prefixes = PrefixTree()
        self._free = list(range(self.pages - 1, -1, -1))  # low pages first: memory that was touched is used again
        self._users = [0] * self.pages

    @property
    def free_pages(self) -> int:
        """Pages that take() can hand out, those included that are only kept for their prefix."""
        return len(self._free) + self.prefixes.unused

    def use(self) -> CacheUse:
        free, kept = len(self._free), self.prefixes.unused
        return CacheUse(PAGE_TOKENS, self.pages, self.pages - free - kept, kept)

    def new_sequence(self) -> SequenceCache:
        return SequenceCache(self)

    def take(self, count: int) -> list[int]:
        """So many free pages. Raises CacheFullError, and then takes none."""
        if count > self.free_pages:
            raise CacheFullError(
                f"the KV cache has {self.free_pages} of {self.pages} pages left and {count} are needed; a request must end first."
            )
        while len(self._free) < count:
            self._free.append(self.prefixes.give_up())
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, page: int) -> None:
        """One more sequence uses a page of the prefix tree."""
        self._users[page] += 1
        self.prefixes.set_used(page)

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less of each page of a sequence, given in the order of its positions."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self.prefixes:
                    self.prefixes.set_unused(page)
                else:
                    self._free.append(page)

    def audit(self, sequences: Iterable[Sequence[int]]) -> str | None:
        """What is wrong, in numbers, when these page tables are all that is in use: every page must be free, or kept for its
        prefix, or in use by as many as counted. None when all is well."""
        users = np.zeros(self.pages, np.int64)
        for table in sequences:
            np.add.at(users, np.array(table, np.int64), 1)
        kept = np.zeros(self.pages, bool)
        kept[self.prefixes.pages] = True
        free = np.bincount(np.array(self._free, np.int64), minlength=self.pages)
        wrong = {
            "counted wrongly": (users != np.array(self._users)).sum(),
            "free twice": (free > 1).sum(),
            "free and in use": ((free > 0) & ((users > 0) | kept)).sum(),
            "lost": ((free == 0) & (users == 0) & ~kept).sum(),
            "kept, but not to be given up": abs(self.prefixes.unused - (kept & (users == 0)).sum()),
        }
        found = [f"{count} {what}" for what, count in wrong.items() if count]
        return f"of {self.pages} pages, {', '.join(found)}" if found else None

    def check_idle(self) -> str | None:
        """No sequence is in use: what is wrong with the pages, after starting afresh, or None."""
        problem = self.audit([])
        if problem is not None:
            self._start_afresh()
        return problem


class SequenceCache:
    """Keys and values of one sequence. length: committed positions; pending: uncommitted rows behind them, of the last verify.
    Pages in front that are full and shared are never written again: rows go behind the committed positions."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = self.pending = 0
        self._generation = pool.generation
        self._pending_rows: tuple[np.ndarray, torch.Tensor] | None = None
        # Where its pages are in the pool's tree, and the tokens and features behind that; None: it takes no part (any more).
        self._node: Node | None = pool.prefixes.root if pool.prefix_reuse else None
        self._shared_pages = 0
        self._behind: list[tuple[np.ndarray, torch.Tensor]] = []

    def reserve(self, positions: int) -> None:
        """Have pages for so many positions. Raises CacheFullError."""
        missing = pages_for(positions) - len(self.pages)
        if missing > 0:
            self.pages += self.pool.take(missing)

    def slots(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset within it, int64 [end - begin] each, of the positions from begin to end."""
        return self._slots(np.arange(begin, end))

    def gather(self, layer: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the first `end` positions: keys [kv_heads, end, key_size], values [kv_heads, end, value_size]."""
        pages = torch.tensor(self.pages[: pages_for(end)], dtype=torch.int64, device=self.pool.keys.device)
        keys, values = (
            store[layer, pages].transpose(0, 1).flatten(1, 2)[:, :end] for store in (self.pool.keys, self.pool.values)
        )
        return keys, values

    def reuse(self, tokens: np.ndarray) -> list[torch.Tensor]:
        """Begin an empty sequence with the pages that hold these tokens already; returns the features of these pages,
        float32 [PAGE_TOKENS, feature_size] each."""
        if self.length:
            raise ValueError(f"a sequence of {self.length} positions cannot begin with other pages; it must be empty.")
        found: list[torch.Tensor] = []
        for begin in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            node = None if self._node is None else self._node.children.get(_key(tokens[begin : begin + PAGE_TOKENS]))
            if node is None:
                break
            self.pool.share(node.page)
            self.pages.append(node.page)
            found.append(node.features)
            self._node = node
        self._shared_pages = len(found)
        self.length = PAGE_TOKENS * len(found)
        return found

    def append(self, tokens: np.ndarray, features: torch.Tensor) -> None:
        """Commit rows that were written behind the committed ones: tokens int64 [n], features [n, feature_size]."""
        self.length += len(tokens)
        if self._node is not None:
            self._behind.append((tokens, features))
            if self.length // PAGE_TOKENS > self._shared_pages:
                self._offer_full_pages()

    def pend(self, tokens: np.ndarray, features: torch.Tensor) -> None:
        """Rows were written behind the committed ones, and commit() will say which to keep."""
        self.pending, self._pending_rows = len(tokens), (tokens, features)

    @torch.inference_mode()
    def commit(self, rows: np.ndarray) -> None:
        """Keep the given pending rows, ascending, and drop the rest. No key or value is computed again."""
        if len(rows) and (rows[0] < 0 or rows[-1] >= self.pending):
            raise ValueError(f"rows {rows.tolist()} cannot be committed; the last step holds {self.pending} rows.")
        if not np.array_equal(rows, np.arange(len(rows))):
            (page, offset), (kept_page, kept_offset) = (
                self.slots(self.length, self.length + len(rows)),
                self._slots(self.length + rows),
            )
            for store in (self.pool.keys, self.pool.values):
                store[:, page, :, offset] = store[:, kept_page, :, kept_offset]
        if self._node is None or self._pending_rows is None:
            self.length += len(rows)
        else:
            tokens, features = self._pending_rows
            self.append(tokens[rows], features[rows])
        self.pending, self._pending_rows = 0, None

    def release(self) -> None:
        """Give all pages back; the sequence is not used afterwards."""
        if self._generation == self.pool.generation:
            self.pool.give_back(self.pages)
        self.pages, self.length, self.pending, self._pending_rows = [], 0, 0, None
        self._node, self._behind = None, []

    def _offer_full_pages(self) -> None:
        """Put the pages that got full into the pool's tree. A sequence whose next page is there already, because another one
        computed the same meanwhile, keeps its own and offers no more."""
        tokens = np.concatenate([part for part, _ in self._behind])
        features = torch.cat([part for _, part in self._behind])
        for number in range(self._shared_pages, self.length // PAGE_TOKENS):
            begin = PAGE_TOKENS * (number - self._shared_pages)
            rows = slice(begin, begin + PAGE_TOKENS)
            assert self._node is not None
            # A copy, so that it does not keep the rows around it alive.
            self._node = self.pool.prefixes.add(
                self._node, self.pages[number], _key(tokens[rows]), features[rows].clone()
            )
            if self._node is None:
                self._behind = []
                return
        done = PAGE_TOKENS * (self.length // PAGE_TOKENS - self._shared_pages)
        self._shared_pages = self.length // PAGE_TOKENS
        self._behind = [(tokens[done:], features[done:].clone())]

    def _slots(self, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        pages = np.array(self.pages, np.int64)
        device = self.pool.keys.device
        return (
            torch.from_numpy(pages[positions // PAGE_TOKENS]).to(device),
            torch.from_numpy(positions % PAGE_TOKENS).to(device),
        )


def _key(tokens: np.ndarray) -> bytes:
    return np.ascontiguousarray(tokens, np.int64).tobytes()
