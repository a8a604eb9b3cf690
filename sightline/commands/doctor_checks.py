"""Examine a machine before a run does: what is installed, what works, what would get in the way, and the remedy.

`examine` prints nothing; the `doctor` command shows its list. Each check really does what a run would do.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from PIL import Image

from sightline.data.loading.forkserver import START_METHOD
from sightline.errors import SightlineError
from sightline.hardware import devices, limits, onednn
from sightline.kernels import cudnn

PYTHON = (3, 11)
PACKAGES = {  # module -> its name for pip, least version
    "torch": ("torch", (2, 11)),
    "torchvision": ("torchvision", (0, 26)),
    "numpy": ("numpy", ()),
    "PIL": ("pillow", ()),
}
EXTRAS = {  # module -> its name for pip, what it is for
    "tensorboard": ("tensorboard", "curves in TensorBoard"),
    "nibabel": ("nibabel", "NIfTI volumes"),
    "faster_coco_eval": ("faster-coco-eval", "faster detection scores"),
    "timm": ("timm", "its networks, --model.arch timm:NAME"),
    "onnxruntime": ("onnxruntime", "`predict FILE.onnx`, and with onnxscript `export --format onnx`"),
    "onnxscript": ("onnxscript", "`export --format onnx`"),
}
GIB = 1 << 30
LEAST_MEMORY = 4 * GIB  # torch, its loader workers and a ResNet-50 at a small batch
LEAST_SHARED_MEMORY = GIB  # 3 batches ahead of 256 images of 224x224 are 0.1 GiB; Docker's default is 64 MiB
LEAST_DISK = 5 * GIB  # three ResNet-50 checkpoints with SGD state are 0.6 GiB, with room for logs and drawings
LEAST_OPEN_FILES = 1024
WORKER_TIMEOUT_S = 60
# benchmarks/allocators.py, 14 rounds of JPEGs: jemalloc 0.95 to 1.18, TcMalloc 0.93 to 1.15 of glibc's CPU time.
ALLOCATORS = "under our loader jemalloc and TcMalloc brought nothing (CPU time 1.015 and 1.016 of glibc's, measured)"


@dataclass(frozen=True)
class Check:
    """One finding. `fail` stops a run, `warn` slows or endangers it, `absent` is an optional part that is not there."""

    name: str
    status: Literal["ok", "absent", "warn", "fail"]
    value: str
    remedy: str = ""


def examine(folder: Path, every: bool = False) -> list[Check]:
    """Return the findings about this machine, for runs that write into `folder`; `every` adds two that no user needs to
    act on: the workaround for oneDNN and the allocator."""
    return [
        check_python(),
        *(check_package(module) for module in PACKAGES),
        *(check_device(kind) for kind in devices.KINDS),
        check_precision(),
        check_fused_convolutions(),
        *([check_onednn(), check_allocator()] if every else []),
        check_cores(),
        check_memory(),
        check_shared_memory(),
        check_open_files(),
        check_disk_space(folder),
        check_disk_writes(folder),
        check_jpeg(),
        check_workers(),
        check_compiler(),
        check_collectives(),
        *(check_extra(module) for module in EXTRAS),
    ]


def as_lines(checks: Sequence[Check], every: bool = False) -> list[str]:
    """Format a line per check; unless `every`, what is absent shares one."""
    shown = [check for check in checks if every or check.status != "absent"]
    lines = [
        f"{check.status:6} {check.name:24} {check.value}" + (f"  -> {check.remedy}" if check.remedy else "")
        for check in shown
    ]
    if absent := [check.name for check in checks if check not in shown]:
        lines.append(f"absent {'optional':24} {', '.join(absent)}; `sightline doctor --all` has reasons and remedies")
    return lines


def check_python() -> Check:
    return _judge_version("python", platform.python_version(), PYTHON, "install a newer Python")


def check_package(module: str) -> Check:
    package, least = PACKAGES[module]
    install = f"pip install --upgrade {package}" + (f">={_dotted(least)}" if least else "")
    try:
        version = importlib.import_module(module).__version__
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # torchvision built for another torch, e.g.
        return Check(package, "fail", f"cannot be imported: {error}", install)
    return _judge_version(package, str(version), least, install)


def check_device(kind: str) -> Check:
    row = devices.KINDS[kind]
    reason = devices.unavailable_because(kind)
    if reason:
        hidden = bool(row.node) and Path(row.node).exists()
        remedy = f"install the {kind} driver and the torch build that match" if hidden else ""
        untested = "" if row.tested else " (and untested by us)"
        return Check(kind, "warn" if hidden else "absent", f"not available: {reason}{untested}", remedy)
    try:
        total = float(torch.ones(8, device=row.torch_device).sum())
    except RuntimeError as error:  # e.g. no kernel image for this GPU
        return Check(kind, "fail", f"available, but a sum fails: {error}", f"use another device than {kind}")
    if total != 8:
        return Check(kind, "fail", f"available, but 8 ones sum to {total}", f"use another device than {kind}")
    value = f"{row.count()} x {row.name()}"
    if not row.tested:
        return Check(kind, "warn", f"{value}, untested", f"support for {kind} was written from documentation")
    return Check(kind, "ok", value)


def check_precision() -> Check:
    device = devices.select("auto")
    return Check("precision", "ok", f"auto is {device.resolve_precision('auto')} on {device.kind}")


def check_fused_convolutions() -> Check:
    """Run one of cuDNN's fused convolutions, which fp16 training uses where they work."""
    reason = cudnn.probe()
    version = torch.backends.cudnn.version()
    if not reason:
        return Check("fused convolutions", "ok", f"cuDNN {version} runs them right; --train.precision fp16 uses them")
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == cudnn.HOPPER
    remedy = "training works without them; --run.kernels off leaves them out" if is_hopper else ""
    return Check("fused convolutions", "warn" if is_hopper else "absent", f"not used: {reason}", remedy)


