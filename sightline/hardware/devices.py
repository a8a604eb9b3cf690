"""The devices to train on: cuda, hpu, xpu, npu, mps, cpu, one row each in one table. Nothing else asks for a kind.

Importing this file touches no device. To add one, add a row.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import psutil
import torch
from torch import nn

from sightline.errors import UsageError
from sightline.hardware import onednn
from sightline.hardware.limits import CUDA_QUEUES, memory_limit

if TYPE_CHECKING:
    from sightline.recipe.recipe import Recipe

Precision = Literal["fp32", "bf16", "fp16"]
# Values of ONEDNN_MAX_CPU_ISA that keep oneDNN from the instructions for bf16.
ONEDNN_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")  # the two workspaces with which cuBLAS repeats its bits


def _cuda_has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def _xpu_has_bf16() -> bool:
    return torch.xpu.is_bf16_supported(including_emulation=False)


def _npu_has_bf16() -> bool:
    return bool(torch.npu.is_bf16_supported())  # type: ignore[attr-defined]  # torch.npu comes with torch_npu


def _forbidden_bf16() -> str:
    """Return the value with which the user keeps oneDNN from the instructions for bf16; "" if there is none."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    return limit if limit.upper() in ONEDNN_WITHOUT_BF16 else ""


def _cpu_has_bf16() -> bool:
    """Return whether there is AMX or AVX512-BF16 and oneDNN may use it; else bf16 is about 8 times slower than fp32."""
    if _forbidden_bf16():
        return False
    flags = _cpu_fact("flags").split()
    if flags:
        return "avx512_bf16" in flags or "amx_bf16" in flags
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())  # systems without /proc/cpuinfo


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Device:
    """One device of one kind, with the facts the engine reads."""

    kind: str
    index: int = 0
    package: str = ""
    """Import that teaches torch this kind; "" where torch knows it."""
    node: str = ""
    """A file that exists where the hardware does, even if torch cannot use it."""
    backend: str = "gloo"
    """Backend of torch.distributed."""
    autocast: tuple[Precision, ...] = ("bf16", "fp16")
    """Types that --train.precision may name besides fp32, in the order `auto` prefers them."""
    has_bf16: Callable[[], bool] = _always
    """True if the hardware itself computes in bf16; emulation does not count."""
    auto_fp16: bool = True
    """True if `auto` may fall back to fp16 where bf16 is not native."""
    is_indexed: bool = True
    """True if a process names its device by a number."""
    is_shared: bool = False
    """True if any number of processes may use it at once."""
    shared_backend: str = ""
    """Backend for ranks that share one device, because its own refuses them; "" if they cannot share."""
    sharers: int = 1
    """Ranks of this host that share it: more than one only if the user names one device for all."""
    can_pin: bool = False
    has_streams: bool = False
    has_graphs: bool = False
    compile_backend: str = ""
    """Backend of torch.compile; "" where there is none."""
    tries_kernels: bool = False
    """Whether its library can try kernels of convolutions, which takes time and may save some."""
    compile_auto: bool = False
    """True if `--run.compile auto` switches it on."""
    compile_needs: str = ""
    """A package that the compile backend generates code for, besides a C++ compiler."""
    tested: bool = False
    """False: written from documentation, never run by us."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.is_indexed else torch.device(self.kind)

    @property
    def api(self) -> Any:
        """Return the module torch.KIND: its streams, events and graphs."""
        return getattr(torch, self.kind)

    def activate(self) -> None:
        """Make this the process's current device, as collectives and streams expect, and initialise it."""
        if self.is_indexed:
            self.api.set_device(self.torch_device)

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        if self.is_indexed:
            self.api.synchronize(self.torch_device)
        else:
            self.api.synchronize()

    def resolve_precision(self, wanted: str) -> Precision:
        """Return the precision to use: `auto` is what this device does well; what it cannot do is an error."""
        if wanted == "auto":
            return self._preferred_precision()
        for known in get_args(Precision):
            if wanted == known and (known == "fp32" or known in self.autocast):
                return known
        usable = ", ".join(["auto", "fp32", *self.autocast])
        raise UsageError(f"precision '{wanted}' is not available on {self.kind}; use --train.precision with {usable}")

    def precision_of(self, recipe: Recipe) -> Precision:
        """Return the precision of a recipe here. Its own bf16, which nobody typed, falls back to fp32 where it would
        only be emulated."""
        wanted = recipe.train.precision
        if wanted == "bf16" and recipe.is_own("train.precision"):
            return "bf16" if "bf16" in self.autocast and self.has_bf16() else "fp32"
        return self.resolve_precision(wanted)

    def _preferred_precision(self) -> Precision:
        if "bf16" in self.autocast and self.has_bf16():
            return "bf16"
        return "fp16" if self.auto_fp16 and "fp16" in self.autocast else "fp32"

    def no_bf16_because(self) -> str:
        """Return why bf16 would only be emulated here; "" if the hardware itself computes in it."""
        if self.has_bf16():
            return ""
        if self.kind != "cpu":
            return f"{self.name()} does not compute in bf16"
        limit = _forbidden_bf16()
        return f"ONEDNN_MAX_CPU_ISA={limit} rules it out" if limit else "this CPU has neither AVX512_BF16 nor AMX"

    def peak_memory_bytes(self) -> int:
        """Return the most memory that tensors took so far (of the cpu: the whole process); 0 if unknown."""
        if self.kind == "cpu":
            # ru_maxrss counts bytes on macOS and KiB elsewhere.
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        peak = getattr(self.api, "max_memory_allocated", None)
        return int(peak(self.torch_device)) if peak else 0

    def reset_peak_memory(self) -> None:
        """Let `peak_memory_bytes` count from now on, where the device can."""
        if self.kind == "cpu":
            with contextlib.suppress(OSError):  # Linux only
                Path("/proc/self/clear_refs").write_text("5", "utf-8")
        elif reset := getattr(self.api, "reset_peak_memory_stats", None):
            reset(self.torch_device)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the memory that this process has taken and what is free, on the cpu for all; 0 if unknown."""
        if self.kind == "cpu":
            rss: int = psutil.Process().memory_info().rss
            return rss, int(min(psutil.virtual_memory().available, memory_limit()))
        own, free = (getattr(self.api, name, None) for name in ("memory_reserved", "mem_get_info"))
        return (int(own(self.torch_device)), int(free(self.torch_device)[0])) if own and free else (0, 0)

    def free_cached_memory(self) -> None:
        """Return memory that torch keeps for later tensors to the device."""
        if empty := getattr(self.api, "empty_cache", None):
            empty()

    def name(self) -> str:
        """Return its name for people, e.g. 'NVIDIA H200'."""
        if self.kind == "cpu":
            return _cpu_fact("model name") or platform.processor() or platform.machine()
        describe = getattr(self.api, "get_device_name", None)
        return str(describe(self.torch_device)) if describe else self.kind

    def sharing_note(self) -> str:
        """Return a note for the user where several ranks share this device; "" if it has one."""
        if self.sharers == 1:
            return ""
        return (
            f"{self.sharers} ranks share {self.torch_device} and exchange tensors by {self.backend}, through the CPU: "
            f"{KINDS[self.kind].backend} refuses several ranks on one device; for tests, not for speed"
        )

    def count(self) -> int:
        """Count the devices of this kind."""
        return int(self.api.device_count())


# In the order `auto` tries them.
KINDS: dict[str, Device] = {
    row.kind: row
    for row in (
        Device(
            kind="cuda",
            node="/dev/nvidiactl",
            backend="nccl",
            shared_backend="gloo",
            has_bf16=_cuda_has_bf16,
            can_pin=True,
            has_streams=True,
            has_graphs=True,
            compile_backend="inductor",
            tries_kernels=True,
            compile_auto=True,
            compile_needs="triton",
            tested=True,
        ),
        Device(
            kind="hpu",
            package="habana_frameworks.torch",
            node="/dev/accel/accel0",
            backend="hccl",
            autocast=("bf16",),
            is_indexed=False,  # the driver gives each process the module of its local rank
            can_pin=True,
            has_streams=True,
            compile_backend="hpu_backend",
        ),
        Device(
            kind="xpu",
            backend="xccl",
            has_bf16=_xpu_has_bf16,
            can_pin=True,
            has_streams=True,
            compile_backend="inductor",
            compile_needs="triton",
        ),
        Device(
            kind="npu",
            package="torch_npu",
            node="/dev/davinci_manager",
            backend="hccl",
            has_bf16=_npu_has_bf16,
            can_pin=True,
            has_streams=True,
        ),
        Device(kind="mps", is_indexed=False, compile_backend="inductor"),
        # fp16 on a CPU is for testing the loss scaler: measured 12 times slower than fp32, so never chosen.
        Device(
            kind="cpu",
            has_bf16=_cpu_has_bf16,
            auto_fp16=False,
            is_indexed=False,
            is_shared=True,
            compile_backend="inductor",
            tested=True,
        ),
    )
}


def unavailable_because(kind: str) -> str:
    """Return why this kind cannot be used here; "" if it can."""
    row = KINDS[kind]
    if row.package:
        top = row.package.partition(".")[0]
        if importlib.util.find_spec(top) is None:
            return f"{top} is not installed"
        try:
            importlib.import_module(row.package)
        except (ImportError, OSError, RuntimeError) as error:  # a broken driver installation shows up here
            return f"{row.package} cannot be imported: {error}"
    if not row.api.is_available() or row.count() < 1:
        seen = f", although {row.node} exists: the driver or this build of torch does not fit it"
        return f"torch {torch.__version__} finds none" + (seen if row.node and Path(row.node).exists() else "")
    return ""


def available() -> list[str]:
    """Return the kinds usable here, in the order `auto` prefers them; the cpu always ends the list."""
    return [kind for kind in KINDS if not unavailable_because(kind)]


def select(wanted: str = "auto", local_rank: int = 0, local_size: int = 1) -> Device:
    """Return the device of this process: `auto`, a kind, or a kind and number such as cuda:1, which all ranks of the
    host then share."""
    os.environ.setdefault(*CUDA_QUEUES)
    kind, colon, number = wanted.partition(":")
    if wanted == "auto":
        kind = available()[0]
    if kind not in KINDS or (colon and not number.isdecimal()):
        raise UsageError(f"device '{wanted}' is unknown; use auto or one of {', '.join(KINDS)}, e.g. cuda or cuda:1")
    reason = unavailable_because(kind)
    if reason:
        raise UsageError(f"device '{wanted}' is not available: {reason}; available here: {', '.join(available())}")
    row = KINDS[kind]
    if colon:
        return _named(row, int(number), max(local_size, local_rank + 1))
    if row.is_shared:
        return row
    if local_rank >= row.count():
        raise UsageError(
            f"process {local_rank} of this host has no {kind} of its own: there are {row.count()}; "
            f"start at most {row.count()} processes per host, or use --run.device cpu"
        )
    return replace(row, index=local_rank)


def _named(row: Device, index: int, ranks: int) -> Device:
    if not row.is_indexed and index > 0:
        raise UsageError(f"device '{row.kind}:{index}' cannot be numbered; use --run.device {row.kind}")
    if index >= row.count():
        last = row.count() - 1
        raise UsageError(f"device '{row.kind}:{index}' does not exist; the last one here is {row.kind}:{last}")
    if ranks == 1 or row.is_shared:
        return replace(row, index=index)
    if not row.shared_backend:
        raise UsageError(
            f"device '{row.kind}:{index}' was asked for by {ranks} processes of this host, but each process needs its "
            f"own; use --run.device {row.kind} (CUDA_VISIBLE_DEVICES and its like choose which)"
        )
    return replace(row, index=index, backend=row.shared_backend, sharers=ranks)


def set_deterministic(on: bool) -> None:
    """Choose equal bits from equal inputs, or the fastest kernels. Call it before the device is initialised."""
    if on:
        _require_cublas_workspace()
    if torch.are_deterministic_algorithms_enabled() != on:  # it imports torch's compiler: a second of every start
        torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.deterministic = on
    torch.backends.cudnn.benchmark = not on  # the autotuner may choose another kernel in the next run
    # torch's own defaults, said aloud so that nothing imported earlier changes what fp32 means: TF32 in
    # convolutions, not in matrix products. The newer fp32_precision names make torch.compile fail
    # (pytorch#166387), so the older ones are used.
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False


def follow_rules() -> None:
    """Let cuDNN choose kernels by its own rules. To try them out, as a long training does, takes half a second for
    every shape of a batch, and a network that is not trained for long meets each too seldom."""
    torch.backends.cudnn.benchmark = False


NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")  # in the RuntimeError of cpu and mps


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a device, or the host, has no memory left."""
    is_told = isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)
    return is_told or isinstance(error, torch.OutOfMemoryError | MemoryError)


