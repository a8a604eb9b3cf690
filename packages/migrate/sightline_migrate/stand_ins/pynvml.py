"""pynvml for the target: device count, memory, load and names. Unknown values raise.

Errors have pynvml's own types, so that scripts which handle unsupported queries continue.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from sightline_migrate import session, zones
from sightline_migrate.reporting import record
from sightline_migrate.rules.table import Rule
from sightline_migrate.stand_ins.rules import counted_rules

ADVICE = "use torch.cuda instead, or skip it on this device"
REFUSED = {"pynvml.smi": ADVICE}

NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED = 2, 3


class NVMLError(Exception):
    """Base class of NVML errors; `value` is NVML's error code."""

    __module__ = "pynvml"

    def __init__(self, value: int = 999, text: str = "") -> None:
        super().__init__(value)
        self.value = value
        self.text = text

    def __str__(self) -> str:
        return self.text or f"NVML error {self.value}"


class NVMLError_InvalidArgument(NVMLError):
    """The device does not exist."""

    __module__ = "pynvml"


class NVMLError_NotSupported(NVMLError):
    """The target does not provide the value."""

    __module__ = "pynvml"


def _runtime() -> Any:
    active = session.active()
    assert active is not None, "the stand-in leaves sys.modules with its session"
    return active.runtime


def _not_supported(rule: Rule) -> NoReturn:
    site = zones.user_site(zones.caller())
    raise NVMLError_NotSupported(
        NVML_ERROR_NOT_SUPPORTED, f"{site}: {rule.name} is not available on {_runtime().target.name}; {ADVICE}"
    )


def _handle(index: int) -> int:
    """Return a handle, which is the index itself."""
    if not 0 <= int(index) < _runtime().device_count():
        text = f"device {index} does not exist: nvmlDeviceGetCount() is {_runtime().device_count()}"
        raise NVMLError_InvalidArgument(NVML_ERROR_INVALID_ARGUMENT, text)
    return int(index)


def _handle_by_uuid(uuid: str | bytes) -> int:
    text = uuid.decode() if isinstance(uuid, bytes) else uuid
    for index in range(_runtime().device_count()):
        if _uuid(index) == text:
            return index
    raise NVMLError_InvalidArgument(NVML_ERROR_INVALID_ARGUMENT, f"no device has the UUID {text}")


def _uuid(handle: int) -> str:
    return f"GPU-{_runtime().properties(handle).uuid}"


def _memory(handle: int, version: int | None = None) -> SimpleNamespace:
    free, total = _runtime().mem_get_info(handle)
    return SimpleNamespace(total=total, free=free, used=total - free, reserved=0, version=version)


def _utilization(handle: int) -> SimpleNamespace:
    """Return the load: on the CPU that of the last minute, else the accelerator's own value; raise if unknown."""
    runtime = _runtime()
    if runtime.target.is_cpu:
        load = min(100, round(100 * os.getloadavg()[0] / (os.cpu_count() or 1)))
    else:
        native = runtime.target.native("utilization")
        if native is None:
            _not_supported(_RULES["nvmlDeviceGetUtilizationRates"])
        load = int(native(handle))
    free, total = runtime.mem_get_info(handle)
    return SimpleNamespace(gpu=load, memory=round(100 * (total - free) / total))


def _temperature(handle: int, sensor: int = 0) -> int:
    """Return the temperature of the hottest zone, in degrees Celsius."""
    runtime = _runtime()
    native = runtime.target.native("temperature")
    if native is not None:
        return int(native(handle))
    found = _sensors() if runtime.target.is_cpu else []
    if not found:
        _not_supported(_RULES["nvmlDeviceGetTemperature"])
    return max(found)


def _sensors() -> list[int]:
    found = []
    for zone in Path("/sys/class/thermal").glob("thermal_zone*/temp"):
        try:
            found.append(int(zone.read_text("utf-8")) // 1000)
        except (OSError, ValueError):
            continue  # a disabled sensor cannot be read
    return found


def _processes(handle: int) -> list[SimpleNamespace]:
    used = _runtime().memory_allocated(handle)
    return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=used, gpuInstanceId=None, computeInstanceId=None)]


CORES_PER_WORD = 64