def check_onednn(probe: Callable[[], object] = onednn.probe) -> Check:
    """Look whether the workaround for upstream's issue is needed here; it is active either way."""
    if not torch.backends.mkldnn.is_available():
        return Check("oneDNN", "absent", "this torch is built without it")
    ending = _ending_of(probe)
    if not ending:
        return Check("oneDNN", "ok", f"needs no workaround for {onednn.ISSUE}: a probe without it is right")
    return Check("oneDNN", "ok", f"the workaround for {onednn.ISSUE} is active: a probe without it {ending}")


def check_cores() -> Check:
    cores, quota, threads = limits.usable_cores(), limits.quota_cores(), torch.get_num_threads()
    limit = f", cgroup quota of {quota:g}" if math.isfinite(quota) else ""
    value = f"{cores} usable of {os.cpu_count()} ({limits.bound_cores()} by affinity{limit})"
    if threads > cores:
        return Check("cores", "warn", f"{value}; torch uses {threads} threads", f"add --run.threads {cores}")
    return Check("cores", "ok", value)


def check_memory() -> Check:
    memory, limit = psutil.virtual_memory(), limits.memory_limit()
    value = f"{_gib(memory.available)} available of {_gib(memory.total)}"
    if limit < memory.total:
        value += f", cgroup limit {_gib(limit)}"
    remedy = f"free memory or raise the container's limit: at least {_gib(LEAST_MEMORY)} is expected"
    return _judge("memory", min(memory.available, limit) >= LEAST_MEMORY, value, remedy)


def check_allocator(maps: Path = Path("/proc/self/maps"), cache: Path = Path("/etc/ld.so.cache")) -> Check:
    """Look for jemalloc and TcMalloc: in this process, as LD_PRELOAD loads them, and among what the linker finds."""
    loaded, installed = _allocators(maps), _allocators(cache)
    if loaded:
        return Check("malloc", "ok", f"{loaded} is loaded; {ALLOCATORS}")
    found = f"{installed} is installed and not loaded" if installed else "neither jemalloc nor TcMalloc is installed"
    return Check("malloc", "ok", f"the C library's, {found}; {ALLOCATORS}")


def _allocators(place: Path) -> str:
    """Return the names of such libraries in a file of the system; "" without one, or without the file."""
    try:
        names = re.findall(rb"lib(?:jemalloc|tcmalloc)\w*\.so[.\d]*", place.read_bytes())
    except OSError:
        return ""
    return ", ".join(sorted({name.decode() for name in names}))


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir():
        return Check("shared memory", "absent", f"no {folder} on this system")
    usage = shutil.disk_usage(folder)
    value = f"{_gib(usage.free)} free of {_gib(usage.total)} in {folder}"
    remedy = "start the container with --shm-size=8g, or lower --run.prefetch, or use --run.workers 0"
    return _judge("shared memory", usage.free >= LEAST_SHARED_MEMORY, value, remedy)


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= LEAST_OPEN_FILES
    value = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft}"
    remedy = f"ulimit -n {LEAST_OPEN_FILES if hard == resource.RLIM_INFINITY else max(hard, soft)}"
    return _judge("open files", enough, value, remedy)


def check_disk_space(folder: Path) -> Check:
    place = _nearest_folder(folder)
    free = shutil.disk_usage(place).free
    remedy = f"free some space or choose another --run.out: at least {_gib(LEAST_DISK)} is expected"
    return _judge("disk space", free >= LEAST_DISK, f"{_gib(free)} free in {place}", remedy)


