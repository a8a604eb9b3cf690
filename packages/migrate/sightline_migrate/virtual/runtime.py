"""The virtual CUDA runtime: devices, memory, properties and random numbers, as a script expects them.

The target's own functions (torch.xpu.memory_allocated) come first if it has them; see rules/cuda.py.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sightline_migrate.session import Session

GPU_STATE_BYTES = 16  # a CUDA generator's state: seed and offset; a host generator's is thousands of bytes

ARITHMETIC = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
"""what a CPU needs to compute in a 16-bit type"""


class DeviceProperties:
    """The result of get_device_properties, with every attribute of torch's own object."""

    def __init__(self, name: str, capability: tuple[int, int], memory: int, cores: int, index: int) -> None:
        self.name = name
        self.major, self.minor = capability
        self.total_memory = memory
        self.multi_processor_count = cores
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = 2048
        self.max_threads_per_block = 1024
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = 166912
        self.shared_memory_per_multiprocessor = 167936
        self.L2_cache_size = 40 * 2**20
        self.clock_rate = 0
        self.memory_clock_rate = 0
        self.memory_bus_width = 0
        self.gcnArchName = ""
        self.pci_bus_id = index
        self.pci_device_id = 0
        self.pci_domain_id = 0
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, f"{platform.node()}-{index}")

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


