"""WebDataset-compatible tar shards, read by random access: PATH/train/*.tar and PATH/val/*.tar, or PATH/train-0.tar.

A sample is a run of members with one key: KEY.jpg and KEY.cls (a number from 0) or KEY.json; without a label the class
is the folder. Names of classes: classes.txt, one a line, else from folders or JSON. Other members, pickles above all,
are never opened; an image or label that is a link or a device, or leads outside by its name, is refused.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sightline.data.decode import MAX_BYTES
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files
from sightline.data.sources.layouts import no_test_split
from sightline.data.sources.shards import (
    COLUMNS,
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
)
from sightline.errors import BadData, BadSample, first_of
from sightline.files.archive import BLOCK, REGULAR, tar_entries
from sightline.files.positioned import read_at
from sightline.files.regular import is_file, regular
from sightline.parts import DataConfig, Split

IMAGES = tuple(suffix.removeprefix(".") for suffix in DataConfig.file_suffixes)
TIFFS = ("tif", "tiff")
CLASSES_FILE = "classes.txt"
MAX_LABEL_BYTES = 2**16  # of one KEY.cls or KEY.json
MAX_CLASSES_BYTES = 2**22  # of classes.txt; 100,000 names of 40 bytes

_TEST = re.compile(r"(?:.+[-_])?test(?:[-_]\d+)?\..+")
_FILE = re.compile(r"(?:.+[-_])?(?P<split>train|val|validation)(?:[-_]\d+)?(?P<suffix>\..+)")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")


def detect(path: str) -> bool:
    """Return whether PATH has tar files of a split."""
    return any(_shard_files(Path(path), split) for split in ("train", "val"))


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> TarSource:
    """Index the shards of a split. Classes are those of the training shards, so both splits number them alike."""
    root = Path(path)
    shards = _find_shards(root, split)
    index = _index_of(root, split, shards)
    defining, defining_shards = index, shards
    if split != "train" and _shard_files(root, "train"):
        defining_shards = _find_shards(root, "train")
        defining = _index_of(root, "train", defining_shards)
    if index.is_numbered != defining.is_numbered:
        raise BadData(f"{root}: one split has numbers for labels (.cls), the other names of folders; label them alike")
    listed = _read_classes(root, defining_shards)
    if not index.is_numbered:
        classes = listed or tuple(defining.name_of.values())
        labels = _named_labels(index, classes, f"{shards[0].path.parent}", CLASSES_FILE if listed else "train")
        return TarSource(shards, *_in_order(index, labels), classes)
    classes = listed or numbered_classes(defining, defining_shards, 0, options.classes, "")
    hint = f"fix the label or {CLASSES_FILE}" if listed else "fix the label or declare more --data.classes"
    check_range(index, shards, 0, len(classes), hint)
    if not listed:
        check_names(index, shards, 0, classes)
    return TarSource(shards, index, index.label, classes)


class TarSource(ShardSource):
    """Images in tar files; every read compares the member's header with the one that was indexed."""

    kind = "tar"

    def read_image(self, index: int, descriptor: int) -> bytes:
        offset, length = int(self.index.offset[index]), int(self.index.length[index])
        if length > MAX_BYTES:
            raise BadSample(
                self.name(index), f"member at byte {offset}: {length} bytes, more than the {MAX_BYTES} allowed"
            )
        start = offset - BLOCK
        block = memoryview(read_at(descriptor, BLOCK + length, start))
        if len(block) < BLOCK + length:
            raise BadSample(
                self.name(index),
                f"member at byte {start}: {length} bytes long, but the file ends at {start + len(block)}; "
                f"fetch the file again",
            )
        if zlib.crc32(block[:BLOCK]) != self.index.check[index]:
            raise BadSample(
                self.name(index),
                f"member at byte {start}: not the one that was indexed; remove the {INDEX_FILES} beside the data "
                f"and start again",
            )
        return bytes(block[BLOCK:])


def _shard_files(root: Path, split: str) -> list[Path]:
    """Return the split's files: those of its folder, or those of PATH that are named after it."""
    names = {"train": ("train",), "test": ("test",)}.get(split, ("val", "validation"))
    for folder in (*(root / name for name in names), root):
        found = [folder / name for name in list_folder(folder) if _is_shard(name, folder != root, names)]
        if found:
            return found
    return []


def _is_shard(name: str, is_in_folder: bool, splits: tuple[str, ...]) -> bool:
    if name.startswith(".") or not name.endswith((".tar", *_COMPRESSED)):
        return False
    match = _FILE.fullmatch(name)
    if match is None:
        return is_in_folder or (splits == ("test",) and _TEST.fullmatch(name) is not None)
    return is_in_folder or match["split"] in splits


