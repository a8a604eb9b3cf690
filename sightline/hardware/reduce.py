"""Sum gradients on two levels: within each host, between hosts, and handed out within each host again.

A communication hook for DistributedDataParallel; what crosses the network between hosts is one bucket per host and
not one per rank.
"""
# Without postponed annotations: torch compares those of a hook, and as text they would be refused.

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sightline.errors import UsageError
from sightline.hardware.devices import Device
from sightline.hardware.world import World, local_size


def reduce_by_host(network: DistributedDataParallel, world: World, device: Device) -> str:
    """Let `network` sum its gradients on two levels; return a note for the user. Call it on all ranks."""
    mine = torch.tensor([world.local_rank, local_size(world)])
    places = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(places, mine, group=world.side_group)
    each = _ranks_per_host([(int(place[0]), int(place[1])) for place in places])
    if each in (1, world.size):
        where = "every host has one rank" if each == 1 else f"all {world.size} ranks are on one host"
        return f"run.reduce=hierarchical: {where}, which leaves one level; gradients are summed flat"
    network.register_comm_hook(_Levels(world, each, device), _reduce)
    return f"run.reduce=hierarchical: gradients are summed within {world.size // each} hosts of {each} ranks each first"


def _ranks_per_host(places: Sequence[tuple[int, int]]) -> int:
    """Return the ranks per host, from (local rank, ranks of its host) of every rank."""
    each = places[0][1]
    for rank, place in enumerate(places):
        if place != (rank % each, each) or len(places) % each:
            raise UsageError(
                f"run.reduce=hierarchical needs hosts of equally many ranks, numbered host by host: of {len(places)} "
                f"ranks, {each} are on the host of rank 0, and rank {rank} is local rank {place[0]} of {place[1]}; "
                f"start as many on every host, or use --run.reduce flat"
            )
    return each


class _Levels:
    """The two groups of this rank, made once, and the memory that the exchange needs besides the buckets."""

    def __init__(self, world: World, each: int, device: Device):
        first, place = world.rank - world.local_rank, world.local_rank
        self.host = _group(range(first, first + each))
        self.peers = _group(range(place, world.size, each))
        self.each = each
        self.ranks = world.size
        self.device = device
        self.stream = device.api.Stream() if device.has_streams else None
        self._scratch: dict[int, tuple[int, Tensor | None, Tensor]] = {}

    def scratch(self, bucket: dist.GradBucket) -> tuple[Tensor | None, Tensor]:
        """Return (padded, share): room for the bucket if it cannot be cut evenly, and for the part this rank sums."""
        buffer, index = bucket.buffer(), bucket.index()
        # The buckets of the first step are not those of the others.
        if index not in self._scratch or self._scratch[index][0] != len(buffer):
            rows = -(-len(buffer) // self.each)
            padded = buffer.new_zeros(rows * self.each) if rows * self.each > len(buffer) else None
            self._scratch[index] = len(buffer), padded, buffer.new_empty(rows)
        return self._scratch[index][1:]

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Switch to the stream on which buckets travel one after another while the backward pass continues.

        One after another and not as callbacks of each other, which may run in another order on another rank. Devices
        without streams wait here.
        """
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(self.device.api.current_stream())
        return self.device.api.stream(self.stream)


def _reduce(levels: _Levels, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return the mean of a bucket over all ranks."""
    buffer = bucket.buffer()
    padded, share = levels.scratch(bucket)
    done: Future[Tensor] = Future(devices=[buffer.device] if levels.stream is not None else [])
    with levels.beside():
        buffer.div_(levels.ranks)  # before the sum, as torch does: fp16 would overflow
        if padded is not None:
            padded[: len(buffer)].copy_(buffer)
        whole = buffer if padded is None else padded
        dist.reduce_scatter_tensor(share, whole, group=levels.host)
        dist.all_reduce(share, group=levels.peers)
        dist.all_gather_into_tensor(whole, share, group=levels.host)
        if padded is not None:
            buffer.copy_(padded[: len(buffer)])
        done.set_result(buffer)  # on this stream: whoever waits for it waits for what was queued here
    return done


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make a group by its members alone: else all ranks would wait for each of the groups of all hosts in turn."""
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return group