class Runtime:
    """One per session; the current device is per thread, as in CUDA."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.target = session.target
        self._local = threading.local()
        self._first_seed = torch.initial_seed()
        self._own_seed: int | None = None
        self.sync_debug_mode = 0

    # devices

    def device_count(self) -> int:
        return self.target.count(self.session.options.device_count)

    def current_device(self) -> int:
        native = self.target.native("current_device")
        return int(native()) if native is not None else getattr(self._local, "index", 0)

    def index(self, device: Any) -> int:
        """Return the index of a device argument; raise CUDA's error for a missing device."""
        index = self.session.devices.index_of(device, self.current_device())
        if index >= max(self.device_count(), 1):
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: {device!r}, but device_count() is {self.device_count()}"
                + ("; use a larger --device-count" if self.target.is_cpu else "")
            )
        return index

    def set_device(self, device: Any) -> None:
        if isinstance(device, int) and device < 0:  # CUDA ignores it
            return
        index = self.index(device)
        native = self.target.native("set_device")
        if native is not None:
            native(index)
        self._local.index = index

    def synchronize(self, device: Any = None) -> None:
        """Wait for the target; on the CPU work is done when a call returns."""
        native = self.target.native("synchronize")
        if native is not None:
            native()

    def capability(self, device: Any = None) -> tuple[int, int]:
        major, minor = self.session.options.capability.split(".")
        return int(major), int(minor)

    def properties(self, device: Any = None) -> DeviceProperties:
        index = self.session.devices.index_of(device, self.current_device())
        real = self.target.native("get_device_properties")
        there = real(index) if real is not None else None
        cores = getattr(there, "multi_processor_count", None) or getattr(there, "max_compute_units", None)
        memory = getattr(there, "total_memory", None) or total_memory()
        return DeviceProperties(
            self.name(device), self.capability(), int(memory), int(cores or os.cpu_count() or 1), index
        )

    def name(self, device: Any = None) -> str:
        native = self.target.native("get_device_name")
        if native is not None:
            return str(native(self.session.devices.index_of(device, self.current_device())))
        return f"{processor_name()} (as cuda)"

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        native = self.target.native("is_bf16_supported")
        if native is not None:
            return bool(native())
        return including_emulation or has_arithmetic(torch.bfloat16)

    def arch_list(self) -> list[str]:
        return ["sm_{}{}".format(*self.capability())]

    # memory: on the CPU that of the process

    def memory_allocated(self, device: Any = None) -> int:
        native = self.target.native("memory_allocated") or self.target.native("current_allocated_memory")
        return int(native()) if native is not None else resident_bytes("VmRSS")

    def max_memory_allocated(self, device: Any = None) -> int:
        native = self.target.native("max_memory_allocated") or self.target.native("driver_allocated_memory")
        return int(native()) if native is not None else resident_bytes("VmHWM")

    def reset_peak(self, device: Any = None) -> None:
        """Reset the peak: Linux does so when 5 is written to this file; elsewhere the lifetime peak remains."""
        path = "/proc/self/clear_refs"
        if os.access(path, os.W_OK):
            with open(path, "w", encoding="utf-8") as file:
                file.write("5")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return available_memory(), total_memory()

    def memory_usage(self, device: Any = None) -> int:
        free, total = self.mem_get_info()
        return round(100 * (total - free) / total)

    def memory_stats(self, device: Any = None) -> OrderedDict[str, Any]:
        """Return all of CUDA's keys: bytes of the process; counts and values without a counterpart are zero."""
        stats: OrderedDict[str, Any] = OrderedDict()
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes"):
            for pool in ("all", "large_pool", "small_pool"):
                is_whole = pool == "all" and kind != "inactive_split_bytes"
                for metric, value in (("current", now), ("peak", peak), ("allocated", peak), ("freed", peak - now)):
                    stats[f"{kind}.{pool}.{metric}"] = value if is_whole else 0
        for kind in ("allocation", "segment", "active", "inactive_split", "oversize_allocations", "oversize_segments"):
            pools = ("",) if kind.startswith("oversize") else (".all", ".large_pool", ".small_pool")
            for pool in pools:
                stats |= {f"{kind}{pool}.{metric}": 0 for metric in ("current", "peak", "allocated", "freed")}
        counts = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
        return stats | dict.fromkeys(counts, 0) | {"max_split_size": -1}

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        now, peak = self.memory_allocated(), self.max_memory_allocated()
        free, total = self.mem_get_info()
        rows = (("in use by the process", now), ("peak of the process", peak), ("free", free), ("total", total))
        lines = [f"memory of device {self.current_device()}: {self.name()}"]
        return "\n".join([*lines, *(f"  {text:24}{value / 2**20:12.0f} MiB" for text, value in rows)])

    # random numbers; on the CPU one generator serves host and device

    def manual_seed(self, seed: int) -> None:
        """Seed the host's generator, unless torch.manual_seed already did: it also serves as the device's."""
        if torch.initial_seed() in (self._first_seed, self._own_seed):
            torch.default_generator.manual_seed(int(seed))
            self._own_seed = torch.initial_seed()

    def seed(self) -> None:
        """Do nothing: a new random seed for the device must not change the host's."""

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        native = self.target.native("get_rng_state")
        states = range(max(self.device_count(), 1))
        return [torch.get_rng_state() if native is None else native(index) for index in states]

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "cuda") -> None:
        """Restore a state; ignore one saved on a GPU, which belongs to another kind of generator."""
        if new_state.numel() > GPU_STATE_BYTES:
            torch.set_rng_state(new_state)

    def set_rng_state_all(self, new_states: Any) -> None:
        native = self.target.native("set_rng_state")
        if native is None:
            for state in list(new_states)[:1]:  # on the CPU all devices share one generator
                self.set_rng_state(state)
            return
        for index, state in enumerate(new_states):
            native(state, index)

    def default_generators(self) -> tuple[torch.Generator, ...]:
        return (torch.default_generator,) * max(self.device_count(), 1)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Return True if this CPU computes in that type; converting back and forth runs at a tenth of the speed."""
    capabilities = torch.cpu.get_capabilities()
    is_arm = "sve" in capabilities or "bf16" in capabilities
    names = ("bf16", "arm_bf16") if is_arm and dtype is torch.bfloat16 else ARITHMETIC.get(dtype, ())
    return any(capabilities.get(name, False) for name in names)


def processor_name() -> str:
    """Return the CPU model's name as the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    found = _proc_bytes("/proc/meminfo", "MemAvailable")
    return found if found is not None else total_memory() - resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """Return the process's memory: VmRSS is the current value, VmHWM the peak."""
    found = _proc_bytes("/proc/self/status", field)
    if found is not None:
        return found
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _proc_bytes(path: str, field: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux
    return None
