"""The ranks of a run: who we are, sums and gathers over all, and a side group on the CPU for small flags."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from sightline.errors import PeerLost, first_of
from sightline.hardware import launch
from sightline.hardware.devices import Device
from sightline.hardware.launch.place import LOOPBACK, STORE, ranks_on_host

CONNECT_TIMEOUT = timedelta(minutes=10)  # long: before the first step ranks compile and index data at their own pace
LET_GO_S = 0.1


def _no_one_watches(is_long: bool = False) -> None:
    """Do nothing: no watchdog waits for this rank."""


@dataclass(frozen=True)
class World:
    """One rank's view of all ranks; every method is a plain no-op or identity when there is only one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    side_group: Any = None  # gloo; so that a flag never waits for the device
    store: Any = None  # where ranks leave words for each other, also when no collective works any more
    beat: Callable[..., None] = _no_one_watches  # at the end of every step; see watchdog.py

    @property
    def is_main(self) -> bool:
        """True for rank 0, which writes the run folder."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape, concatenated along dimension 0."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks, on every rank, over the CPU; as bytes, since nothing that travels is
        unpickled."""
        if self.size == 1:
            return [text]
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.side_group)
        most = int(max(sizes))
        rows = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, torch.nn.functional.pad(mine, (0, most - len(mine))), group=self.side_group)
        return [bytes(row[: int(size)].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace float tensors by their mean over ranks, in one collective."""
        if self.size == 1 or not tensors:
            return
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def barrier(self) -> None:
        """Wait for all ranks, on the CPU."""
        if self.size > 1:
            dist.barrier(group=self.side_group)

    def start_max(self, value: int) -> tuple[Tensor, Any]:
        """Start a maximum over ranks on the side group; wait on the handle, then read the tensor."""
        flag = torch.tensor([value])
        return flag, dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.side_group, async_op=True)

    def largest(self, value: int) -> int:
        """Return the largest value over ranks, on every rank."""
        if self.size == 1:
            return value
        found, work = self.start_max(value)
        work.wait()
        return int(found)

    def close(self, is_lost: bool = False) -> None:
        """Leave the group; abort it where a rank was lost."""
        if self.size > 1 and dist.is_initialized():
            if is_lost and dist.group.WORLD is not None:
                dist.group.WORLD.abort()  # NCCL would wait for kernels that wait for the lost rank
            dist.destroy_process_group()
            # A thread of gloo may still hold the tensor of the last collective, and to drop it needs the interpreter;
            # once that is ending, the process would abort (seen with torch 2.15: one start in twenty on busy cores).
            time.sleep(LET_GO_S)


def detect() -> World:
    """Return rank and size as the launcher says; without one, the only rank."""
    place = launch.detect(os.environ)
    if place is None or place.size == 1:
        return World()
    if place.launcher != "torchrun":
        # torch's rendezvous, loader processes and the drivers of some devices know torchrun's names only.
        os.environ.update(place.as_environ())
        # mpirun makes a terminal for every rank, but shows its output line by line behind a tag: no place to draw on.
        os.environ["TERM"] = "dumb"
    return World(place.rank, place.size, place.local_rank)


def local_size(world: World) -> int:
    """Return the number of ranks on this host, as the launcher says; without one, all of them."""
    return max(world.local_rank + 1, ranks_on_host(world.size))


def connect(world: World, device: Device) -> World:
    """Join the other ranks over the device's own collective backend."""
    if world.size == 1:
        return world
    if _is_one_host(world):
        keep_to_loopback()
    store = _meet(_store(world), world)
    dist.init_process_group(
        device.backend, timeout=CONNECT_TIMEOUT, rank=world.rank, world_size=world.size, store=store
    )
    return replace(world, side_group=dist.new_group(backend="gloo"), store=store)


@contextmanager
def joined(world: World, device: Device, doing: str, remedy: str, say: Callable[[str], None]) -> Iterator[World]:
    """Join the other ranks for what is no training; a rank that is lost meanwhile is a PeerLost with this remedy."""
    is_lost = False
    try:
        world = connect(world, device)
        if note := device.sharing_note():
            say(note)
        yield world
    except Exception as error:
        if not (is_lost := is_loss(error)):
            raise
        raise PeerLost(f"a rank was lost while {doing}: its own output says why; {remedy} ({error})") from error
    finally:
        world.close(is_lost)


def meeting_place(world: World) -> str:
    """Return a note about a run on several hosts; "" on one, where nobody else can reach it."""
    if world.size == 1 or _is_one_host(world):
        return ""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"ranks meet at {where}, without passwords or encryption: the network between hosts must be trusted"


def keep_to_loopback() -> None:
    """Let gloo and NCCL listen where other hosts cannot reach them; interfaces that the user names are kept."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == LOOPBACK for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that a rank is lost or late; gloo has no error type of its own."""
    is_gloo = isinstance(error, RuntimeError) and ("gloo/" in str(error) or "pair closure" in str(error))
    return is_gloo or isinstance(error, dist.DistError) or _is_timeout(error)


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of collectives; torch before 2.12 has another name for it."""
    named = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    named(timeout)


def _is_timeout(error: BaseException) -> bool:
    """Return whether a store timed out; that of a file raises plain errors."""
    waited = ("Wait timeout", "Timeout waiting for key")
    return isinstance(error, dist.DistStoreError) or (isinstance(error, RuntimeError) and str(error).startswith(waited))


def _is_one_host(world: World) -> bool:
    """Return True only if the launcher says so: ranks started by hand may say nothing of their host."""
    return ranks_on_host(default=0) == world.size


@cache
def _store(world: World) -> Any:
    """Return the store where ranks find each other, as the launcher says; one per process."""
    if path := os.environ.get(STORE):
        store: Any = dist.FileStore(path)
        store.set_timeout(CONNECT_TIMEOUT)
        return store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if _is_one_host(world):
            os.environ["MASTER_ADDR"] = LOOPBACK
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        listener = _listener(address, port) if world.rank == 0 else None
        if listener is not None:
            return dist.TCPStore(address, port, world.size, True, CONNECT_TIMEOUT, master_listen_fd=listener)
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=CONNECT_TIMEOUT))
    return store


def _listener(address: str, port: int) -> int | None:
    """Open a socket at this address alone; torch by itself listens on all interfaces. Return None if only that works: a
    name may mean another address on other hosts, and a gateway may have the address that they know."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family).detach()
    except ValueError:
        return None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        why = os.strerror(error.errno or 0)
        raise PeerLost(f"ranks cannot meet at {address}:{port}: {why}; set MASTER_PORT to a free one") from error


def _meet(store: Any, world: World) -> Any:
    """Return a part of the store that only the ranks of this very group know.

    A launcher's store outlives a group: a second one (train, then evaluate) and an attempt after a rank was lost would
    find the addresses of the first. What is left of those, also greetings, must not count, so rank 0 answers every
    greeting it finds, and only who has just greeted waits for that answer.
    """
    if world.rank:
        greeting = uuid.uuid4().hex
        store.set(f"sightline/hello/{world.rank}", greeting)
        answer = f"sightline/welcome/{world.rank}/{greeting}"
        try:
            store.wait([answer], CONNECT_TIMEOUT)
        except RuntimeError as error:
            if not _is_timeout(error):
                raise
            raise PeerLost(f"rank 0 did not connect within {CONNECT_TIMEOUT}; its own output says why") from error
        group = store.get(answer).decode()
        store.set(f"sightline/ready/{group}/{world.rank}", "")
        return dist.PrefixStore(f"sightline/{group}", store)
    group = uuid.uuid4().hex
    deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    missing = list(range(1, world.size))
    while missing := [rank for rank in missing if not store.check([f"sightline/ready/{group}/{rank}"])]:
        for rank in missing:
            if store.check([f"sightline/hello/{rank}"]):
                greeting = store.get(f"sightline/hello/{rank}").decode()
                store.set(f"sightline/welcome/{rank}/{greeting}", group)
        if time.monotonic() > deadline:
            raise PeerLost(
                f"of {world.size} ranks {len(missing)} did not connect within {CONNECT_TIMEOUT}: "
                f"{first_of(missing, 8)}; their own output says why"
            )
        time.sleep(0.01)
    return dist.PrefixStore(f"sightline/{group}", store)
