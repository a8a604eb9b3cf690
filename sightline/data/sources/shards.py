"""The base of tar and tfrecord: many samples in few files, an index over them, random access, classes by number.

Shards are opened when a sample is first read, by each process for itself; threads may read at once.
"""

from __future__ import annotations

import mmap
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sightline.data.formats import records
from sightline.data.sources import Sample, Source, index_files
from sightline.errors import BadData, BadSample, first_of

# ImageNet-21k has 21,841; a label beyond this is damage, and would make as many names.
MAX_CLASSES = 100_000
# Of each source in each process; the usual limit is 1024 for a process.
MAX_OPEN_FILES = 256
INDEX_FILES = ".sightline-index files"  # what errors call them
COLUMNS = ("shard", "offset", "length", "label", "check")  # of an Index, one row per sample


@dataclass(frozen=True)
class Shard:
    """One file of many samples; `name` is relative to the data path."""

    path: Path
    name: str
    size: int
    changed_ns: int

    @classmethod
    def at(cls, root: Path, path: Path) -> Shard:
        try:
            found = path.stat()
        except OSError as error:
            raise BadData(f"{path} cannot be read: {error.strerror}") from error
        return cls(path, path.relative_to(root).as_posix(), found.st_size, found.st_mtime_ns)


def list_folder(folder: Path) -> list[str]:
    """Return the names in a folder, in order; none if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadData(f"{folder} cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Index:
    """The place of each sample of a split, in the order of the samples; one row per sample."""

    shard: np.ndarray  # number of the shard
    offset: np.ndarray
    length: np.ndarray
    label: np.ndarray  # as stored
    check: np.ndarray  # what the source compares when it reads, e.g. a checksum
    names: index_files.Names
    class_labels: np.ndarray  # labels whose class has a name
    class_names: index_files.Names
    is_numbered: bool  # labels are the files' own numbers, not places in class_names

    @property
    def name_of(self) -> dict[int, str]:
        """Return label -> name of its class, for those that have one."""
        return {int(label): self.class_names[i] for i, label in enumerate(self.class_labels)}

    def arrays(self) -> index_files.Arrays:
        plain = {key: getattr(self, key) for key in (*COLUMNS, "class_labels")}
        flag = np.asarray([self.is_numbered], np.uint8)
        return {**plain, **self.names.arrays("names"), **self.class_names.arrays("class_names"), "is_numbered": flag}

    @classmethod
    def loaded(cls, arrays: index_files.Arrays, shards: Sequence[Shard]) -> Index:
        """Invert `arrays`; ValueError or KeyError where they cannot be an index of these shards."""
        names, classes = index_files.Names.loaded(arrays, "names"), index_files.Names.loaded(arrays, "class_names")
        shard, offset, length, label, check = (arrays[key] for key in COLUMNS)
        sizes = np.asarray([each.size for each in shards], np.int64)
        if {len(arrays[key]) for key in COLUMNS} != {len(names)} or len(arrays["class_labels"]) != len(classes):
            raise ValueError("columns of different lengths")
        if len(shard) and not (shard.min() >= 0 and shard.max() < len(shards)):
            raise ValueError("a shard that is not there")
        if np.any(offset < 0) or np.any(length < 0) or np.any(length > sizes[shard] - offset):
            raise ValueError("a sample outside its shard")
        is_numbered, class_labels = bool(arrays["is_numbered"][0]), arrays["class_labels"]
        if np.any(label < 0) or not np.isin(class_labels, label).all():
            raise ValueError("a class without samples")
        if not is_numbered and (np.any(label >= len(classes)) or np.any(class_labels != np.arange(len(classes)))):
            raise ValueError("a sample without a class")
        return cls(shard, offset, length, label, check, names, class_labels, classes, is_numbered)


def kept_index(kind: str, root: Path, split: str, shards: Sequence[Shard], build: Callable[[], Index]) -> Index:
    """Return the index of these shards from an earlier run, or a new one, kept for the next."""
    key = index_files.digest(kind, 1, [(shard.name, shard.size, shard.changed_ns) for shard in shards])
    name = f"{kind}-{split}"
    changed_ns = [shard.changed_ns for shard in shards]
    return index_files.kept_or_read(root, name, key, changed_ns, lambda kept: Index.loaded(kept, shards), build)


def numbered_classes(index: Index, shards: Sequence[Shard], first: int, declared: int, hint: str) -> tuple[str, ...]:
    """Return the names of the classes of the split that defines them, by label from `first` on; nameless ones are
    classNNNN.

    A part of a data set may lack the samples of some classes: then their number must be declared.
    """
    present = np.unique(index.label[index.label <= MAX_CLASSES])
    count = int(present.max(initial=first - 1)) - first + 1
    missing = sorted(set(range(first, first + count)) - set(present.tolist()))
    if missing and not declared:
        raise BadData(
            f"{shards[0].name} and the other shards have labels from {present.min()} to {present.max()}, but no "
            f"sample of label {first_of(missing)}; {hint}"
            f"declare --data.classes {count} if classes without samples are meant"
        )
    names = index.name_of
    return tuple(names.get(first + i, f"class{i:04d}") for i in range(declared if missing else count))


def check_range(index: Index, shards: Sequence[Shard], first: int, count: int, hint: str) -> None:
    """Raise BadData unless the labels of a split are those of the classes."""
    known = index.label <= MAX_CLASSES  # others belong to damaged records, which reading reports
    outside = np.flatnonzero(known & ((index.label < first) | (index.label >= first + count)))
    if len(outside):
        row = int(outside[0])
        raise BadData(
            f"{shards[index.shard[row]].name}: the sample at byte {index.offset[row]} ({index.names[row]}) has label "
            f"{index.label[row]}, expected {first} to {first + count - 1}; {hint}"
        )


def check_names(index: Index, shards: Sequence[Shard], first: int, classes: tuple[str, ...]) -> None:
    """Raise BadData unless labels mean the same in both splits, where both say what they mean."""
    for label, name in index.name_of.items():
        expected = classes[label - first]
        if name != expected and expected != f"class{label - first:04d}":
            row = int(np.flatnonzero(index.label == label)[0])
            raise BadData(
                f"{shards[index.shard[row]].name}: label {label} is called {name}, the training files call it "
                f"{expected}; the splits must number their classes alike"
            )


class ShardSource(Source):
    """Samples inside shards, by an index."""

    kind: str

    def __init__(self, shards: Sequence[Shard], index: Index, labels: np.ndarray, classes: tuple[str, ...]):
        self.shards = tuple(shards)
        self.index = index
        self.labels = labels.astype(np.int32)  # counted from 0
        self.classes = classes
        # Names and sizes alone: a copy elsewhere has the same.
        self.fingerprint = index_files.digest(self.kind, 1, classes, [(shard.name, shard.size) for shard in shards])
        self.files = [shard.path for shard in shards]
        self._open = OpenFiles(self.shards)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        shard = self.shards[self.index.shard[index]].name
        return f"{shard}:{self.index.names[index] or f'byte {self.index.offset[index]}'}"

    def read(self, index: int) -> Sample:
        try:
            file = self._open.open(int(self.index.shard[index]))
            return Sample(self.read_image(index, file.descriptor), int(self.labels[index]))
        except OSError as error:
            raise BadSample(self.name(index), f"cannot be read: {error.strerror}") from error

    @abstractmethod
    def read_image(self, index: int, descriptor: int) -> bytes:
        """Return the encoded image of a sample, out of its open shard. Raises BadSample."""


class OpenFiles:
    """The shards that a process has open. None travel to another process: each opens its own."""

    def __init__(self, shards: Sequence[Shard]):
        self._shards = shards
        self._files: dict[int, OpenFile] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[Sequence[Shard]]]:
        return OpenFiles, (self._shards,)

    def open(self, shard: int) -> OpenFile:
        """Return the shard with this number, opened at its first use."""
        with self._lock:
            file = self._files.pop(shard, None)
            if file is None:
                file = OpenFile(os.open(self._shards[shard].path, os.O_RDONLY | os.O_CLOEXEC))
                if len(self._files) >= MAX_OPEN_FILES:
                    self._files.pop(next(iter(self._files)))  # the one used longest ago
            self._files[shard] = file
            return file


class OpenFile:
    """Closed when the last thread that reads from it lets go of it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


def scan_records(shards: Sequence[Shard], add: Callable[[int, Shard, mmap.mmap, int, int], None]) -> None:
    """Call add(number of the shard, shard, its bytes, offset, length) for every record of TFRecord files."""
    progress = index_files.ScanProgress(str(shards[0].path.parent), len(shards), "files")
    for number, shard in enumerate(shards):
        progress(number)
        if shard.size == 0:  # more shards than samples leaves some empty
            continue
        try:
            with open(shard.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                if hasattr(mmap, "MADV_RANDOM"):
                    buffer.madvise(mmap.MADV_RANDOM)  # else the kernel reads the images ahead
                for offset, length in records.scan_frames(buffer, shard.name):
                    add(number, shard, buffer, offset, length)
                    progress(number)
        except OSError as error:
            raise BadData(f"{shard.path} cannot be read: {error.strerror}") from error
