"""Images whose labels are in a CSV table: PATH/labels.csv, PATH/train.csv and PATH/val.csv, a .csv file as PATH, or a
description with `kind: table`. formats/label_table.py reads the tables.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.formats.label_table import EXPECTED, LabelTable, read_table
from sightline.data.inputs import read_bytes
from sightline.data.sources import DEFAULT_OPTIONS, Sample, Source, SourceOptions, layouts, tar, tfrecord
from sightline.data.sources.index_files import Names
from sightline.data.sources.layouts import IMAGES, Layout, Place
from sightline.errors import BadData
from sightline.parts import Split

_ENDINGS = (".csv", ".tsv")
_LONGEST_NUMBER = 18  # digits of labels that are sorted as numbers
_ROWS = ("train", "val", "test")  # test validates if there is no val
_TRIED = 20  # files of a table that are looked for in each folder where its images may lie


def detect(path: str) -> bool:
    """Return whether PATH is a table, describes one, or holds one but no class folders below train or val."""
    return _find(path) is not None


def _find(path: str) -> Layout | None:
    """Return where the tables are, each with its folder as that of the images."""
    if layouts.is_description(path):
        found = layouts.read_description(path)
        return found if found.kind == "table" else None
    root = Path(path)
    if path.lower().endswith(_ENDINGS) and root.is_file():
        return Layout("table", Place(root.parent, root), None)
    has_classes = any(map(layouts.subfolders, layouts.split_folders(root).values()))
    if has_classes or tar.detect(path) or tfrecord.holds_shards(root):
        return None  # a table beside these says something else of them
    named = {file.stem.lower(): Place(root, file) for file in sorted(root.glob("*.[cC][sS][vV]")) if file.is_file()}
    if "labels" in named:
        return Layout("table", named["labels"], None)
    train, val = (
        next((named[name] for name in layouts.NAMES[split] if name in named), None) for split in layouts.SPLITS
    )
    test, no_test = next((named[name] for name in layouts.TEST if name in named), None), ""
    if train and test and _first_line(train) != _first_line(test):
        val = None if val is test else val  # images to predict, without labels
        no_test = f"{test.labels} has not the columns of {train.labels}"
        test = None
    return Layout("table", train, val, test=test, no_test=no_test) if train or val else None


def _first_line(place: Place) -> bytes:
    assert place.labels is not None
    try:
        with place.labels.open("rb") as file:
            return file.readline(2**16).strip()
    except OSError:  # reported by who reads all of it
        return b""


class TableSource(Source):
    """Files by class and name; those with any number of labels by name."""

    def __init__(self, root: Path, classes: tuple[str, ...], files: Sequence[Listed], is_multi_label: bool):
        self.root = root
        self.classes = classes
        self.is_multi_label = is_multi_label
        self.missing = tuple(str(root / os.fsdecode(file.name)) for file in files if file.size is None)
        self._names = Names.of([file.name for file in files])
        self.labels = np.asarray([label for file in files for label in file.labels], np.int32)
        self._ends = np.cumsum([len(file.labels) for file in files], dtype=np.int64)
        digest = hashlib.sha256(repr((classes, is_multi_label)).encode())
        digest.update(self._names.blob)
        sizes = np.asarray([file.size or 0 for file in files], np.int64)
        for column in (self._names.ends, self.labels, self._ends, sizes):
            digest.update(column.tobytes())
        self.fingerprint = digest.hexdigest()
        self.files = PathsBelow(root, self._names)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return self._names[index]

    def read(self, index: int) -> Sample:
        name = self.name(index)
        chosen = self.labels[self._ends[index - 1] if index else 0 : self._ends[index]]
        data = read_bytes(self.root / name, name)
        if not self.is_multi_label:
            return Sample(data, int(chosen[0]))
        label = np.zeros(len(self.classes), np.uint8)
        label[chosen] = 1
        return Sample(data, label)


class _Tables(NamedTuple):
    """What the tables of all splits say."""

    layout: Layout
    parts: list[_Part]  # of train and val
    test: _Part | None
    classes: tuple[str, ...]
    numbers: dict[str, int]  # of the labels
    is_multi_label: bool
    files: dict[str, list[Listed]]  # by split: train and val

    def of_test(self) -> list[Listed]:
        """Return the images of the test split; NoTestSplit if there is none."""
        place = self.layout.place("test")
        if self.test is None and place == self.layout.val:
            return self.files["val"]
        test = self.test or _part("test", place, searches=False, folders={})  # raises what it raised before
        return test.files("test", self.numbers, self.is_multi_label, {})


class Listed(NamedTuple):
    """One image of a table; its size is None if there is no such file."""

    name: bytes
    labels: tuple[int, ...]
    size: int | None


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> TableSource:
    """Read the tables of both splits. Classes are those of train, so both number them alike."""
    tables = options.once(("table", path), lambda: _read(path))
    layout, parts, classes, is_multi_label = tables.layout, tables.parts, tables.classes, tables.is_multi_label
    root = layout.place(split).images
    if split == "test":
        chosen = tables.of_test()
    else:
        chosen = tables.files["train" if layout.is_drawn else split]
    held_out = None
    if layout.draws(split):
        groups = [0 if is_multi_label else file.labels[0] for file in chosen]
        validates = layouts.validating([file.name for file in chosen], groups, options, split)
        held_out = Names.of([chosen[i].name for i in np.flatnonzero(validates)])
        chosen = [chosen[i] for i in np.flatnonzero(validates == (split == "val"))]
    source = TableSource(root, classes, chosen, is_multi_label)
    source.layout, source.held_out = layout, held_out
    if split == "train" or layout.train is None:  # of all splits, said once
        every = [*parts, tables.test] if tables.test else parts
        paths = {part.table.path for part in every}
        source.ignored = sum((images.unlisted(paths) for images in {part.images for part in every}), Counter[str]())
    return source


def _read(path: str) -> _Tables:
    """Read all tables, and find the files that they list."""
    layout = _find(path)
    if layout is None:
        raise BadData(f"{path} holds no table, found there: {layouts.contents(Path(path))}; expected {EXPECTED}")
    searches = not layouts.is_description(path)
    folders: dict[Path, _Images] = {}
    parts = _parts(layout, searches, folders)
    test = _test_part(layout, parts, searches, folders)
    is_multi_label = any(part.table.is_multi_label for part in parts)
    classes = layout.classes or _classes(parts)
    numbers = {name: label for label, name in enumerate(classes)}
    if layout.classes:  # tables of data with such a list may number their classes
        numbers = {str(label): label for label in range(len(classes))} | numbers
    place = {rows: next((part.place for part in parts if part.has(rows)), None) for rows in _ROWS}
    validates = layout.test is not None and layout.test == layout.val
    layout = dataclasses.replace(
        layout,
        train=place["train"],
        val=place["val"] or place["test"],
        test=test.place if test else place["val"] if validates else layout.test,
    )
    lines: dict[str, tuple[Path, int]] = {}
    files = {
        split: [file for part in parts for file in part.files(rows, numbers, is_multi_label, lines)]
        for split, rows in (("train", "train"), ("val", "val" if place["val"] else "test"))
    }
    if all(file.size is None for some in files.values() for file in some):
        raise _none_there(parts, searches)
    return _Tables(layout, parts, test, classes, numbers, is_multi_label, files)


def _parts(layout: Layout, searches: bool, folders: dict[Path, _Images]) -> list[_Part]:
    """Read every table of train and val once."""
    parts: dict[Path, _Part] = {}
    for split in layouts.SPLITS:
        place = layout.train if split == "train" else layout.val
        if place is None or place.labels in parts:
            continue
        part = _part(split, place, searches, folders)
        parts[part.table.path] = part
    found = list(parts.values())
    for part in found[1:] and found:
        if any(row.split for row in part.table.rows):
            row = part.table.rows[0]
            raise part.table.fail(row, "has a split, and there is a table for each split; remove the column or a table")
    return found


def _part(split: Split, place: Place, searches: bool, folders: dict[Path, _Images]) -> _Part:
    """Read a table; where no description says it, find out where its images are."""
    if place.labels is None:
        raise BadData(f"{split} of a table needs labels: write `{split}: {{images: FOLDER, labels: FILE.csv}}`")
    table = read_table(place.labels)
    root = _root_of(table) if searches else place.images
    return _Part(split, table, folders.setdefault(root, _Images(root)))


def _test_part(layout: Layout, parts: Sequence[_Part], searches: bool, folders: dict[Path, _Images]) -> _Part | None:
    """Return the table of the test split, which may be one of the others, and note which images it lists. None without
    one, or if it cannot be read: no training needs it."""
    test = next((part for part in parts if part.has("test")), None)
    if test is None and layout.test and layout.test.labels not in {part.table.path for part in parts}:
        try:
            test = _part("test", layout.test, searches, folders)
        except BadData:
            return None
    for row in test.table.rows if test else ():
        if test and (row.split or test.split) == "test":
            test.images.named(row.file)
    return test


def _none_there(parts: Sequence[_Part], searches: bool) -> BadData:
    tables = " and ".join(str(part.table.path) for part in parts)
    folders = [folder for part in parts for folder in (_roots(part.table) if searches else (part.images.root,))]
    return BadData(
        f"no image that {tables} lists exists, e.g. {parts[0].table.rows[0].file}; searched: "
        f"{', '.join(map(str, dict.fromkeys(folders)))}. Correct the files in the table, or name their folder in a "
        f"description with `kind: table` (docs/data_labels.md)"
    )


def _roots(table: LabelTable) -> tuple[Path, ...]:
    """Return the folders where the files of a table may lie: its own, images, or one with the table's name."""
    own = table.path.parent
    return own, own / "images", own / table.path.stem, own / f"{table.path.stem}_images"


