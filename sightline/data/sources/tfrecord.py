"""ImageNet as TFRecord files of tf.train.Example, read without TensorFlow, by random access.

PATH/train/train-00000-of-01024 and PATH/validation/validation-00000-of-00128, or the other names of `SPLITS`; also
without the folders. Also one folder deeper, PATH/tf_records/train/..., if exactly one folder holds such files. A shard
missing of the number in the names is an error; an empty one is not.
"""

from __future__ import annotations

import mmap
import os
import re
from array import array
from pathlib import Path

import numpy as np

from sightline.data.formats import records
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files, layouts
from sightline.data.sources.shards import (
    INDEX_FILES,
    MAX_CLASSES,
    Index,
    Shard,
    ShardSource,
    check_names,
    check_range,
    kept_index,
    list_folder,
    numbered_classes,
    scan_records,
)
from sightline.errors import BadData, BadSample, first_of
from sightline.parts import Split

# Folder and file prefix of each split: the names of three generations of ImageNet scripts.
SPLITS = {
    "train": ("img_train", "train", "imagenet_train_subset"),
    "val": ("img_val", "validation", "imagenet_val_subset"),
}
_TEST = ("img_test", "test", "imagenet_test_subset")
LABEL, SYNSET, FILENAME, ENCODED = "image/class/label", "image/class/synset", "image/filename", "image/encoded"
EXPECTED = "PATH/train/train-00000-of-01024 and PATH/validation/validation-00000-of-00128"

_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_MAX_TEXT = 4096  # of a file name or a synset, in bytes
_DAMAGED = 2**31 - 1  # the label of a record whose own cannot be read; it sorts last, and reading it is a BadSample
_SCANNED = frozenset((LABEL, SYNSET, FILENAME))
_READ = frozenset((LABEL, ENCODED))


def detect(path: str) -> bool:
    """Return whether PATH, or one folder in it, has files named like the shards of a split."""
    return holds_shards(Path(path)) or len(_inner_folders(Path(path))) == 1


def holds_shards(root: Path) -> bool:
    """Return whether a folder has files named like the shards of a split."""
    return any(_shard_files(root, split) for split in SPLITS)


def _inner_folders(path: Path) -> list[str]:
    return [name for name in layouts.subfolders(path) if holds_shards(path / name)]


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> TFRecordSource:
    """Index the shards of a split. Classes are those of the training files, so both splits number them alike."""
    inner = [] if holds_shards(Path(path)) else _inner_folders(Path(path))
    if len(inner) > 1:
        raise BadData(f"{path} holds TFRecord files in {first_of(inner)}; give one of these folders, {path}/{inner[0]}")
    root, first = Path(path, *inner), options.first_label
    shards = _find_shards(root, split)
    index = _index_of(root, split, shards)
    defining, defining_shards = index, shards
    if split != "train" and _shard_files(root, "train"):
        defining_shards = _find_shards(root, "train")
        defining = _index_of(root, "train", defining_shards)
    hint = f"give --data.first-label {1 - first} if labels count from {1 - first}, or "
    classes = numbered_classes(defining, defining_shards, first, options.classes, hint)
    check_range(index, shards, first, len(classes), f"{hint}the right --data.classes")
    check_names(index, shards, first, classes)
    source = TFRecordSource(shards, index, index.label.astype(np.int64) - first, classes)
    source.inner = "".join(inner)
    return source


class TFRecordSource(ShardSource):
    """Images in records; every read checks the record's checksums and its label against the index."""

    kind = "tfrecord"

    def read_image(self, index: int, descriptor: int) -> bytes:
        offset, name = int(self.index.offset[index]), self.name(index)
        payload = records.read_frame(descriptor, offset, records.MAX_RECORD_BYTES, name)
        try:
            found = records.peek_example(payload, 0, len(payload), _READ)
        except BadData as error:
            raise BadSample(name, f"record at byte {offset}: {error}") from error
        label, encoded = found.get(LABEL), found.get(ENCODED)
        if label != [int(self.index.label[index])]:
            raise BadSample(
                name,
                f"record at byte {offset}: {LABEL} is {_short(label)}, and was {self.index.label[index]} when the file "
                f"was indexed; remove the {INDEX_FILES} beside the data and start again",
            )
        if not encoded or len(encoded) != 1 or not isinstance(encoded[0], bytes):
            raise BadSample(
                name, f"record at byte {offset}: {ENCODED} holds {_short(encoded)}, expected one image; make it again"
            )
        return encoded[0]


def _shard_files(root: Path, split: str) -> list[tuple[int, int, Path]]:
    """Return (number, count, file) of all shards of a split, under the first of its names that is there."""
    for prefix in SPLITS.get(split, _TEST):
        for folder in (root / prefix, root):
            matches = [match for name in list_folder(folder) if (match := _SHARD.fullmatch(name))]
            found = [(int(m["number"]), int(m["count"]), folder / m[0]) for m in matches if m["prefix"] == prefix]
            if found:
                return found
    return []


