"""Encoded images or whole volumes of a split, kept in memory for slow disks; all loader processes of a rank share it.

It fills as images are read, so the first epoch takes no longer than without a cache. The memory has no name in any
file system, so it disappears with the last process, however that ends.
"""

from __future__ import annotations

import mmap
import multiprocessing.reduction
import os
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np

from sightline.errors import UsageError
from sightline.hardware.launch.place import ranks_on_host

Mode = Literal["auto", "off", "ram"]
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
# Share of the available memory; the rest is for batches, the model's host side and other users of the machine.
AUTO_SHARE = 0.5
_HEAD = 8  # bytes per image: its length and its checksum


def available_bytes() -> int:
    """Return how much memory is free without swapping, within the limit of the container; 0 if unknown."""
    found = {}
    try:
        for line in MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if value.split() and value.split()[0].isdecimal():
                found[name] = int(value.split()[0]) << 10
    except OSError:
        return 0
    limits = [int(text) for file in CGROUP_LIMITS if (text := _text(file)).isdecimal()]
    return min([found.get("MemAvailable", found.get("MemTotal", 0)), *limits])


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def decide(mode: Mode, room: np.ndarray, what: str, things: str = "images") -> tuple[bool, str]:
    """Decide whether to keep things of these sizes in memory; return that and a note for the user."""
    ranks = max(1, ranks_on_host(default=1))
    needed, available = ranks * int(room.sum()), available_bytes()
    per_rank = f" for {ranks} ranks" if ranks > 1 else ""
    numbers = f"{len(room)} {things} of {what} need {_size(needed)}{per_rank}, {_size(available)} are available"
    if mode == "off" or needed == 0:
        return False, ""
    if not hasattr(os, "memfd_create"):
        if mode == "ram":
            raise UsageError("--data.cache ram needs Linux; use --data.cache off")
        return False, "cache OFF: only Linux has the memory it needs"
    if mode == "ram" and needed > available:
        raise UsageError(f"--data.cache ram: {numbers}; use --data.cache auto or off")
    if mode == "auto" and needed > AUTO_SHARE * available:
        return False, f"cache OFF: {numbers}, of which auto takes {AUTO_SHARE:.0%}"
    return True, f"cache ON: {numbers}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


class ImageCache:
    """Memory for every image; a stored length of 0 means that the image is not there yet."""

    def __init__(self, room: np.ndarray):
        ends = np.cumsum(room, dtype=np.int64)
        self.starts = _HEAD * len(room) + np.concatenate([[0], ends[:-1]])
        self.room = room
        descriptor = os.memfd_create("sightline-images", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEAD * len(room) + int(ends[-1]))  # pages are allocated when they are written
        self._attach(descriptor)

    def _attach(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.block = mmap.mmap(descriptor, 0)
        self.heads = np.frombuffer(self.block, np.uint32, 2 * len(self.room)).reshape(-1, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {"starts": self.starts, "room": self.room, "shared": multiprocessing.reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.starts, self.room = state["starts"], state["room"]
        self._attach(state["shared"].detach())

    def __del__(self, close: Any = os.close) -> None:
        if "descriptor" in vars(self):  # the mapping closes itself
            close(self.descriptor)

    def get(self, index: int) -> bytes | None:
        """Return an image, or None if it is not complete: another process may be writing it."""
        length, checksum = self.heads[index].tolist()
        if not 0 < length <= self.room[index]:
            return None
        start = int(self.starts[index])
        data = self.block[start : start + length]
        return data if google_crc32c.value(data) == checksum else None

    def put(self, index: int, data: bytes) -> None:
        """Store an image, unless it has grown since it was listed."""
        if len(data) > self.room[index]:
            return
        start = int(self.starts[index])
        self.block[start : start + len(data)] = data
        self.heads[index] = len(data), google_crc32c.value(data)


class VolumeCache(ImageCache):
    """Memory for every volume: too large to copy for every crop, so `view` reads them in place."""

    def _attach(self, descriptor: int) -> None:
        super()._attach(descriptor)
        self._whole: set[int] = set()  # verified by this process; a complete volume never changes

    def view(self, index: int) -> np.ndarray | None:
        """Return the bytes of a volume without copying, or None if it is not complete."""
        if index not in self._whole:
            if self.get(index) is None:
                return None
            self._whole.add(index)
        return np.frombuffer(self.block, np.uint8, int(self.heads[index, 0]), int(self.starts[index]))
