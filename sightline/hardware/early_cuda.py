"""Start CUDA beside the imports of a run: its driver and context need no torch, its libraries are read from disk.

Nothing here decides or reports anything: what fails is silent, and the run meets it where it starts CUDA by itself.
Imports no torch before it is given a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sightline.errors import SightlineError
from sightline.hardware import launch
from sightline.hardware.limits import CUDA_QUEUES

if TYPE_CHECKING:
    from sightline.hardware.devices import Device
    from sightline.recipe.recipe import Run

NODE = "/dev/nvidiactl"  # there where the driver is
# Libraries that the first step reads, by how their names begin. A page fault reads 128 KiB and waits for it; asked for
# as a whole, they come at the speed of the disk.
READ_AHEAD = ("libcudnn_graph", "libcudnn_engines_precompiled", "libcudnn_heuristic", "libcublasLt", "libtorch_cuda")
_begun = threading.Event()
_loading: threading.Thread | None = None


def has_begun() -> bool:
    """Return whether this process may be starting CUDA: it must then end without C's exit handlers."""
    return _begun.is_set()


def begin(run: Run) -> None:
    """Create the context of the device that a run asks for, and read CUDA's libraries, on threads of their own. Call it
    only in a process that trains on this device itself; a run that starts ranks or binds itself to CPUs does not."""
    kind, _, number = run.device.partition(":")
    libraries = _libraries() if kind in ("auto", "cuda") and os.path.exists(NODE) else []
    if not libraries or run.devices or run.binds_cpus:
        return
    try:
        place = launch.detect(os.environ)
    except SightlineError:  # reported by who asks next
        return
    index = int(number) if number.isdecimal() else place.local_rank if place else 0
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it starts CUDA
    os.environ.setdefault(*CUDA_QUEUES)  # as devices.select does, after CUDA has read it
    _begun.set()
    # Daemons: a refused command does not wait for them.
    threading.Thread(target=_create_context, args=(index,), name="early CUDA", daemon=True).start()
    threading.Thread(target=_read_ahead, args=(libraries,), name="early libraries", daemon=True).start()


def is_expected(device: str) -> bool:
    """Return whether a run with this --run.device will have an accelerator, as far as files tell: one that is named, or
    a GPU of CUDA that this process may see."""
    kind = device.partition(":")[0]
    if kind != "auto":
        return kind != "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip().lower() in ("", "-1", "none")
    return not hidden and os.path.exists(NODE) and bool(_libraries())


def _libraries() -> list[Path]:
    """Return CUDA's libraries of the torch that is installed; [] if it is built without CUDA."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    torch = Path(found.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return []
    return [*(torch / "lib").glob("*.so*"), *(torch.parent / "nvidia").glob("*/lib/*.so*")]


def _create_context(index: int) -> None:
    """Retain the primary context, the one that CUDA's runtime and torch use; torch then finds it there."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _read_ahead(libraries: Sequence[Path]) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    for wanted in READ_AHEAD:
        for path in (path for path in libraries if path.name.startswith(wanted)):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(descriptor)


def load_libraries(device: Device, precision: str, trains: bool = True) -> None:
    """Let cuDNN and cuBLAS load, on a thread, beside what the host does until the first step: one small convolution and
    product, which leave no trace but the libraries."""
    global _loading
    if device.kind == "cuda":
        _loading = threading.Thread(target=_convolve, args=(device, precision, trains), name="cuDNN")
        _loading.start()


def wait() -> None:
    """Wait for `load_libraries`: while a graph is captured, no other thread may allocate."""
    if _loading:
        _loading.join()


def _convolve(device: Device, precision: str, trains: bool) -> None:
    import torch
    from torch.nn import functional as F

    from sightline.hardware.precision import DTYPES

    with contextlib.suppress(RuntimeError), torch.cuda.device(device.torch_device):
        kind: dict[str, Any] = {"device": device.torch_device, "dtype": DTYPES[precision], "requires_grad": trains}
        image, weight = torch.ones(8, 64, 16, 16, **kind), torch.ones(64, 64, 3, 3, **kind)
        maps = F.conv2d(image.to(memory_format=torch.channels_last), weight, padding=1)
        total = F.linear(maps.mean((2, 3)), weight[:, :, 0, 0]).sum()
        if trains:
            total.backward()
        device.synchronize()
