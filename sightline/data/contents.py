"""Digests of what data files hold, so that a resumed run notices files replaced by others of the same name and size.

A dataset's own fingerprint covers names and sizes. `sampled` reads a bounded part of the bytes, always the same part of
the same files; `full` reads all of them. Checkpoints keep the digests; train/saver.py compares them on resume.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, overload

from sightline.files.regular import regular
from sightline.parts import DataConfig, Dataset

# Checkpoints hold digests made with these numbers: other numbers need another name than `sampled` or `full`.
MAX_FILES = 256  # sampled: files that are read, of each split
MAX_BYTES = 64 * 2**20  # sampled: bytes that are read, of each split
PIECE = 2**16  # sampled: a file larger than its share of the bytes is read in pieces
MAX_DIGESTS = 1024  # full: a checkpoint keeps at most these; beyond, one digest covers several files
MOST_LISTED = 2**13  # leaks: image files of each split whose sizes are compared
MOST_COMPARED = 2**10  # leaks: those of a size that the other split has too, whose ends are read
_NO_BYTES = b"cannot be read"
_READERS = 8  # threads: on a network most of the time goes into waiting

Digests = dict[str, dict[str, str]]  # split -> sampled or full -> digests, separated by spaces


class _Names(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> str: ...


class PathsBelow(Sequence[Path]):
    """Files of one folder, made from an array of names one at a time."""

    def __init__(self, folder: Path, names: _Names):
        self._folder = folder
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Path: ...
    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...
    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._folder / self._names[index]


class Contents:
    """The contents of both splits of a run."""

    def __init__(self, sets: Mapping[str, Dataset], how: str):
        self.how = how
        self._sets = sets
        self._kept: Digests = {}  # of the checkpoint that the run was resumed from
        self._read: dict[tuple[str, str], list[str]] = {}

    def read(self, split: str, how: str, check_stop: Callable[[], None] = lambda: None) -> list[str]:
        """Return the digests of a split, which are read once; none of data that are not files."""
        if (split, how) not in self._read:
            data = self._sets[split]
            self._read[split, how] = digests(data.files, how, data.fingerprint, check_stop)
        return self._read[split, how]

    def changed(self, stored: Digests, check_stop: Callable[[], None]) -> str:
        """Return a sentence that names a changed file, "" where all is as `stored` says; that is then kept. Checked is
        what was stored and costs no more than what is asked for now."""
        cheaper = {"names": (), "sampled": ("sampled",), "full": ("sampled", "full")}[self.how]
        for split in self._sets:
            for how in (how for how in cheaper if how in stored.get(split, {})):
                before, now = stored[split][how].split(), self.read(split, how, check_stop)
                data = self._sets[split]
                groups = _groups(len(data.files), how, data.fingerprint)
                for group, then, today in zip(groups, before, now, strict=False):
                    if then != today:
                        return f"{_named(data.files, group)} not what it was then ({split} data, {how} fingerprint)"
        self._kept = stored
        return ""

    def leak(self) -> str:
        """Return a sentence about images of val that are training images too, "" if none was found. Nothing is read
        where no bytes were. Else the ends of images that have the size of one in the other split, in bytes, are."""
        if not any(self._read.keys() >= {("train", how), ("val", how)} for how in ("full", "sampled")):
            return ""
        train, val = (_images_by_size(self._sets[split]) for split in ("train", "val"))
        alike = [(path, size) for size in sorted(train.keys() & val.keys()) for path in val[size]]
        of_val = _by_ends(alike)
        of_train = _by_ends([(path, size) for size in sorted({size for size, _ in of_val}) for path in train[size]])
        pairs = sorted((path, of_train[each][0]) for each in of_val.keys() & of_train.keys() for path in of_val[each])
        if not pairs:
            return ""
        compared = sum(map(len, val.values())) - len(alike) + sum(map(len, of_val.values()))
        return (
            f"{len(pairs)} of {compared} validation images that were compared are training images too, e.g. "
            f"{pairs[0][0]} and {pairs[0][1]}; the score will be too high. `sightline check` lists them all"
        )

    def to_json(self) -> Digests:
        """Return what a checkpoint keeps."""
        if self.how == "names":
            return self._kept
        return {
            split: self._kept.get(split, {}) | {self.how: " ".join(self.read(split, self.how))} for split in self._sets
        }


def _images_by_size(data: Dataset) -> dict[int, list[Path]]:
    """Return the image files of a split by their bytes, of a large one some. Masks, which come after the images, may be
    alike, and so may labels of volumes."""
    found: dict[int, list[Path]] = {}
    for number in _some(range(min(len(data.files), len(data))), MOST_LISTED):
        path = data.files[number]
        if path.suffix.lower() in DataConfig.file_suffixes:
            with suppress(OSError):  # the bad-sample policy decides about it
                found.setdefault(path.stat().st_size, []).append(path)
    return found


def _by_ends(files: Sequence[tuple[Path, int]]) -> dict[tuple[int, bytes], list[Path]]:
    """Return files by their size and what stands at their beginning and end, of many some."""
    some = _some(files, MOST_COMPARED)
    found: dict[tuple[int, bytes], list[Path]] = {}
    with ThreadPoolExecutor(_READERS, "leak") as pool:
        for (path, size), ends in zip(some, pool.map(_ends, some), strict=True):
            if ends:
                found.setdefault((size, ends), []).append(path)
    return found


def _ends(file: tuple[Path, int]) -> bytes:
    path, size = file
    try:
        with open(path, "rb", opener=regular) as opened:
            start = opened.read(PIECE)
            opened.seek(max(0, size - PIECE))
            return hashlib.blake2b(start + opened.read(PIECE), digest_size=16).digest()
    except OSError:
        return b""


def _some(every: Sequence[Any], most: int) -> Sequence[Any]:
    return every[:: max(1, math.ceil(len(every) / most))]


def digests(files: Sequence[Path], how: str, key: str, check_stop: Callable[[], None]) -> list[str]:
    """Return a digest of each file that is read, or of each group of files; `key` chooses the files and the pieces."""
    groups = _groups(len(files), how, key)
    most = MAX_BYTES // len(groups) if how == "sampled" and groups else None
    pool = ThreadPoolExecutor(_READERS, "fingerprint")
    try:
        pending = [pool.submit(_digest, files, group, most, key) for group in groups]
        check_stop()
        while wait(pending, 0.1).not_done:
            check_stop()
        return [future.result() for future in pending]
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(count: int, how: str, key: str) -> list[range]:
    """Return the files of each digest. Chosen by hashes, not by a generator that another version may change."""
    if how == "full":
        number = min(count, MAX_DIGESTS)
        return [range(count * i // number, count * (i + 1) // number) for i in range(number)]
    if count <= MAX_FILES:
        return [range(i, i + 1) for i in range(count)]
    chosen: set[int] = set()
    draw = 0
    while len(chosen) < MAX_FILES:
        chosen.add(_drawn(key, draw, count))
        draw += 1
    return [range(i, i + 1) for i in sorted(chosen)]


def _drawn(key: str, number: int, below: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key} {number}".encode()).digest()) % below


def _digest(files: Sequence[Path], group: range, most: int | None, key: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for number in group:
        _add(digest, files[number], most, key)
    return digest.hexdigest()


def _add(digest: Any, path: Path, most: int | None, key: str) -> None:
    """Add the size and the bytes of a file, or pieces of it that take `most` bytes together."""
    try:
        if not path.is_file():  # reading a pipe would block
            raise FileNotFoundError
        with open(path, "rb", opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            if most is None or size <= most:
                while block := file.read(2**20):
                    digest.update(block)
                return
            for piece in range(most // PIECE):
                file.seek(_drawn(f"{key} {path.name}", piece, size - PIECE))
                digest.update(file.read(PIECE))
    except OSError:  # the bad-sample policy decides about it
        digest.update(_NO_BYTES)


def _named(files: Sequence[Path], group: range) -> str:
    if len(group) == 1:
        return f"{files[group[0]]} is"
    return f"one of the {len(group)} files from {files[group[0]]} to {files[group[-1]]} is"
