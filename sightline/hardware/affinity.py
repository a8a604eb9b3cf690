"""Bind each process of a host to CPUs (`--run.affinity`), from the kernel's own tables; no NVML is needed.

A device's CPUs are those that the kernel lists for its place on the PCI bus. Where it has none, or torch does not know
that place, ranks take the sockets in turn.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sightline.errors import UsageError
from sightline.hardware.devices import Device
from sightline.hardware.limits import bound_cores

SYSTEM = Path("/sys")


@dataclass(frozen=True)
class Topology:
    """The CPUs that this process was given, and how they lie."""

    socket: dict[int, int]  # of every CPU that may be used
    core: dict[int, int]  # the same number for CPUs that are threads of one core
    near: tuple[frozenset[int], ...] = ()  # CPUs beside the device of each local rank; empty where unknown

    def homes(self, ranks: int) -> list[frozenset[int]]:
        """Return the CPUs to choose from per rank: those beside its device, else those of a socket, taken in turn."""
        sockets = sorted(set(self.socket.values()))
        found = []
        for rank in range(ranks):
            near = self.near[rank].intersection(self.socket) if rank < len(self.near) else frozenset()
            own = sockets[rank % len(sockets)]
            found.append(near or frozenset(cpu for cpu, socket in self.socket.items() if socket == own))
        return found


def cores_for(mode: str, local_rank: int, local_size: int, topology: Topology) -> list[int]:
    """Return the CPUs of one rank, rising. The unique modes give no CPU to two ranks; socket_unique gives whole cores,
    with all their threads, as long as there are as many cores as ranks."""
    homes = topology.homes(local_size)
    home = sorted(homes[local_rank])
    if mode == "socket":
        return home
    if mode == "single":
        return home[:1]
    if local_size > len(topology.socket):
        raise UsageError(
            f"run.affinity={mode}: {local_size} processes on this host cannot have CPUs of their own, they may use "
            f"{len(topology.socket)}; use --run.affinity socket or disabled"
        )
    if mode == "single_unique":
        return [_one_each(homes, topology)[local_rank]]
    mates = [rank for rank in range(local_size) if homes[rank] == homes[local_rank]]
    if not _can_split(homes):
        # Homes that share a part, or are too small: everybody takes an even share of everything.
        home, mates = sorted(topology.socket), list(range(local_size))
    return _share(home, mates.index(local_rank), len(mates), mode == "socket_unique_interleaved", topology)


def _can_split(homes: Sequence[frozenset[int]]) -> bool:
    different = set(homes)
    return sum(map(len, different)) == len(frozenset().union(*different)) and all(
        len(home) >= homes.count(home) for home in different
    )


def _share(cpus: Sequence[int], at: int, of: int, interleaved: bool, topology: Topology) -> list[int]:
    """Return part `at` of `of`, as even as can be: every so many cores, or neighbours."""
    by_core: dict[int, list[int]] = {}
    for cpu in cpus:
        by_core.setdefault(topology.core[cpu], []).append(cpu)
    units = [by_core[core] for core in sorted(by_core)] if len(by_core) >= of else [[cpu] for cpu in cpus]
    chosen = units[at::of] if interleaved else units[at * len(units) // of : (at + 1) * len(units) // of]
    return sorted(cpu for unit in chosen for cpu in unit)


def _one_each(homes: Sequence[frozenset[int]], topology: Topology) -> list[int]:
    """Return one CPU per rank, the first of its home on a core that no rank has; later ones take what is left."""
    taken: list[int] = []
    for home in homes:
        free = [cpu for cpu in sorted(topology.socket) if cpu not in taken]
        cores = {topology.core[cpu] for cpu in taken}
        # At home before elsewhere matters more than a core of one's own: memory of another socket is far.
        taken.append(min(free, key=lambda cpu: (cpu not in home, topology.core[cpu] in cores, cpu)))
    return taken


def bind(mode: str, device: Device, local_rank: int, local_size: int) -> list[int]:
    """Bind this process, and what it starts from now on, to its CPUs; return them."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError(f"run.affinity={mode}: {sys.platform} cannot bind a process to CPUs; use disabled")
    topology = read_topology(_given(), near_devices(device, local_size))
    cpus = cores_for(mode, local_rank, local_size, topology)
    os.sched_setaffinity(0, cpus)
    return cpus


@cache
def _given() -> frozenset[int]:
    """Return the CPUs before the first binding: a second run in the process must not take a share of a share."""
    return frozenset(os.sched_getaffinity(0))


def cpu_share(local_size: int) -> int:
    """Return how many CPUs this process may count on: those it is bound to, but no more than its even part of what the
    host gave to its ranks."""
    now = bound_cores()
    given = len(_given()) if _given.cache_info().currsize else now
    return max(1, min(now, given // local_size))


def read_topology(cpus: frozenset[int], near: tuple[frozenset[int], ...] = (), system: Path = SYSTEM) -> Topology:
    """Read the topology from the kernel; without it, one socket of cores with one thread each."""
    socket, core = {}, {}
    for cpu in sorted(cpus):
        about = system / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        package = _read(about / "physical_package_id")
        socket[cpu] = int(package) if package.isdecimal() else 0
        core[cpu] = min(parse_cpus(_read(about / "thread_siblings_list")) | {cpu})
    return Topology(socket, core, near)


def near_devices(device: Device, local_size: int, system: Path = SYSTEM) -> tuple[frozenset[int], ...]:
    """Return the CPUs beside the device of each local rank n, which is device n; empty if torch does not know."""
    if device.kind != "cuda":
        return ()
    indices = range(local_size) if local_size > 1 else [device.index]
    found = []
    for index in indices:
        about: Any = torch.cuda.get_device_properties(index)
        if not hasattr(about, "pci_bus_id"):  # older torch
            return ()
        place = (about.pci_domain_id, about.pci_bus_id, about.pci_device_id)
        name = "{:04x}:{:02x}:{:02x}.0".format(*place)
        found.append(parse_cpus(_read(system / "bus" / "pci" / "devices" / name / "local_cpulist")))
    return tuple(found)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a list of the kernel: `0-3,8` is 0, 1, 2, 3, 8; return nothing for any other text."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() if dash else not last):
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
