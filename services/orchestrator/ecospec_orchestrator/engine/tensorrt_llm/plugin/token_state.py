"""The predictor's state inside the engine's graph: a table from token to experts, the same on every rank at every step.

The arrays are those of ecospec_proto.token_table.TokenTable. They lie in tensors that never move, so a captured graph reads the newest
table; new contents come between two steps, in the same one on all ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .ranks import Ranks

logger = logging.getLogger(__name__)

_CHUNK = 1024  # table rows that are unpacked at a time


@dataclass(frozen=True)
class TableSize:
    """What the state is allocated for. rows: most tokens with an answer of their own."""

    vocab_size: int
    moe_layers: int
    experts: int
    top_k: int
    rows: int

    @property
    def words(self) -> int:
        """uint64 words of one token's experts, all layers."""
        return self.moe_layers * -(-self.experts // 64)


@dataclass(frozen=True)
class TableArrays:
    """token_ids: int [seen], ascending; experts: integer ids [seen, moe_layers, top_k]; popular: [moe_layers, top_k], for any other
    token."""

    token_ids: np.ndarray
    experts: np.ndarray
    popular: np.ndarray


class TokenState:
    """Implements select_graph.DeviceFootprints. Nothing is known until the first load."""

    def __init__(self, size: TableSize, device: torch.device | str) -> None:
        self.size = size
        # The last row answers for all tokens that have none of their own.
        with torch.inference_mode(False):  # made in inference mode, they could not be written outside of it
            self._bits = torch.zeros(size.rows + 1, size.words, dtype=torch.int64, device=device)
            self._row = torch.full((size.vocab_size,), size.rows, dtype=torch.int64, device=device)
            self._loaded = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._row[tokens.clamp(0, self.size.vocab_size - 1)]
        return self._bits[row], self._loaded.expand(tokens.shape)

    def load(self, table: TableArrays) -> None:
        """Replace the contents in place, in the order of the current stream. Raises ValueError for a table that does not fit."""
        check_table(table, self.size)
        seen = len(table.token_ids)
        answers = np.concatenate([table.experts, table.popular[None].astype(table.experts.dtype)])
        bits = torch.from_numpy(pack_ids(answers, self.size.experts).view(np.int64))
        self._bits[:seen].copy_(bits[:seen])
        self._bits[self.size.rows].copy_(bits[seen])
        self._row.fill_(self.size.rows)
        ids = torch.from_numpy(table.token_ids.astype(np.int64)).to(self._row.device)
        self._row.index_copy_(0, ids, torch.arange(seen, device=self._row.device))
        self._loaded.fill_(True)


def check_table(table: TableArrays, size: TableSize) -> None:
    """Raises ValueError in one sentence."""
    seen = len(table.token_ids)
    wanted = (seen, size.moe_layers, size.top_k)
    if seen > size.rows or table.experts.shape != wanted or table.popular.shape != wanted[1:]:
        raise ValueError(
            f"the table has {seen} tokens and experts {table.experts.shape}, popular {table.popular.shape}; at most {size.rows} "
            f"tokens and (tokens, {size.moe_layers}, {size.top_k}) are expected: it is of another target."
        )
    for name, array, end in (
        ("token", table.token_ids, size.vocab_size),
        ("expert", table.experts, size.experts),
        ("popular expert", table.popular, size.experts),
    ):
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < end:
            raise ValueError(
                f"the table has {name} ids {int(array.min())} to {int(array.max())}; 0 to {end - 1} is allowed."
            )


def pack_ids(ids: np.ndarray, experts: int) -> np.ndarray:
    """Expert ids [n, layers, k] -> uint64 bitsets [n, layers * words], bit e of word w is expert 64 w + e. As
    ecospec_proto.codec.pack_bitsets, without its compiler."""
    count, layers, _ = ids.shape
    width = 64 * -(-experts // 64)
    bits = np.zeros((count, layers * (width // 64)), np.uint64)
    for at in range(0, count, _CHUNK):
        part = ids[at : at + _CHUNK].astype(np.int64)
        flags = np.zeros((len(part), layers, width), np.bool_)
        np.put_along_axis(flags, part, True, 2)
        packed = np.packbits(flags, axis=2, bitorder="little").view("<u8")
        bits[at : at + _CHUNK] = packed.reshape(len(part), -1)
    return bits


class TableFeed:
    """Brings new tables to all ranks. Rank 0 reads them in a thread of its own, and waits for the first one only; every period_steps
    steps it tells the others whether there is one, and if so which: a wait of all ranks for each other, once in so many steps."""

    def __init__(
        self, state: TokenState, ranks: Ranks, period_steps: int, read: Callable[[], TableArrays | None]
    ) -> None:
        """read: rank 0's; a table if there is a newer one than it returned before, else None. May take its time; may raise
        OSError or ValueError, after which the old table stays."""
        self._state, self._ranks, self._period, self._read = state, ranks, period_steps, read
        self._steps = 0
        self._reader: threading.Thread | None = None
        self._found: TableArrays | None = None
        self._complaint = ""
        self.loads = 0

    def step(self) -> None:
        """Before every step, on every rank."""
        due = self._steps % self._period == 0
        self._steps += 1
        if not due:
            return
        table = self._take() if self._ranks.rank == 0 else None
        seen = self._ranks.broadcast(torch.tensor([-1 if table is None else len(table.token_ids)]))
        if (count := int(seen)) < 0:
            return
        size = self._state.size
        ids, experts = (
            torch.empty(count, dtype=torch.int32),
            torch.empty(count + 1, size.moe_layers, size.top_k).short(),
        )
        if table is not None:
            ids.copy_(torch.from_numpy(table.token_ids.astype(np.int32)))
            experts[:count].copy_(torch.from_numpy(table.experts.astype(np.int16)))
            experts[count].copy_(torch.from_numpy(table.popular.astype(np.int16)))
        self._ranks.broadcast(ids)
        self._ranks.broadcast(experts.view(torch.uint8))  # gloo knows no int16
        self._state.load(TableArrays(ids.numpy(), experts[:count].numpy(), experts[count].numpy()))
        self.loads += 1

    def _take(self) -> TableArrays | None:
        """What the reader found; starts it again when it is done."""
        if self._reader is None:
            self._look()
        elif self._reader.is_alive():
            return None
        found, self._found = self._found, None
        self._reader = threading.Thread(target=self._look, name="ecospec-table", daemon=True)
        self._reader.start()
        return found

    def _look(self) -> None:
        try:
            found = self._read()
            if found is not None:
                check_table(
                    found, self._state.size
                )  # here, because a rank that raises in step() leaves the others waiting
            self._found = found
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:  # once, not at every look
                self._complaint = str(error)
                logger.warning("The table of experts stays as it is: %s", error)


class TableFile:
    """Reads a token table whenever its file has been replaced. load: path -> its arrays; raises ValueError or OSError."""

    def __init__(self, path: Path, load: Callable[[Path], TableArrays]) -> None:
        self._path, self._load = path, load
        self._seen: tuple[int, int, int] | None = None

    def __call__(self) -> TableArrays | None:
        found = self._path.stat()
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        if version == self._seen:
            return None
        table = self._load(self._path)
        self._seen = version
        return table