def _find_shards(root: Path, split: Split) -> list[Shard]:
    files = _shard_files(root, split)
    if not files and split == "test":
        raise no_test_split("tar")
    if not files:
        raise BadData(f"{root} has no tar files of the {split} split; expected {root}/{split}/*.tar or {split}-0.tar")
    for file in files:
        if file.name.endswith(_COMPRESSED):
            raise BadData(f"{file} is compressed, which allows no random access; unpack it to a plain .tar")
    return [Shard.at(root, file) for file in files]


def _index_of(root: Path, split: Split, shards: list[Shard]) -> Index:
    return kept_index(TarSource.kind, root, split, shards, lambda: _build_index(shards))


def _read_classes(root: Path, shards: list[Shard]) -> tuple[str, ...]:
    """Return the lines of classes.txt in PATH or beside the shards; none where there is no such file."""
    for path in (root / CLASSES_FILE, shards[0].path.parent / CLASSES_FILE):
        if not is_file(path):
            continue
        if path.stat().st_size > MAX_CLASSES_BYTES:
            raise BadData(f"{path} has more than {MAX_CLASSES_BYTES} bytes; expected one class name a line")
        try:
            names = tuple(line.strip() for line in path.read_text("utf-8").rstrip().split("\n"))
        except UnicodeDecodeError as error:
            raise BadData(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
        if not all(names) or len(set(names)) < len(names):
            raise BadData(f"{path} has an empty line or a name twice; expected one class name a line, in label order")
        return names
    return ()


def _named_labels(index: Index, classes: tuple[str, ...], where: str, known_to: str) -> np.ndarray:
    number = {name: label for label, name in enumerate(classes)}
    unknown = [name for name in index.name_of.values() if name not in number]
    if unknown:
        raise BadData(f"{where} has classes that {known_to} lacks: {first_of(unknown)}; remove or rename them")
    return np.asarray([number[name] for name in index.name_of.values()], np.int64)[index.label]


def _in_order(index: Index, labels: np.ndarray) -> tuple[Index, np.ndarray]:
    """Sort by label as it is now; names within a class are in order already."""
    order = np.argsort(labels, kind="stable")
    columns = {key: getattr(index, key)[order] for key in COLUMNS}
    names = index.names.all()
    return replace(index, **columns, names=index_files.Names.of([names[i] for i in order.tolist()])), labels[order]


# Building the index


@dataclass(frozen=True)
class _Member:
    """A regular file in a tar."""

    name: str
    key: str  # the name up to the first dot after the folders, as in WebDataset
    extension: str  # what follows, in lower case
    folder: str  # the last one of its path, "" at the top
    offset: int
    length: int
    check: int  # crc32 of the header block before the data


@dataclass
class _Group:
    """The members of one key."""

    key: str
    images: list[_Member] = field(default_factory=list)
    number: int | None = None
    class_name: str = ""

    def samples(self, shard: Shard) -> list[_Member]:
        """Return the image of a labelled group; without a label every image belongs to its folder."""
        if self.number is None and not self.class_name:
            return self.images
        # As in WebDataset, KEY.seg.png is another thing than the image; but KEY.2.jpg alone is one.
        plain = [member for member in self.images if member.extension in IMAGES] or self.images
        # A TIFF beside an image is a mask or a map of it: only where there is no other it is the image.
        plain = [member for member in plain if member.extension not in TIFFS] or plain
        if len(plain) != 1:
            raise BadData(
                f"{shard.name}: {self.key} has a label and {len(plain)} images; expected one of "
                f"{', '.join(f'{self.key}.{each}' for each in IMAGES)}"
            )
        return plain


class _Scan:
    """Collects the samples of a split: numbered (.cls, JSON) or named (folders, JSON), never both."""

    def __init__(self) -> None:
        self.rows = array("q")  # shard, offset, length, check of each: small, for there may be millions
        self.members: list[bytes] = []
        self.labels: list[int | str] = []
        self.names: dict[int, str] = {}  # number -> name, from JSON
        self.folders: dict[int, str] = {}  # number -> its folder, "" where it has several

    def add(self, number: int, shard: Shard, group: _Group) -> None:
        for member in group.samples(shard):
            where = f"{shard.name}: {member.name}"
            label = group.number if group.number is not None else group.class_name or member.folder
            if label == "":
                raise BadData(
                    f"{where} has no label; expected {group.key}.cls with a number, {group.key}.json or a class folder"
                )
            if self.labels and type(self.labels[0]) is not type(label):
                raise BadData(
                    f"{where} has label {label!r} where {os.fsdecode(self.members[0])} has {self.labels[0]!r}; "
                    f"use numbers or names for all"
                )
            if isinstance(label, int):
                if group.class_name and self.names.setdefault(label, group.class_name) != group.class_name:
                    raise BadData(f"{where}: label {label} is called {group.class_name}, before {self.names[label]}")
                if self.folders.setdefault(label, member.folder) != member.folder:
                    self.folders[label] = ""
            self.rows.extend((number, member.offset, member.length, member.check))
            self.members.append(os.fsencode(member.name))
            self.labels.append(label)

    def index(self) -> Index:
        is_numbered = isinstance(self.labels[0], int)
        if is_numbered:
            names = self.names
            if not names and all(self.folders.values()) and len(set(self.folders.values())) == len(self.folders):
                names = self.folders
            labels = [label for label in self.labels if isinstance(label, int)]
        else:
            found = sorted({label for label in self.labels if isinstance(label, str)})
            places = {name: place for place, name in enumerate(found)}
            names = dict(enumerate(found))
            labels = [places[label] for label in self.labels if isinstance(label, str)]
        order = sorted(range(len(labels)), key=lambda i: (labels[i], self.members[i].rpartition(b"/")[2]))
        columns = np.frombuffer(self.rows, np.int64).reshape(-1, 4)[order]
        return Index(
            shard=columns[:, 0].astype(np.int32),
            offset=columns[:, 1].copy(),
            length=columns[:, 2].copy(),
            label=np.asarray(labels, np.int32)[order],
            check=columns[:, 3].astype(np.uint32),
            names=index_files.Names.of([self.members[i] for i in order]),
            class_labels=np.asarray(sorted(names), np.int32),
            class_names=index_files.Names.of([os.fsencode(names[label]) for label in sorted(names)]),
            is_numbered=is_numbered,
        )


def _build_index(shards: list[Shard]) -> Index:
    scan = _Scan()
    progress = index_files.ScanProgress(str(shards[0].path.parent), len(shards), "files")
    for number, shard in enumerate(shards):
        try:
            with open(shard.path, "rb", opener=regular) as file:
                for group in _groups(file, shard):
                    scan.add(number, shard, group)
                    progress(number)
        except OSError as error:
            raise BadData(f"{shard.path} cannot be read: {error.strerror}") from error
    if not scan.labels:
        raise BadData(
            f"{shards[0].path.parent} holds no images ({', '.join(IMAGES)}) in its tar files; "
            f"ImageNet's own archives hold tars: `sightline prepare imagenet` first"
        )
    return scan.index()


def _groups(file: BinaryIO, shard: Shard) -> Iterator[_Group]:
    """Yield the runs of members with one key that hold an image or a label."""
    group = _Group("")
    for member in _members(file, shard):
        if member.key != group.key:
            if group.images or group.number is not None:
                yield group
            group = _Group(member.key)
        if member.extension in ("cls", "json"):
            _read_label(file, shard, member, group)
        else:
            group.images.append(member)
    if group.images or group.number is not None:
        yield group


def _members(file: BinaryIO, shard: Shard) -> Iterator[_Member]:
    """Yield images and labels of a tar, in order; every other member is skipped."""
    for entry in tar_entries(file, shard.name):
        name = entry.name.removeprefix("./")
        folder, _, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        kind = extension.lower()
        is_wanted = kind in ("cls", "json") or kind.rpartition(".")[2] in IMAGES
        if entry.is_folder or not is_wanted or not stem:  # .hidden
            continue
        if name.startswith("/") or ".." in name.split("/"):
            raise BadData(f"{shard.name}: member {name!r} leads outside; pack it with a plain name")
        if entry.kind not in REGULAR:
            raise BadData(f"{shard.name}: {name} is a link or a device; pack the file itself")
        key = name[: -len(extension) - 1]
        check = zlib.crc32(entry.header)
        yield _Member(name, key, kind, folder.rpartition("/")[2], entry.offset, entry.size, check)


def _read_label(file: BinaryIO, shard: Shard, member: _Member, group: _Group) -> None:
    where = f"{shard.name}: {member.name}"
    if member.length > MAX_LABEL_BYTES:
        raise BadData(f"{where} has {member.length} bytes, more than the {MAX_LABEL_BYTES} allowed for a label")
    data = read_at(file.fileno(), member.length, member.offset)
    if member.extension == "cls":
        text = data.strip()
        if not re.fullmatch(rb"\d{1,9}", text) or int(text) > MAX_CLASSES:
            raise BadData(f"{where} holds {data[:40]!r}; expected a number from 0 to {MAX_CLASSES}")
        group.number = int(text)
        return
    try:
        described = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{where} is not JSON: {error}") from error
    if isinstance(described, dict):
        _take_json(described, group, where)


def _take_json(described: dict[str, Any], group: _Group, where: str) -> None:
    """Take {"label": number or name, "synset" or "class": name}; the number of a KEY.cls takes precedence."""
    label = described.get("label")
    names = [described.get(key) for key in ("synset", "class")] + [label]
    group.class_name = next((name for name in names if isinstance(name, str)), "")
    if isinstance(label, int) and not isinstance(label, bool) and group.number is None:
        if not 0 <= label <= MAX_CLASSES:
            raise BadData(f"{where} has label {label}; expected a number from 0 to {MAX_CLASSES}")
        group.number = label