def _find_shards(root: Path, split: Split) -> list[Shard]:
    found = _shard_files(root, split)
    if not found and split == "test":
        raise layouts.no_test_split("tfrecord")
    if not found:
        raise BadData(
            f"{root} has no TFRecord files of the {split} split, found there: {layouts.contents(root)}; expected "
            f"{EXPECTED}. `sightline prepare` makes them (docs/reference/data.md); "
            "--data.source auto reads images themselves"
        )
    folder, count = found[0][2].parent, found[0][1]
    for number, other, file in found:
        if other != count or number >= count:
            raise BadData(f"{file} is not one of the {count} files that {found[0][2].name} belongs to; move it away")
    there = {number for number, _, _ in found}
    if len(there) < count:
        first = next(number for number in range(count) if number not in there)
        name = f"{found[0][2].name[: -len('-00000-of-00000')]}-{first:05d}-of-{count:05d}"
        raise BadData(f"{folder / name} is missing; {len(there)} of {count} shards are there: fetch the others")
    return [Shard.at(root, file) for _, _, file in found]


def _index_of(root: Path, split: Split, shards: list[Shard]) -> Index:
    return kept_index(TFRecordSource.kind, root, split, shards, lambda: _build_index(shards))


class _Scan:
    """Collects what the records of a split say of themselves."""

    def __init__(self) -> None:
        self.rows = array("q")  # shard, offset, length of each: small, for there may be millions
        self.labels = array("q")
        self.file_names: list[bytes] = []
        self.synsets: dict[int, tuple[str, str]] = {}  # label -> synset, where it was first seen
        self.label_of: dict[str, int] = {}  # synset -> label

    def add(self, number: int, shard: Shard, buffer: mmap.mmap, offset: int, length: int) -> None:
        start = offset + records.HEADER_BYTES
        where = f"{shard.name}: record at byte {offset}"
        try:
            label, file_name = self._describe(buffer, start, start + length, where)
        except BadData:
            # Checksums are left to reading, but damage must not be blamed on whoever wrote the file.
            payload, crc = buffer[start : start + length], buffer[start + length : start + length + 4]
            if records.masked_crc32c(payload) == int.from_bytes(crc, "little"):
                raise
            label, file_name = _DAMAGED, b""
        self.rows.extend((number, offset, length))
        self.labels.append(label)
        self.file_names.append(file_name)

    def _describe(self, buffer: mmap.mmap, start: int, stop: int, where: str) -> tuple[int, bytes]:
        try:
            found = records.peek_example(buffer, start, stop, _SCANNED)
        except BadData as error:
            raise BadData(f"{where}: {error}; make the file again") from error
        labels, synset, file_name = found.get(LABEL), _text(found, SYNSET), _text(found, FILENAME)
        if not labels or len(labels) != 1 or not isinstance(labels[0], int) or not 0 <= labels[0] <= MAX_CLASSES:
            raise BadData(f"{where}: expected one integer from 0 to {MAX_CLASSES} in {LABEL}, found {_short(labels)}")
        label = labels[0]
        if max(len(synset), len(file_name)) > _MAX_TEXT:
            raise BadData(f"{where}: a file name or synset of more than {_MAX_TEXT} bytes")
        if synset:
            self._agree(label, os.fsdecode(synset), where)
        return label, file_name

    def _agree(self, label: int, synset: str, where: str) -> None:
        other_synset, first = self.synsets.get(label, (synset, where))
        other_label = self.label_of.get(synset, label)
        if other_synset != synset:
            raise BadData(
                f"{where}: label {label} has synset {synset}, but {other_synset} in {first}; fetch or make them again"
            )
        if other_label != label:
            first = self.synsets[other_label][1]
            raise BadData(
                f"{where}: synset {synset} has label {label}, but {other_label} in {first}; fetch or make them again"
            )
        self.synsets[label], self.label_of[synset] = (synset, first), label

    def index(self) -> Index:
        order = list(range(len(self.labels)))
        if all(name or label == _DAMAGED for name, label in zip(self.file_names, self.labels, strict=True)):
            order.sort(key=lambda i: (self.labels[i], self.file_names[i]))
        columns = np.frombuffer(self.rows, np.int64).reshape(-1, 3)[order]
        synsets = sorted((label, os.fsencode(name)) for label, (name, _) in self.synsets.items())
        return Index(
            shard=columns[:, 0].astype(np.int32),
            offset=columns[:, 1].copy(),
            length=columns[:, 2].copy(),
            label=np.frombuffer(self.labels, np.int64)[order].astype(np.int32),
            check=np.zeros(len(order), np.uint32),  # the records have checksums of their own
            names=index_files.Names.of([self.file_names[i] for i in order]),
            class_labels=np.asarray([label for label, _ in synsets], np.int32),
            class_names=index_files.Names.of([name for _, name in synsets]),
            is_numbered=True,
        )


def _build_index(shards: list[Shard]) -> Index:
    scan = _Scan()
    scan_records(shards, scan.add)
    if not scan.labels:
        raise BadData(f"{shards[0].path.parent} holds {len(shards)} TFRecord files and no record; make them again")
    return scan.index()


def _text(found: dict[str, records.Values], key: str) -> bytes:
    values = found.get(key)
    return values[0] if values and isinstance(values[0], bytes) else b""


def _short(values: records.Values | None) -> str:
    """Return what was found, in a few words however long it is."""
    if not values:
        return "nothing"
    if len(values) > 3 or isinstance(values[0], bytes):
        return f"{len(values)} {'byte strings' if isinstance(values[0], bytes) else 'numbers'}"
    return ", ".join(map(str, values))