def _root_of(table: LabelTable) -> Path:
    """Return the folder that has most of a table's first files."""
    roots = _roots(table)
    first = [row.file for row in table.rows[:_TRIED]]
    there = [sum(bool(images.named(file)) for file in first) for images in map(_Images, roots)]
    return roots[there.index(max(there))]


def _classes(parts: Sequence[_Part]) -> tuple[str, ...]:
    """Return the class columns of the first table, or the labels of its training rows, sorted, numbers as numbers."""
    first = parts[0]
    if first.table.columns:
        return first.table.columns
    split = first.split if first.has(first.split) else first.table.rows[0].split  # a table of val rows only
    names = {name for row in first.table.rows if (row.split or first.split) == split for name in row.labels}
    if not names:
        raise BadData(f"{first.table.path} has no labels; expected {EXPECTED}")
    are_numbers = all(name.isdecimal() and len(name) < _LONGEST_NUMBER for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if are_numbers else 0, name)))


class _Part:
    """A table, the split of rows that do not name theirs, and the images that it lists."""

    def __init__(self, split: Split, table: LabelTable, images: _Images):
        self.split = split
        self.table = table
        self.images = images
        self.place = Place(images.root, table.path)

    def has(self, split: str) -> bool:
        """Return whether rows belong to this split."""
        return any((row.split or self.split) == split for row in self.table.rows)

    def files(
        self, split: str, numbers: Mapping[str, int], is_multi_label: bool, lines: dict[str, tuple[Path, int]]
    ) -> list[Listed]:
        """Return the images of a split, by class and name, or by name if they have any number of classes. `lines` maps
        the files of all tables to the line that lists each."""
        root, found = str(self.images.root), []
        for row in self.table.rows:
            if (row.split or self.split) != split:
                continue
            if unknown := [name for name in row.labels if name not in numbers]:
                raise self.table.fail(row, f"no training image has class {unknown[0]!r}; add some, or remove the line")
            if not is_multi_label and len(row.labels) != 1:
                raise self.table.fail(row, "has no label; add one, or remove the line")
            names = self.images.named(row.file)
            if len(names) > 1:
                raise self.table.fail(row, f"{row.file} may be {' or '.join(names[:3])}; write its ending")
            name, here = names[0] if names else row.file, (self.table.path, row.line)
            first, line = lines.setdefault(f"{root}/{name}", here)
            if line != row.line or first != self.table.path:
                raise self.table.fail(
                    row, f"{name} is in {first} line {line} too; keep one line, its labels separated by ;"
                )
            labels = tuple(sorted(numbers[label] for label in row.labels))
            found.append(Listed(os.fsencode(name), labels, self.images.size(name)))
        return sorted(found, key=lambda file: ((), file.name) if is_multi_label else (file.labels, file.name))