def check_disk_writes(folder: Path) -> Check:
    """Try what a checkpoint needs: write, fsync, rename over an older file, fsync of the folder."""
    place = _nearest_folder(folder)
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".sightline-doctor-") as name:
            _replace_durably(Path(name))
    except OSError as error:
        return Check("disk writes", "fail", f"{place}: {error}", "choose another --run.out or repair its permissions")
    return Check("disk writes", "ok", f"write, fsync and rename work in {place}")


def check_jpeg() -> Check:
    data = io.BytesIO()
    Image.new("RGB", (48, 32), (200, 100, 50)).save(data, "JPEG", quality=95)
    remedy = "reinstall pillow and simplejpeg"
    try:
        from sightline.data.decode import decode_rgb  # here: a decoder that cannot be imported is a finding

        pixels = np.asarray(decode_rgb(data.getvalue(), "an image made by doctor"))
    except (ImportError, OSError, RuntimeError, SightlineError) as error:
        return Check("jpeg", "fail", f"decoding fails: {error}", remedy)
    is_right = pixels.shape == (32, 48, 3) and np.abs(pixels.mean((0, 1)) - (200, 100, 50)).max() < 4
    return Check("jpeg", "ok", "decodes") if is_right else Check("jpeg", "fail", "decodes to wrong pixels", remedy)


def check_workers(work: Callable[[], object] = os.getpid) -> Check:
    """Start one process the way the loader does; by default it does nothing to speak of."""
    remedy = "use --run.workers 0, which loads in the training process"
    ending = _ending_of(work)
    if not ending:
        return Check("loader workers", "ok", f"{START_METHOD} starts processes")
    return Check("loader workers", "fail", f"a {START_METHOD} process {ending}", remedy)


def _ending_of(work: Callable[[], object]) -> str:
    """Return how a process that does `work` ends; "" if well."""
    context: Any = multiprocessing.get_context(START_METHOD)  # typeshed's base class lacks Process
    process = context.Process(target=work, daemon=True)
    try:
        process.start()
    except (OSError, EOFError, RuntimeError) as error:
        return f"cannot be started: {error}"
    process.join(WORKER_TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        return "hangs"
    return f"ends with {process.exitcode}" if process.exitcode else ""


def check_compiler() -> Check:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    packages = sorted({devices.KINDS[kind].compile_needs for kind in devices.available()} - {""})
    missing = [f"a C++ compiler ({' or '.join(wanted)})"] if compiler is None else []
    missing += [] if header.is_file() else [f"{header}"]
    missing += [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        remedy = "install it (e.g. apt install g++ python3-dev; pip install triton), or use --run.compile off"
        return Check("torch.compile", "warn", f"lacks {', '.join(missing)}", remedy)
    return Check("torch.compile", "ok", ", ".join([f"{compiler}", "Python.h", *packages]))


def check_collectives() -> Check:
    remedy = "install a torch build with these backends, or train on one device"
    if not torch.distributed.is_available():
        return Check("collectives", "warn", "this torch is built without torch.distributed", remedy)
    here = devices.available()  # imports the packages that bring backends of their own
    found = {name for name in _collectives(devices.KINDS) if torch.distributed.is_backend_available(name)}
    missing = [name for name in _collectives(here) if name not in found]
    value = ", ".join(sorted(found)) or "none"
    return _judge("collectives", not missing, value + (f"; lacks {', '.join(missing)}" if missing else ""), remedy)


def check_extra(module: str) -> Check:
    package, purpose = EXTRAS[module]
    if importlib.util.find_spec(module) is not None:
        return Check(package, "ok", "installed")
    return Check(package, "absent", f"not installed; needed only for {purpose}", f"pip install {package}")


def _judge(name: str, is_good: bool, value: str, remedy: str) -> Check:
    return Check(name, "ok", value) if is_good else Check(name, "warn", value, remedy)


def _judge_version(name: str, version: str, least: tuple[int, ...], remedy: str) -> Check:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= least:
        return Check(name, "ok", version)
    return Check(name, "fail", f"{version}; at least {_dotted(least)} is needed", remedy)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _nearest_folder(folder: Path) -> Path:
    """Return `folder`, or the parent in which a run would create it."""
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path(folder.anchor))


def _replace_durably(folder: Path) -> None:
    for text in ("older", "newer"):
        with open(folder / "part", "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "part", folder / "whole")
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _collectives(kinds: dict[str, devices.Device] | list[str]) -> list[str]:
    return sorted({devices.KINDS[kind].backend for kind in kinds})
