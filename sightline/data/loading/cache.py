"""Images or volumes of a split, kept in memory; all loader processes of a host share it, whatever their rank.

It fills as images are read. The memory has no name in any file system, so it disappears with the last process, however
that ends. For that of a device see device_cache.py.
"""

from __future__ import annotations

import dataclasses
import mmap
import multiprocessing.reduction
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import google_crc32c
import numpy as np

from sightline.errors import UsageError
from sightline.hardware.limits import memory_left

if TYPE_CHECKING:
    from sightline.hardware.world import World
    from sightline.parts import DataConfig

Mode = Literal["auto", "off", "ram", "gpu"]
MEMINFO = Path("/proc/meminfo")
BOOT = Path("/proc/sys/kernel/random/boot_id")
# Share of the available memory; the rest is for batches, the model's host side and other users of the machine.
AUTO_SHARE = 0.5
SAMPLED = 64  # images from which the memory for all is estimated
SHARE_TIMEOUT = timedelta(minutes=1)  # until the first rank of a host has opened the memory
_HEAD = 8  # bytes per image: its length and its checksum
SIDES = 8  # bytes before the pixels of an image: height and width
_LEAST_ROOM = 2**20
_started: Counter[str] = Counter()  # caches of each kind so far: in the same order on all ranks
_alive: weakref.WeakSet[ImageCache] = weakref.WeakSet()


def read_once(data: DataConfig) -> DataConfig:
    """Return the config of data that are read once: `auto` keeps nothing of them, and a device need not be filled."""
    if getattr(data, "cache", "") in ("auto", "gpu"):
        return dataclasses.replace(data, cache="off")  # type: ignore[type-var]  # all are dataclasses
    return data


def available_bytes() -> int:
    """Return how much memory is free without swapping, within the limit of the container, and not promised to a cache
    that is still filling; 0 if unknown."""
    found = {}
    try:
        for line in MEMINFO.read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if value.split() and value.split()[0].isdecimal():
                found[name] = int(value.split()[0]) << 10
    except OSError:
        return 0
    free = min(found.get("MemAvailable", found.get("MemTotal", 0)), memory_left())
    return max(0, int(free) - sum(cache.promised() for cache in _alive))


@dataclass(frozen=True)
class Form:
    """A way to keep the things of a split in memory."""

    things: str  # e.g. "decoded images"
    room: np.ndarray  # (n,) int64: most bytes of each; what is not written takes no memory
    needed: int  # bytes in all
    is_decoded: bool = False


def exact(room: np.ndarray, things: str = "images") -> Form:
    """Return the form of things whose sizes are known."""
    return Form(things, room, int(room.sum()))