class _Images:
    """The folder of a table's images, and those below it that have files of the table."""

    def __init__(self, root: Path):
        self.root = root
        self._folders: dict[str, _Folder] = {}  # by their normal paths

    def named(self, file: str) -> list[str]:
        """Return the paths that a file of the table may mean: it may lack its ending; tables may be from Windows."""
        place, _, name = file.rpartition("/")
        if (folder := self._folders.get(place)) and name in folder.names:  # almost always
            folder.listed.add(name)
            return [file]
        for path in dict.fromkeys((file, file.replace("\\", "/"))):
            place, name = os.path.split(os.path.normpath(path))
            if place not in self._folders:
                self._folders[place] = _Folder(self.root / place)
            folder = self._folders[place]
            found = [name] if name in folder.names else sorted(folder.by_stem.get(name, ()))
            if found:
                folder.listed.update(found)
                return [os.path.join(place, each) for each in found]
        return []

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if there is none, or a link that leads nowhere."""
        try:
            return os.stat(os.path.join(self.root, path)).st_size
        except (OSError, ValueError):
            return None

    def unlisted(self, tables: set[Path]) -> Counter[str]:
        """Count, by ending, the files that no table lists, in the folders of those that one lists."""
        found: Counter[str] = Counter()
        for place, folder in self._folders.items():
            left = [name for name in folder.names - folder.listed if not name.startswith(".")]
            found.update(layouts.suffix_of(name) for name in left if self.root / place / name not in tables)
        return found


class _Folder:
    """The names of the files in a folder, and which of them a table lists."""

    def __init__(self, path: Path):
        self.listed: set[str] = set()
        try:
            self.names = {entry.name for entry in os.scandir(path) if not layouts.is_folder(entry)}
        except (OSError, ValueError):
            self.names = set()

    @cached_property
    def by_stem(self) -> dict[str, list[str]]:
        """The images by their names without ending."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            stem, ending = os.path.splitext(name)
            if ending.lower() in IMAGES:
                found.setdefault(stem, []).append(name)
        return found
