"""The device that replaces CUDA: which one, its capabilities, and how CUDA device names map to its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from sightline_migrate.options import MigrateError
from sightline_migrate.virtual import places

MOST_DEVICES = 64  # "cuda:0" to "cuda:63" are looked up in a table; more are parsed
KNOWN = ("hpu", "xpu", "npu", "musa", "mps")
COLLECTIVES = {"hpu": "hccl", "npu": "hccl", "musa": "mccl"}
"""registered on import of the vendor's package; torch knows the others"""
LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
"""variables of torchrun, Open MPI, MPICH and Slurm"""
NO_PROCESS_GROUP = "gloo"
HOST_MEMORY = ("cpu", "mps")
"""targets that use host memory: no pinned memory, no streams, no captured steps"""


@dataclass(frozen=True)
class Target:
    """One device type."""

    name: str
    """torch's name for the device type: cpu, xpu, ..."""
    module: ModuleType | None
    """torch.xpu and the like; None for cpu, since torch.cpu describes no separate device"""
    collective: str
    """process group backend that replaces nccl"""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def has_collectives(self) -> bool:
        """Return True if a process group takes the target's tensors; gloo sends those of the host."""
        return self.is_cpu or self.collective != NO_PROCESS_GROUP

    @property
    def tells_apart(self) -> bool:
        """True if target and host tensors can be told apart, so that the former can be shown as cuda."""
        return self.name != "cpu"

    def native(self, name: str) -> Any:
        """Return the target's own function or class for a torch.cuda name, or None."""
        return getattr(self.module, name, None) if self.module is not None else None

    def count(self, options_count: int = 0) -> int:
        """Return the number of devices that a script sees."""
        if is_hidden():
            return 0
        native = self.native("device_count")
        if native is not None:
            return int(native())
        return options_count or local_ranks() or 1


def is_hidden() -> bool:
    """Return True if the user hides all CUDA devices."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def local_ranks() -> int:
    """Return the number of ranks on this machine as the launcher tells it, or 0."""
    found = (os.environ.get(name, "") for name in LOCAL_RANKS)
    return next((int(text) for text in found if text.isdigit() and int(text) > 0), 0)


def real_cuda() -> bool:
    """Return True if a real CUDA device is available; called before anything is replaced."""
    return torch.cuda.is_available()


def choose(wanted: str) -> Target | None:
    """Return the target of that name; for `auto` the device that torch reports, or None for a real CUDA device."""
    if wanted == "cuda":
        raise MigrateError(f"target 'cuda' is the device to be replaced; use auto, cpu, {', '.join(KNOWN)}")
    if wanted == "auto":
        if real_cuda():
            return None
        wanted = _reported()
    if wanted == "cpu":
        return Target("cpu", None, _collective_of("cpu"))
    module = getattr(torch, wanted, None)
    if not isinstance(module, ModuleType):
        raise MigrateError(f"target {wanted!r}: there is no torch.{wanted}; install its backend, or use --target cpu")
    if not _is_available(module):
        raise MigrateError(f"target {wanted!r}: torch.{wanted} reports no device; use --target cpu")
    return Target(wanted, module, COLLECTIVES.get(wanted, _collective_of(wanted)))


def _reported() -> str:
    for name in KNOWN:
        module = getattr(torch, name, None)
        if isinstance(module, ModuleType) and _is_available(module):
            return name
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _is_available(module: ModuleType) -> bool:
    asked = getattr(module, "is_available", None)
    return bool(asked()) if asked is not None else True


def _collective_of(device: str) -> str:
    """Return the collective backend that is registered for a device type."""
    backends = getattr(getattr(torch.distributed, "Backend", None), "default_device_backend_map", {})
    return backends.get(device, NO_PROCESS_GROUP)


class DeviceMap:
    """Maps CUDA devices in any spelling to the target's: `table` is fast, `get` can be traced by dynamo."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.name = target.name
        self.is_cpu = target.is_cpu
        any_index = places.ANYWHERE if self.is_cpu else self.name
        self.table: dict[Any, Any] = {"cuda": any_index, torch.device("cuda"): any_index}
        for index in range(MOST_DEVICES):
            there = any_index if self.is_cpu else f"{self.name}:{index}"
            self.table |= {f"cuda:{index}": there, torch.device("cuda", index): there, index: there}
        if self.is_cpu:
            self.table[-1] = any_index  # get_device() of a host tensor, passed back as a device

    def get(self, device: Any) -> Any:
        """Return the target's device for a CUDA one, anything else unchanged. Simple enough for dynamo to trace."""
        if isinstance(device, torch.device):
            if device.type != "cuda":
                return device
            return self.at(device.index)
        if isinstance(device, str):
            if device == "cuda":
                return self.name
            return self.at(int(device[5:])) if device.startswith("cuda:") else device
        if isinstance(device, int) and not isinstance(device, bool):
            return self.at(device)
        return device

    def at(self, index: int | None) -> str:
        return self.name if index is None or self.is_cpu else f"{self.name}:{index}"

    def index_of(self, device: Any, current: int) -> int:
        """Return the index of a torch.cuda device argument: None, an int, "cuda:1", torch.device."""
        if device is None:
            return current
        if isinstance(device, int):
            return current if device < 0 else device
        device = torch.device(device) if isinstance(device, str) else device
        return current if device.index is None else int(device.index)