def estimated(things: str, sizes: Sequence[int], count: int, is_decoded: bool = False) -> Form:
    """Return the form of `count` things of which some have these sizes. Each gets room for one that is much larger:
    only pages that are written take memory."""
    pages = -(-np.asarray(sizes, np.int64) // mmap.PAGESIZE) * mmap.PAGESIZE
    most = max(_LEAST_ROOM, 4 * int(pages.max(initial=0)))
    return Form(things, np.full(count, most), int(pages.mean() * count) if len(pages) else 0, is_decoded)


def choose(mode: Mode, forms: Sequence[Form], what: str) -> tuple[Form | None, str]:
    """Choose the first form that may be kept, None if none may; return also a note for the user. `auto` takes half of
    the available memory at most. `ram` takes all that the last form needs, and the others as `auto` does."""
    forms = [form for form in forms if form.needed]
    if mode == "off" or not forms:
        return None, ""
    if not hasattr(os, "memfd_create"):
        if mode == "ram":
            raise UsageError("--data.cache ram needs Linux; use --data.cache off")
        return None, "cache OFF: only Linux has the memory it needs"
    available = available_bytes()
    for form in forms:
        if form.needed <= AUTO_SHARE * available:
            return form, f"cache ON: {_arithmetic(form, what, available)}"
    numbers = _arithmetic(forms[-1], what, available)
    if mode == "auto":
        return None, f"cache OFF: {numbers}, of which auto takes {AUTO_SHARE:.0%}"
    if forms[-1].needed > available:
        raise UsageError(f"--data.cache ram: {numbers}; use --data.cache auto or off")
    return forms[-1], f"cache ON: {numbers}"


def _arithmetic(form: Form, what: str, available: int) -> str:
    return f"{len(form.room)} {form.things} of {what} need {size(form.needed)}, {size(available)} are available"


def size(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


class ImageCache:
    """Memory for every image; a stored length of 0 means that the image is not there yet."""

    def __init__(self, form: Form, what: str = ""):
        self.room, self.needed, self.is_decoded = form.room, form.needed, form.is_decoded
        ends = np.cumsum(self.room, dtype=np.int64)
        heads = -(-_HEAD * len(self.room) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.starts = heads + np.concatenate([[0], ends[:-1]])
        length = heads + int(ends[-1])
        self._kind = f"{form.things} of {what}, {len(self.room)} in {length}"  # ranks that differ in it share nothing
        descriptor = os.memfd_create("sightline-images", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, length)  # pages are allocated when they are written
        self._attach(descriptor)
        _alive.add(self)

    def _attach(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.block = mmap.mmap(descriptor, 0)
        self.heads = np.frombuffer(self.block, np.uint32, 2 * len(self.room)).reshape(-1, 2)
        self._whole: set[int] = set()  # verified by this process; a complete image never changes

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("room", "needed", "is_decoded", "starts")}
        return {**kept, "shared": multiprocessing.reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = state.pop("shared")
        vars(self).update(state)
        self._attach(shared.detach())

    def __del__(self, close: Any = os.close) -> None:
        if "descriptor" in vars(self):  # the mapping closes itself
            close(self.descriptor)

    def start(self, world: World, check_stop: Callable[[], None]) -> str:
        """Take the memory of the rank of this host that came first, before any process reads or writes; return a note
        where that fails. Such a rank keeps nothing: each with a cache of its own could be too much."""
        if world.size == 1:
            return ""
        _started[self._kind] += 1
        try:
            # Ranks in containers of their own do not see each other's processes.
            where = f"{BOOT.read_text('utf-8').strip()}/{os.readlink('/proc/self/ns/pid')}"
            place = f"cache/{self._kind}/{_started[self._kind]}/{where}"
            if world.store.add(f"{place}/ranks", 1) == 1:
                world.store.set(place, f"{os.getpid()} {self.descriptor} {os.fstat(self.descriptor).st_ino}")
                return ""
            world.store.wait([place], SHARE_TIMEOUT)
            process, descriptor, inode = map(int, world.store.get(place).decode().split())
            shared = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
            if os.fstat(shared).st_ino != inode:
                os.close(shared)
                raise OSError(f"file {descriptor} of process {process} is another one")
        except (OSError, RuntimeError) as error:  # stores raise RuntimeError after a timeout
            self.room = np.zeros_like(self.room)
            self.needed = 0
            return f"cache OFF on rank {world.rank}: it cannot share the memory of its host's first rank ({error})"
        os.close(self.descriptor)
        self._attach(shared)
        return ""

    def promised(self) -> int:
        """Return how much memory is still to be filled."""
        return max(0, self.needed - os.fstat(self.descriptor).st_blocks * 512)

    def get(self, index: int) -> bytes | None:
        """Return an image, or None if it is not complete: another process may be writing it."""
        kept = self.view(index)
        return None if kept is None else kept.tobytes()

    def view(self, index: int) -> np.ndarray | None:
        """Return the bytes of an image or a volume without copying, or None if it is not complete."""
        length, checksum = self.heads[index].tolist()
        if not 0 < length <= self.room[index]:
            return None
        data = np.frombuffer(self.block, np.uint8, length, int(self.starts[index]))
        if index not in self._whole:
            if google_crc32c.value(data) != checksum:
                return None
            self._whole.add(index)
        return data

    def put(self, index: int, *parts: bytes | np.ndarray) -> None:
        """Store an image, unless it has grown since it was listed, or all take more memory than was estimated."""
        values = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part.reshape(-1) for part in parts]
        length = sum(part.nbytes for part in values)
        most = 1.1 * self.needed + _LEAST_ROOM
        if length > self.room[index] or os.fstat(self.descriptor).st_blocks * 512 + length > most:
            return
        at, checksum = int(self.starts[index]), 0
        for part in values:
            left = np.ascontiguousarray(part).view(np.uint8)
            checksum = google_crc32c.extend(checksum, left)
            while len(left):  # half the time of writing to the mapped pages, each of which would be missing at first
                try:
                    written = os.pwrite(self.descriptor, left.data, at)
                except OSError:  # no memory: the image is read again next time
                    return
                left, at = left[written:], at + written
        self.heads[index] = length, checksum


def open_cache(mode: Mode, forms: Sequence[Form], what: str) -> tuple[ImageCache | None, str]:
    """Return memory for the chosen form, None if nothing is to be kept, and a note for the user."""
    form, note = choose(mode, forms, what)
    try:
        return ImageCache(form, what) if form else None, note
    except OSError as error:  # e.g. a limit on the addresses of a process
        if mode == "auto":
            return None, f"cache OFF: the system refuses its memory ({error.strerror})"
        raise UsageError(f"--data.cache {mode}: the system refuses its memory ({error.strerror}); use off") from error


def with_sides(pixels: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Return pixels (height, width, 3) and their sides before them, as `as_pixels` takes them."""
    return np.asarray(pixels.shape[:2], np.int32).tobytes(), pixels


def as_pixels(kept: np.ndarray) -> np.ndarray:
    """View what `with_sides` returned as pixels."""
    height, width = kept[:SIDES].view(np.int32).tolist()
    return kept[SIDES:].reshape(height, width, 3)
