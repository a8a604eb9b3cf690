"""Digests of what data files hold, so that a resumed run notices files replaced by others of the same name and size.

A dataset's own fingerprint covers names and sizes. `sampled` reads a bounded part of the bytes, always the same part of
the same files; `full` reads all of them. Checkpoints keep the digests; train/saver.py compares them on resume.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, overload

from sightline.parts import DataConfig, Dataset

# Checkpoints hold digests made with these numbers: other numbers need another name than `sampled` or `full`.
MAX_FILES = 256  # sampled: files that are read, of each split
MAX_BYTES = 64 * 2**20  # sampled: bytes that are read, of each split
PIECE = 2**16  # sampled: a file larger than its share of the bytes is read in pieces
MAX_DIGESTS = 1024  # full: a checkpoint keeps at most these; beyond, one digest covers several files
_NO_BYTES = b"cannot be read"
_UNREADABLE = hashlib.blake2b(_NO_BYTES, digest_size=8).hexdigest()
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
        """Return a sentence about images of val that are training images too, "" if there is none among the files that
        were read. Reads nothing."""
        for how in (how for how in ("full", "sampled") if self._read.keys() >= {("train", how), ("val", how)}):
            train, val = (self._images(split, how) for split in ("train", "val"))
            if both := [digest for digest in val if digest in train]:
                pair = f"{val[both[0]]} and {train[both[0]]}"
                return (
                    f"{len(both)} of {len(val)} validation images that were compared are training images too, e.g. "
                    f"{pair}; the score will be too high. `sightline check` lists them all"
                )
        return ""

    def _images(self, split: str, how: str) -> dict[str, Path]:
        """Return the image files that were read, by digest. Labels of volumes may be alike."""
        data = self._sets[split]
        groups = _groups(len(data.files), how, data.fingerprint)
        read = zip(groups, self._read[split, how], strict=True)
        alone = ((digest, data.files[group[0]]) for group, digest in read if len(group) == 1 and digest != _UNREADABLE)
        return {digest: path for digest, path in alone if path.suffix.lower() in DataConfig.file_suffixes}

    def to_json(self) -> Digests:
        """Return what a checkpoint keeps."""
        if self.how == "names":
            return self._kept
        return {
            split: self._kept.get(split, {}) | {self.how: " ".join(self.read(split, self.how))} for split in self._sets
        }


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
        with path.open("rb") as file:
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
