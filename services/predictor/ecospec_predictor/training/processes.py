"""One process, or several under torchrun: who runs what, and where the weights are whole. FSDP shards them over the processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import SettingsError


@dataclass(frozen=True)
class Processes:
    """rank and world: which process this is, of how many. device: where it computes."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def largest(self, *values: float) -> list[float]:
        """The largest of all processes, so that all decide alike."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def sum(self, value: torch.Tensor) -> float:
        if self.world > 1:
            dist.all_reduce(value)
        return float(value.item())

    def shard(self, network: nn.Module, objective: nn.Module) -> None:
        """Spread weights, gradients and optimiser state over the processes, layer by layer."""
        if self.world == 1:
            return
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(self.device.type, (self.world,))
        for layer in _layers(network):
            fully_shard(layer, mesh=mesh)
        fully_shard(objective, mesh=mesh)


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The decoder's layers, whatever the network: what its outermost lists of modules hold."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


@contextmanager
def join(device: str) -> Iterator[Processes]:
    """device: auto, cpu or cuda. Raises SettingsError for a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("Setting training.device is cuda, but no CUDA device was found; allowed here: auto, cpu.")
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(0, 1, torch.device(kind))
        return
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), world, place)
    finally:
        dist.destroy_process_group()
