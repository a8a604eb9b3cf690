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


def prove_descriptors(wanted: int) -> None:
    """Raise UsageError where this process may not open that many more files, pipes and shared tensors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = psutil.Process().num_fds() + wanted
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    most = max(needed, USUAL_FILES)
    remedy = f"give `ulimit -n {most}` before the command"
    if hard != resource.RLIM_INFINITY and hard < most:
        remedy = f"the hard limit is {hard}: start the container with --ulimit nofile={most}, or ask who runs the host"
    raise UsageError(
        f"this process may open {soft} files (ulimit -n) and needs {needed}; {remedy}; --run.workers 0 needs the fewest"
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
        return path.read_text().strip()
    except OSError:
        return ""
