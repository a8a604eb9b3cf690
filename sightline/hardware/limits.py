"""The share of the machine for this process: cores by affinity and by the cgroup's quota, memory by the cgroup, and
the files it may open."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from sightline.errors import UsageError

# Hardware queues of CUDA, 8 by default; read when CUDA starts. Beside a captured step torchvision's JPEG decoder
# reached 360 img/s with 8 and 8,300 with 32 (docs/why/input.md); we suppose that its streams shared a
# queue with the step.
CUDA_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
USUAL_FILES = 1024  # that a shell of most systems lets a process open
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return the cores this process may keep busy: those it is bound to, or fewer where the quota says so."""
    return max(1, math.ceil(min(bound_cores(), quota_cores())))


def bound_cores() -> int:
    """Return the CPUs this process is bound to; a quota of their time does not count."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota_cores() -> float:
    """Return the smallest CPU quota of our cgroup and its parents; infinite where there is none."""
    quotas = [math.inf]
    for folder in _cgroup_folders("cpu"):
        limit, _, period = _text(folder / "cpu.max").partition(" ")  # cgroup 2
        if not limit:
            limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if limit.isdecimal() and period.isdecimal():  # otherwise "max", "-1" or no such file
            quotas.append(int(limit) / int(period))
    return min(quotas)


def memory_limit() -> float:
    """Return the smallest memory limit of our cgroup and its parents, in bytes; infinite where there is none."""
    folders = list(_cgroup_folders("memory"))
    texts = [_text(folder / name) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    return min([math.inf, *(float(text) for text in texts if text.isdecimal())])


def memory_left() -> float:
    """Return how much more memory our cgroup and its parents let us take, in bytes; infinite where there is no limit.
    What the kernel has read ahead of files, and can drop, does not count as taken."""
    return min([math.inf, *filter(None, map(_left_in, _cgroup_folders("memory")))])


def _left_in(folder: Path) -> float | None:
    for limit, taken in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, used = _text(folder / limit), _text(folder / taken)
        if most.isdecimal() and used.isdecimal():
            stat = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
            files = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
            return max(1.0, float(most) - float(used) + float(files))
    return None


def prove_descriptors(wanted: int) -> None:
    """Let this process open that many more files, pipes and shared tensors; raise UsageError where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + wanted
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    most = max(needed, USUAL_FILES)
    if hard == resource.RLIM_INFINITY or needed <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        return
    raise UsageError(
        f"this process may open {hard} files (ulimit -Hn) and needs {needed}; start the container with "
        f"--ulimit nofile={most}, or ask who runs the host; --run.workers 0 needs the fewest"
    )


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Yield our cgroup and its parents, of version 1 and 2; in a container not all of them need to exist."""
    for line in _text(OWN_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = CGROUPS / controller if controllers else CGROUPS
        folder = top / path.lstrip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