def place(model: nn.Module, device: Device, channels_last: bool) -> nn.Module:
    """Move a model to a device, in the layout that is asked for."""
    model = model.to(device.torch_device)
    if channels_last:
        lay_channels_last(model)
    if device.kind == "cpu":
        onednn.avoid(model)
    return model


def lay_channels_last(model: nn.Module) -> None:
    """Store the weights of convolutions, as the kernels expect them, with the channels last in memory."""
    is_3d = any(parameter.dim() == 5 for parameter in model.parameters())
    model.to(memory_format=torch.channels_last_3d if is_3d else torch.channels_last)


def _require_cublas_workspace() -> None:
    found = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if found in CUBLAS_DETERMINISTIC:
        return
    if found is None and not torch.cuda.is_initialized():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_DETERMINISTIC[0]
        return
    state = f"is '{found}'" if found is not None else "was not set before CUDA was initialised"
    raise UsageError(
        f"CUBLAS_WORKSPACE_CONFIG {state}, but --train.deterministic needs {' or '.join(CUBLAS_DETERMINISTIC)}; "
        f"export CUBLAS_WORKSPACE_CONFIG={CUBLAS_DETERMINISTIC[0]} before starting"
    )


def _cpu_fact(name: str) -> str:
    """Return the first value of `name: value` of /proc/cpuinfo, "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