def _affinity(handle: int, cpuSetSize: int, *scope: int) -> list[int]:
    """Return the cores of the machine as a bit mask in words of 64 bits: all are equally near to the target."""
    words = [0] * cpuSetSize
    for core in range(os.cpu_count() or 1):
        if core // CORES_PER_WORD < cpuSetSize:
            words[core // CORES_PER_WORD] |= 1 << core % CORES_PER_WORD
    return words


@functools.cache
def driver_answers() -> bool:
    """Return True if NVIDIA's driver is there; the package alone, nvidia-ml-py, can only raise."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0
    except (OSError, AttributeError):
        return False


def _capability(handle: int) -> tuple[int, int]:
    found: tuple[int, int] = _runtime().capability(handle)
    return found


ANSWERS: dict[str, tuple[Callable[..., Any], str]] = {
    "nvmlInit": (lambda: None, "no effect"),
    "nvmlInitWithFlags": (lambda flags: None, "no effect"),
    "nvmlShutdown": (lambda: None, "no effect"),
    "nvmlDeviceGetCount": (lambda: _runtime().device_count(), "the value of torch.cuda.device_count"),
    "nvmlDeviceGetHandleByIndex": (_handle, "the index itself"),
    "nvmlDeviceGetHandleByUUID": (_handle_by_uuid, "the index of that device"),
    "nvmlDeviceGetIndex": (lambda handle: handle, "the index itself"),
    "nvmlDeviceGetMinorNumber": (lambda handle: handle, "the index itself"),
    "nvmlDeviceGetName": (lambda handle: _runtime().name(handle), "the target's name"),
    "nvmlDeviceGetUUID": (_uuid, "the UUID of torch.cuda.get_device_properties"),
    "nvmlDeviceGetMemoryInfo": (_memory, "memory of the target; of the machine on cpu"),
    "nvmlDeviceGetUtilizationRates": (_utilization, "load of the target; of the machine on cpu"),
    "nvmlDeviceGetTemperature": (_temperature, "the hottest readable sensor"),
    "nvmlDeviceGetCpuAffinity": (_affinity, "all cores of the machine"),
    "nvmlDeviceGetCpuAffinityWithinScope": (_affinity, "all cores of the machine"),
    "nvmlDeviceSetCpuAffinity": (lambda handle: None, "no effect: all cores are equally near"),
    "nvmlDeviceClearCpuAffinity": (lambda handle: None, "no effect"),
    "nvmlDeviceGetCudaComputeCapability": (_capability, "the value of --capability"),
    "nvmlDeviceGetComputeRunningProcesses": (_processes, "this process"),
    "nvmlDeviceGetGraphicsRunningProcesses": (lambda handle: [], "none"),
    "nvmlSystemGetDriverVersion": (platform.release, "release of the operating system"),
}
SILENT = (
    "nvmlDeviceGetPowerUsage nvmlDeviceGetEnforcedPowerLimit nvmlDeviceGetPowerManagementLimit nvmlDeviceGetFanSpeed "
    "nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetClockInfo nvmlDeviceGetMaxClockInfo nvmlDeviceGetPciInfo "
    "nvmlDeviceGetPcieThroughput nvmlDeviceGetSerial nvmlDeviceGetNvLinkState "
    "nvmlDeviceGetBAR1MemoryInfo nvmlDeviceGetPersistenceMode nvmlDeviceGetComputeMode "
    "nvmlDeviceGetMigMode nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2 nvmlSystemGetNVMLVersion "
    "nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetP2PStatus nvmlDeviceGetBrand nvmlDeviceGetArchitecture "
    "nvmlDeviceGetPerformanceState nvmlDeviceGetTotalEccErrors nvmlDeviceGetEncoderUtilization "
    "nvmlDeviceGetDecoderUtilization nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetNumGpuCores"
).split()
CONSTANTS = {
    "NVML_SUCCESS": 0,
    "NVML_ERROR_UNINITIALIZED": 1,
    "NVML_ERROR_INVALID_ARGUMENT": NVML_ERROR_INVALID_ARGUMENT,
    "NVML_ERROR_NOT_SUPPORTED": NVML_ERROR_NOT_SUPPORTED,
    "NVML_AFFINITY_SCOPE_NODE": 0,
    "NVML_AFFINITY_SCOPE_SOCKET": 1,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_CLOCK_GRAPHICS": 0,
    "NVML_CLOCK_SM": 1,
    "NVML_CLOCK_MEM": 2,
    "NVML_CLOCK_VIDEO": 3,
    "NVML_PCIE_UTIL_TX_BYTES": 0,
    "NVML_PCIE_UTIL_RX_BYTES": 1,
    "nvmlMemory_v2": 0x02000028,
}
_RULES = counted_rules("pynvml", {name: what for name, (_, what) in ANSWERS.items()})
_RULES |= counted_rules("pynvml", dict.fromkeys(SILENT, ADVICE), "refused")


def rules() -> list[Rule]:
    return list(_RULES.values())


def _answering(rule: Rule, answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        record.hit(rule, args, kwargs)
        return answer(*args, **kwargs)

    call.__name__ = call.__qualname__ = rule.name.rpartition(".")[2]
    call.__module__ = "pynvml"
    return call


def _silent(rule: Rule) -> Callable[..., Any]:
    return _answering(rule, lambda *args, **kwargs: _not_supported(rule))


MODULES: dict[str, dict[str, Any]] = {
    "pynvml": {
        **CONSTANTS,
        **{name: _answering(_RULES[name], answer) for name, (answer, _) in ANSWERS.items()},
        **{name: _silent(_RULES[name]) for name in SILENT},
        "NVMLError": NVMLError,
        "NVMLError_InvalidArgument": NVMLError_InvalidArgument,
        "NVMLError_NotSupported": NVMLError_NotSupported,
    }
}
