"""The ranks of a run: who we are, sums and gathers over all, and a side group on the CPU for small flags."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sightline.hardware import launch
from sightline.hardware.devices import Device

CONNECT_TIMEOUT = timedelta(minutes=10)  # long: before the first step ranks compile and index data at their own pace

_CONNECTIONS = itertools.count()


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks; every method is a plain no-op or identity when there is only one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    side_group: Any = None  # gloo; so that a flag never waits for the device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which have one shape, one after the other along dimension 0."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces float tensors by their mean over ranks, in one collective."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors by those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Waits for all ranks, on the CPU."""
        if self.size > 1:
            dist.barrier(group=self.side_group)

    def start_max(self, value: int) -> tuple[Tensor, Any]:
        """Begins a maximum over ranks on the side group; wait on the handle, then read the tensor."""
        flag = torch.tensor([value])
        return flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.side_group, async_op=True)

    def close(self) -> None:
        """Leaves the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def detect() -> World:
    """Rank and size as the launcher says them; without one, the only rank."""
    place = launch.detect(os.environ)
    if place is None or place.size == 1:
        return World()
    if place.launcher != "torchrun":
        # torch's rendezvous, loader processes and the drivers of some devices know torchrun's names only.
        os.environ.update(place.as_environ())
    return World(place.rank, place.size, place.local_rank)


def local_size(world: World) -> int:
    """Ranks on this host, as the launcher says; where nobody does, all of them."""
    return max(world.local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))


def connect(world: World, device: Device) -> World:
    """Joins the other ranks over the device's own collective backend."""
    if world.size == 1:
        return world
    # A launcher's store outlives a group: without a name of its own, a second group (train, then evaluate, in one
    # process) would find the addresses of the first and wait for them.
    store = dist.PrefixStore(f"sightline-{next(_CONNECTIONS)}", _store(world))
    dist.init_process_group(
        device.backend, timeout=CONNECT_TIMEOUT, rank=world.rank, world_size=world.size, store=store
    )
    return World(world.rank, world.size, world.local_rank, dist.new_group(backend="gloo"))


@cache
def _store(world: World) -> Any:
    """Where ranks find each other, as MASTER_ADDR and MASTER_PORT say; one for the life of the process."""
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=CONNECT_TIMEOUT))
    return store
