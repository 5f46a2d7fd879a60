"""The ranks of one executor: what rank 0 decides reaches the others, over gloo and host memory.

It is a group of our own beside the engine's communicators, so that neither MPI nor Ray matters and nothing of theirs is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONNECT_SECONDS = 600.0  # ranks come up one after the other, each after loading its share of the weights
BROADCAST_SECONDS = 60.0  # far above any deadline of rank 0: beyond it, rank 0 is lost and so is the executor


class RanksError(RuntimeError):
    """A parallel layout in which the ranks cannot decide together; one sentence."""


@dataclass(frozen=True)
class Ranks:
    """group: None for a single rank. All methods are collective: every rank calls them in the same order."""

    rank: int
    count: int
    group: Any = None

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank. tensor: on the host, contiguous, of the same shape and dtype everywhere; overwritten."""
        if self.group is not None and tensor.numel():
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.rootTensor = 0
            options.timeout = timedelta(seconds=BROADCAST_SECONDS)
            self.group.broadcast([tensor], options).wait()
        return tensor


def join(rank: int, count: int, address: str) -> Ranks:
    """Meet the other ranks at address ("host:port", where rank 0 listens); waits for all of them. Raises RanksError."""
    if count == 1:
        return Ranks(0, 1)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RanksError(
            f"the rendezvous of the ranks is {address!r}; host:port, reachable from all of them, is needed."
        )
    store = dist.TCPStore(host, int(port), count, rank == 0, timedelta(seconds=CONNECT_SECONDS))
    group = dist.ProcessGroupGloo(dist.PrefixStore("ecospec", store), rank, count, timedelta(seconds=BROADCAST_SECONDS))
    return Ranks(rank, count, group)


def check_mapping(mapping: Any) -> tuple[int, int]:
    """(rank, ranks) of the engine's mapping. Raises RanksError where ranks see different requests or different layers."""
    for name, allowed in (("pp_size", 1), ("cp_size", 1), ("enable_attention_dp", False)):
        if (value := getattr(mapping, name, allowed)) != allowed:
            raise RanksError(
                f"the engine runs with {name} {value}; EcoSpec needs {allowed}: all ranks must draft for the same batch."
            )
    return int(mapping.rank), int(mapping.world_size)
