"""Images whose labels are in a CSV table: PATH/labels.csv, PATH/train.csv and PATH/val.csv, a .csv file as PATH, or a
description with `kind: table`. formats/label_table.py reads the tables.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.formats.label_table import (
    EXPECTED,
    NUMBERS,
    LabelTable,
    Problems,
    line_error,
    read_head,
    read_table,
)
from sightline.data.sources import DEFAULT_OPTIONS, Sample, Source, SourceOptions, layouts, tar, tfrecord
from sightline.data.sources.index_files import Names
from sightline.data.sources.layouts import IMAGES, Place, Splits
from sightline.data.sources.table_columns import TRIED, choose, file_column, files_in
from sightline.errors import BadData, first_of
from sightline.files.image_bytes import read_bytes
from sightline.files.regular import is_file, regular
from sightline.parts import Split

_ENDINGS = (".csv", ".tsv")
_LONGEST_NUMBER = 18  # digits of labels that are sorted as numbers
_MAX_SORTED_BYTES = 2**28  # of names that are sorted as one array
_MAX_BELOW = 8  # folders below a table that may hold its images
_MAX_SUBFOLDERS = 100  # that are looked into for them
_MAX_ENDINGS = 256
_SHOWN = 10  # folders in a message


def detect(path: str) -> bool:
    """Return whether PATH is a table, describes one, or holds one but no class folders below train or val."""
    return _find(path) is not None


def _find(path: str) -> Splits | None:
    """Return where the tables are, each with its folder as that of the images."""
    if layouts.is_description(path):
        found = layouts.read_description(path)
        return found if found.kind == "table" else None
    root = Path(path)
    if path.lower().endswith(_ENDINGS) and root.is_file():
        return Splits("table", Place(root.parent, root), None)
    has_classes = any(any(layouts.each_subfolder(split)) for split in layouts.split_folders(root).values())
    if has_classes or tar.detect(path) or tfrecord.holds_shards(root):
        return None  # a table beside these says something else of them
    names = {"labels", *layouts.TEST, *(name for split in layouts.SPLITS for name in layouts.NAMES[split])}
    files = [file for file in sorted(root.glob("*.[cC][sS][vV]")) if file.stem.lower() in names]
    named = {file.stem.lower(): Place(root, file) for file in files if is_file(file)}
    if "labels" in named:
        return Splits("table", named["labels"], None)
    train, val = (
        next((named[name] for name in layouts.NAMES[split] if name in named), None) for split in layouts.SPLITS
    )
    test, no_test = next((named[name] for name in layouts.TEST if name in named), None), ""
    if train and test and _first_line(train) != _first_line(test):
        val = None if val is test else val  # images to predict, without labels
        no_test = f"{test.labels} has not the columns of {train.labels}"
        test = None
    return Splits("table", train, val, test=test, no_test=no_test) if train or val else None


def _first_line(place: Place) -> bytes:
    assert place.labels is not None
    try:
        with open(place.labels, "rb", opener=regular) as file:
            return file.readline(2**16).strip()
    except OSError:  # reported by who reads all of it
        return b""


class TableSource(Source):
    """Files by class and name; those with any number of labels by name."""

    def __init__(self, root: Path, classes: tuple[str, ...], files: Listed, is_multi_label: bool):
        self.root = root
        self.classes = classes
        self.is_multi_label = is_multi_label
        self.missing = tuple(str(root / files.names[i]) for i in np.flatnonzero(files.sizes < 0).tolist())
        self._names = files.names
        self.labels = files.labels
        self._ends = files.ends
        digest = hashlib.sha256(repr((classes, is_multi_label)).encode())
        digest.update(self._names.blob)
        for column in (self._names.ends, self.labels, self._ends, np.maximum(files.sizes, 0)):
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


class Listed(NamedTuple):
    """Images of tables."""

    names: Names
    labels: np.ndarray  # int32: all classes of the first image, then of the second...
    ends: np.ndarray  # (images,) int64 in `labels`
    sizes: np.ndarray  # (images,) int64; -1 of a file that does not exist

    def take(self, places: np.ndarray) -> Listed:
        """Return some of the images, in another order."""
        labels, ends = _taken(self.labels, self.ends, places)
        return Listed(self.names.take(places), labels, ends, self.sizes[places])


def _taken(values: np.ndarray, ends: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of some rows, one after the other, and where those of each end."""
    if len(ends) == len(values) and (not len(ends) or (ends[0] == 1 and (ends[1:] > ends[:-1]).all())):  # one each
        return values[places], np.arange(1, len(places) + 1)
    counts = np.diff(ends, prepend=0)[places]
    new_ends = np.cumsum(counts, dtype=np.int64)
    at = np.arange(counts.sum()) + np.repeat(ends[places] - new_ends, counts)
    return values[at], new_ends


def _by_name(names: Names, rows: np.ndarray) -> np.ndarray:
    """Return the order of some of the names."""
    width = int((names.ends[1:] - names.ends[:-1]).max(initial=max([1, *names.ends[:1]])))
    if width * len(rows) > _MAX_SORTED_BYTES:
        whole = list(names.each(rows))
        return np.asarray(sorted(range(len(whole)), key=whole.__getitem__), np.int64)
    return np.argsort(np.fromiter(names.each(rows), f"S{width}", len(rows)), kind="stable")


class _Tables(NamedTuple):
    """What the tables of all splits say."""

    layout: Splits
    test: _Part | None
    classes: tuple[str, ...]
    numbers: dict[str, int]  # of the labels
    is_multi_label: bool
    files: dict[str, Listed]  # by split: train and val
    notes: tuple[str, ...]
    ignored: Counter[str]

    def of_test(self, wanted: _Wanted) -> Listed:
        """Return the images of the test split; NoTestSplit if there is none."""
        place = self.layout.place("test")
        if self.test is None and place == self.layout.val:
            return self.files["val"]
        problems = Problems()
        test = self.test or _part("test", place, wanted, problems)  # raises what it raised before
        picked = [(test, test.rows("test"))]
        kept, _ = _each_once(picked, self.is_multi_label, problems)
        files = _listed(kept, self.numbers, self.is_multi_label, problems)
        problems.refuse()
        return files


class _Wanted(NamedTuple):
    """What decides how tables are read, and the folders that were looked into."""

    searches: bool  # for the folder of the images
    file_column: str
    label_column: str
    folders: dict[Path, _Images]

    def images(self, root: Path) -> _Images:
        return self.folders.setdefault(root, _Images(root))


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> TableSource:
    """Read the tables of both splits. Classes are those of train, so both number them alike."""
    wanted = _Wanted(not layouts.is_description(path), options.file_column, options.label_column, {})
    key = ("table", path, options.file_column, options.label_column)
    tables = options.once(key, lambda: _read(path, wanted))
    layout, classes, is_multi_label = tables.layout, tables.classes, tables.is_multi_label
    root = layout.place(split).images
    chosen = tables.of_test(wanted) if split == "test" else tables.files["train" if layout.is_drawn else split]
    held_out = None
    if layout.draws(split):
        groups = np.zeros(len(chosen.names), np.int32) if is_multi_label else chosen.labels
        validates = layouts.validating(chosen.names.each(), groups, options, split)
        held_out = chosen.names.take(np.flatnonzero(validates))
        chosen = chosen.take(np.flatnonzero(validates == (split == "val")))
    source = TableSource(root, classes, chosen, is_multi_label)
    source.layout, source.held_out = layout, held_out
    if split == "train" or layout.train is None:  # of all splits, said once
        source.ignored, source.notes = tables.ignored, tables.notes
    return source


def _read(path: str, wanted: _Wanted) -> _Tables:
    """Read all tables, and find the files that they list."""
    layout = _find(path)
    if layout is None:
        raise BadData(f"{path} holds no table, found there: {layouts.contents(Path(path))}; expected {EXPECTED}")
    problems = Problems()
    parts = _parts(layout, wanted, problems)
    test = _test_part(layout, parts, wanted)
    is_multi_label = any(part.table.is_multi_label for part in parts)
    classes = layout.classes or _classes(parts, problems)
    numbers = {name: label for label, name in enumerate(classes)}
    if layout.classes:  # tables of data with such a list may number their classes
        numbers = {str(label): label for label in range(len(classes))} | numbers
    place = {rows: next((part.place for part in parts if part.has(rows)), None) for rows in NUMBERS}
    validates = layout.test is not None and layout.test == layout.val
    layout = dataclasses.replace(
        layout,
        train=place["train"],
        val=place["val"] or place["test"],
        test=test.place if test else place["val"] if validates else layout.test,
    )
    splits = {"train": "train", "val": "val" if place["val"] else "test"}
    picked = [(part, part.rows(rows)) for rows in splits.values() for part in parts]
    kept, repeated = _each_once(picked, is_multi_label, problems)
    every = [*parts, test] if test else parts
    for part in every:
        part.images.note_listed(part.files.keys, part.files.kinds)
    paths = {part.table.path for part in every}
    ignored = sum((images.unlisted(paths) for images in {part.images for part in every}), Counter[str]())
    for part in parts:
        if part is not test:  # whose lines are compared when it is opened
            part.drop_keys()
    count = len(parts)
    files = {
        split: _listed(kept[count * i : count * (i + 1)], numbers, is_multi_label, problems)
        for i, split in enumerate(splits)
    }
    if problems.count:
        problems.refuse(_missing_too(parts))
    if all((some.sizes < 0).all() for some in files.values()):
        raise _none_there(parts, wanted.searches)
    notes = list(dict.fromkeys(part.said for part in parts if part.said))
    notes += [f"{repeated} repeated lines left out"] if repeated else []
    return _Tables(layout, test, classes, numbers, is_multi_label, files, tuple(notes), ignored)


_Picked = list[tuple["_Part", np.ndarray]]  # rows of parts


def _each_once(picked: _Picked, is_multi_label: bool, problems: Problems) -> tuple[_Picked, int]:
    """Return the rows without those that repeat another one, and how many these are. Note files with several rows that
    say different things."""
    keys = np.concatenate([part.files.keys[rows] for part, rows in picked])
    keys.sort()
    if not (keys[1:] == keys[:-1]).any():  # almost always; takes less memory than what follows
        return picked, 0
    keys = np.concatenate([part.files.keys[rows] for part, rows in picked])
    order = np.argsort(keys, kind="stable")
    again = np.flatnonzero(keys[order[1:]] == keys[order[:-1]]) + 1
    where = np.concatenate([np.full(len(rows), i, np.uint8) for i, (_, rows) in enumerate(picked)])
    which = np.concatenate([rows for _, rows in picked])
    left_out: dict[int, set[int]] = {}
    first, repeated = -1, 0
    for at in again.tolist():
        if first < 0 or keys[order[at]] != keys[order[first]]:
            first = at - 1
        (one, row), (other, its) = ((picked[where[i]][0], int(which[i])) for i in (order[first], order[at]))
        if (one.images.root, one.files.names[row]) != (other.images.root, other.files.names[its]):  # by chance
            continue
        left_out.setdefault(int(where[order[at]]), set()).add(its)
        if one.says(row) == other.says(its):
            repeated += 1
            continue
        labels = "" if one.table.columns or is_multi_label else ", its labels separated by ;"
        place = f"{one.table.path} line {one.table.lines[row]}"
        name = other.files.names[its]
        problems.add(other.table.path, int(other.table.lines[its]), f"{name} is in {place} too; keep one line{labels}")
    kept = [
        (part, rows[~np.isin(rows, list(left_out[i]))] if i in left_out else rows)
        for i, (part, rows) in enumerate(picked)
    ]
    return kept, repeated


def _listed(picked: _Picked, numbers: Mapping[str, int], is_multi_label: bool, problems: Problems) -> Listed:
    """Return the images of these rows, each part's in order."""
    parts = [part.listed(rows, numbers, is_multi_label, problems) for part, rows in picked]
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.names.each()]
    ends = np.cumsum(np.concatenate([np.diff(part.ends, prepend=0) for part in parts]), dtype=np.int64)
    labels, sizes = (np.concatenate([part[i] for part in parts]) for i in (1, 3))
    return Listed(Names.of(names), labels, ends, sizes)


def _parts(layout: Splits, wanted: _Wanted, problems: Problems) -> list[_Part]:
    """Read every table of train and val once."""
    parts: dict[Path, _Part] = {}
    for split in layouts.SPLITS:
        place = layout.train if split == "train" else layout.val
        if place is None or place.labels in parts:
            continue
        part = _part(split, place, wanted, problems)
        parts[part.table.path] = part
    found = list(parts.values())
    for part in found[1:] and found:
        if part.table.splits.any():
            text = "has a split, and there is a table for each split; remove the column or a table"
            raise line_error(part.table.path, int(part.table.lines[0]), text)
    return found


def _part(split: Split, place: Place, wanted: _Wanted, problems: Problems) -> _Part:
    """Read a table; find out which columns it has and, where no description says it, where its images are."""
    if place.labels is None:
        raise BadData(f"{split} of a table needs labels: write `{split}: {{images: FOLDER, labels: FILE.csv}}`")
    head = read_head(place.labels)
    roots = [wanted.images(root) for root in (_roots(place.labels) if wanted.searches else [place.images])]
    file = file_column(head, wanted.file_column, [images.path_of for images in roots])
    for depth in () if file and file.found else (1, 2):
        if not (file and file.found == len(head.rows[:TRIED])) and roots[0].look_below(depth):
            deeper = file_column(head, wanted.file_column, [roots[0].path_of])
            file = deeper if deeper and deeper.found else file
    chosen = choose(head, file, wanted.file_column, wanted.label_column)
    found = [len(files_in(head, chosen.columns.file, images.path_of)) for images in roots]
    for images in roots:
        images.forget()  # where other columns led to
    return _Part(split, read_table(head, chosen.columns, problems), roots[found.index(max(found))], chosen.said)


def _test_part(layout: Splits, parts: Sequence[_Part], wanted: _Wanted) -> _Part | None:
    """Return the table of the test split, which may be one of the others. None without one, or if it cannot be read: no
    training needs it."""
    test = next((part for part in parts if part.has("test")), None)
    if test is None and layout.test and layout.test.labels not in {part.table.path for part in parts}:
        problems = Problems()
        try:
            test = _part("test", layout.test, wanted, problems)
        except BadData:
            return None
        return None if problems.count else test
    return test


def _missing_too(parts: Sequence[_Part]) -> str:
    """Say which listed files do not exist, so that one answer tells all that is wrong; "" if all do, or none."""
    is_missing = [part.files.sizes < 0 for part in parts]
    if all(rows.all() for rows in is_missing):
        return ""
    pairs = zip(parts, is_missing, strict=True)
    names = list(dict.fromkeys(part.files.names[i] for part, rows in pairs for i in np.flatnonzero(rows).tolist()))
    return f"images that do not exist ({len(names)}): {first_of(names)}" if names else ""


def _none_there(parts: Sequence[_Part], searches: bool) -> BadData:
    tables = " and ".join(str(part.table.path) for part in parts)
    folders = [folder for part in parts for folder in (_roots(part.table.path) if searches else (part.images.root,))]
    folders += [part.images.root / place for part in parts for place in part.images.below]
    return BadData(
        f"no image that {tables} lists exists, e.g. {parts[0].table.files[0]}; searched: "
        f"{first_of(list(dict.fromkeys(folders)), _SHOWN)}. Correct the files in the table, or name their folder in a "
        f"description with `kind: table` (docs/reference/data_labels.md)"
    )


def _roots(table: Path) -> tuple[Path, ...]:
    """Return the folders where the files of a table may lie: its own, images, or one with the table's name."""
    own = table.parent
    return own, own / "images", own / table.stem, own / f"{table.stem}_images"


def _classes(parts: Sequence[_Part], problems: Problems) -> tuple[str, ...]:
    """Return the class columns of the first table, or the labels of its training rows, sorted, numbers as numbers."""
    first = parts[0]
    table = first.table
    if table.columns:
        return table.columns
    rows = first.rows(first.split)
    if not len(rows) and len(table.splits):  # a table of val rows only
        rows = np.flatnonzero(table.splits == table.splits[0])
    names = {table.names[place] for place in np.unique(_taken(table.labels, table.ends, rows)[0])}
    if not names:
        problems.refuse()
        raise BadData(f"{table.path} has no labels; expected {EXPECTED}")
    are_numbers = all(name.isdecimal() and len(name) < _LONGEST_NUMBER for name in names)
    return tuple(sorted(names, key=lambda name: (int(name) if are_numbers else 0, name)))


class _Files(NamedTuple):
    """The files that the rows of a table name."""

    names: Names
    keys: np.ndarray  # (rows,) int64: digests of their paths
    sizes: np.ndarray  # (rows,) int64; -1: there is no such file
    kinds: np.ndarray  # (rows,) uint8: places of their endings in _Images.endings, 0: not in a folder that was listed
    several: dict[int, list[str]]  # rows that may mean several files: what they say, and these


class _Part:
    """A table, the split of rows that do not name theirs, and the images that it lists."""

    def __init__(self, split: Split, table: LabelTable, images: _Images, said: str):
        self.split = split
        self.table = table
        self.images = images
        self.said = said
        self.place = Place(images.root, table.path)
        self._splits = np.where(table.splits == 0, np.uint8(NUMBERS[split]), table.splits)

    def has(self, split: str) -> bool:
        """Return whether rows belong to this split."""
        return bool((self._splits == NUMBERS[split]).any())

    def rows(self, split: str) -> np.ndarray:
        """Return the rows of a split."""
        return np.flatnonzero(self._splits == NUMBERS[split])

    def says(self, row: int) -> tuple[int, set[str]]:
        """Return the split and the labels of a row."""
        start, end = self.table.ends[row - 1] if row else 0, self.table.ends[row]
        return int(self._splits[row]), {self.table.names[place] for place in self.table.labels[start:end]}

    @cached_property
    def files(self) -> _Files:
        """Find the files of all rows."""
        blob, ends, several = bytearray(), array("q"), dict[int, list[str]]()
        keys, sizes, kinds = array("q"), array("q"), bytearray()
        root = str(self.images.root)
        for row, file in enumerate(map(os.fsdecode, self.table.files.each())):
            found = self.images.find(file)
            if len(found) > 1:
                several[row] = [file, *(name for name, _ in found)]
            name, size = found[0] if found else (file, 0 if self.images.exists(file) else -1)
            blob += os.fsencode(name)
            ends.append(len(blob))
            keys.append(hash(f"{root}/{name}"))
            sizes.append(size)
            kinds.append(self.images.kind_of(name) if found else 0)
        names = self.table.files
        if blob != names.blob or not np.array_equal(ends, names.ends):
            names = Names(bytes(blob), np.frombuffer(ends, np.int64))
            self.table = dataclasses.replace(self.table, files=names)  # those as written are not needed any more
        numbers = (np.frombuffer(keys, np.int64), np.frombuffer(sizes, np.int64), np.frombuffer(kinds, np.uint8))
        return _Files(names, *numbers, several)

    def drop_keys(self) -> None:
        """Free what only comparing files needs."""
        self.files = self.files._replace(keys=np.zeros(0, np.int64), kinds=np.zeros(0, np.uint8))

    def listed(self, rows: np.ndarray, numbers: Mapping[str, int], is_multi_label: bool, problems: Problems) -> Listed:
        """Return the images of some rows, by class and name, or by name if they have any number of classes; note the
        rows that cannot be used."""
        table, files = self.table, self.files
        known = np.asarray([numbers.get(name, -1) for name in table.names], np.int32)
        labels, ends = _taken(table.labels, table.ends, rows)
        labels, counts = known[labels] if len(known) else labels, np.diff(ends, prepend=0).astype(np.int32)
        is_bad = labels < 0
        bad = dict.fromkeys(np.repeat(np.arange(len(rows)), counts)[is_bad].tolist() if is_bad.any() else (), 0)
        for at in bad:
            unknown = next(name for name in self.says(int(rows[at]))[1] if name not in numbers)
            text = f"no training image has class {unknown!r}; add some, or remove the line"
            problems.add(table.path, int(table.lines[rows[at]]), text)
        for at in [] if is_multi_label else np.flatnonzero(counts != 1).tolist():
            problems.add(table.path, int(table.lines[rows[at]]), "has no label; add one, or remove the line")
        for row in sorted(files.several.keys() & {*rows.tolist()} if files.several else ()):
            said, *may_be = files.several[row]
            what = "ending" if len(set(map(os.path.dirname, may_be))) == 1 else "folder"
            text = f"{said} may be {' or '.join(may_be[:3])}; write its {what}"
            problems.add(table.path, int(table.lines[row]), text)
        if problems.count:
            return Listed(Names.of([]), labels[:0], ends[:0], files.sizes[:0])
        order = _by_name(files.names, rows)
        if is_multi_label:
            labels = labels[np.lexsort((labels, np.repeat(np.arange(len(rows)), counts)))]
        else:
            order = order[np.argsort(labels[order], kind="stable")]
        del counts, is_bad
        labels, ends = _taken(labels, ends, order)
        rows = rows[order]
        del order
        return Listed(files.names.take(rows), labels, ends, files.sizes[rows])


class _Images:
    """The folder of a table's images, and those below it that have files of the table."""

    def __init__(self, root: Path):
        self.root = root
        self.below: list[str] = []  # folders whose images tables may name without them
        self._root = str(root)
        self._folders: dict[str, _Folder | None] = {}  # by their normal paths
        self._endings = [""]  # of listed files
        self._kinds: dict[str, int] = {}  # places in it
        self._listed: list[tuple[np.ndarray, np.ndarray]] = []

    def look_below(self, depth: int) -> bool:
        """Let tables also name files as they are seen from the folders so far below this one, or if deeper from those
        with images. Return whether there are such folders: few, as each of many may hold a file of one name."""
        places = layouts.subfolders(self.root)
        if depth > 1 and len(places) <= _MAX_BELOW:
            inner = [f"{place}/{name}" for place in places for name in layouts.subfolders(self.root / place)]
            places = [place for place in inner if self._has_images(place)] if len(inner) <= _MAX_SUBFOLDERS else []
        if len(places) > _MAX_BELOW:
            return False
        self.below += [place for place in places if place not in self.below]
        return bool(places)

    def _has_images(self, place: str) -> bool:
        folder = _Folder.of(self.root / place)
        return folder is not None and bool(folder.images)

    def path_of(self, file: str) -> str:
        """Return the path that a cell names, "" if there is no such file."""
        found = self.find(file)
        return os.path.join(self._root, found[0][0]) if found else ""

    def find(self, file: str) -> list[tuple[str, int]]:
        """Return the paths that a file of the table may mean, with their sizes: it may lack its ending; tables may be
        from Windows."""
        for path in dict.fromkeys((file, file.replace("\\", "/"))):
            path = os.path.normpath(path)
            if found := self._at(path):
                return found
            if found := [each for place in self.below for each in self._at(os.path.join(place, path))]:
                return sorted(found)
        return []

    def _at(self, path: str) -> list[tuple[str, int]]:
        place = os.path.dirname(path)
        if place not in self._folders:
            self._folders[place] = _Folder.of(self.root / place)
        if (folder := self._folders[place]) is None:
            return []
        if (size := self._size_of_file(path)) >= 0:
            return [(path, size)]
        whole = [path + ending for ending in folder.images if os.path.splitext(path + ending)[1] == ending]
        return [(each, size) for each in whole if (size := self._size_of_file(each)) >= 0]

    def _size_of_file(self, path: str) -> int:
        """Return the bytes of a file; -1 if there is none, or a folder."""
        try:
            found = os.stat(os.path.join(self._root, path))
        except (OSError, ValueError):
            return -1
        return -1 if stat.S_ISDIR(found.st_mode) else found.st_size

    def exists(self, path: str) -> bool:
        """Return whether there is anything at this path; reading says what is wrong with it."""
        return os.path.exists(os.path.join(self._root, path))

    def kind_of(self, name: str) -> int:
        """Return a number for the ending of a file that a table lists; 0 of a hidden one."""
        if os.path.basename(name).startswith("."):
            return 0
        ending = layouts.suffix_of(name)
        if ending not in self._kinds and len(self._endings) < _MAX_ENDINGS:
            self._kinds[ending] = len(self._endings)
            self._endings.append(ending)
        return self._kinds.get(ending, 0)

    def note_listed(self, keys: np.ndarray, kinds: np.ndarray) -> None:
        """Note the files that a table lists: digests of their paths, and the numbers of their endings."""
        self._listed.append((keys, kinds))

    def forget(self) -> None:
        """Forget the folders that were looked into."""
        self._folders.clear()

    def unlisted(self, tables: set[Path]) -> Counter[str]:
        """Count, by ending, the files that no table lists, in the folders of those that one lists."""
        found: Counter[str] = Counter()
        for place, folder in self._folders.items():
            if folder:
                found.update(folder.counts)
                found.subtract(layouts.suffix_of(path.name) for path in tables if path.parent == self.root / place)
        for kind, ending in enumerate(self._endings):  # one by one, which takes less memory
            every = [keys[kinds == kind] for keys, kinds in self._listed]
            keys = every[0] if len(every) == 1 else np.concatenate(every)
            keys.sort()
            found[ending] -= len(keys) - int((keys[1:] == keys[:-1]).sum())
        self._listed.clear()
        return +found


class _Folder(NamedTuple):
    """The files in a folder by their endings, hidden ones aside, and which endings its images have."""

    counts: Counter[str]
    images: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> _Folder | None:
        """List a folder; None if it cannot be read."""
        counts: Counter[str] = Counter()
        images = set()
        try:
            for entry in os.scandir(path):
                if layouts.is_folder(entry):
                    continue
                ending = os.path.splitext(entry.name)[1]
                if ending.lower() in IMAGES:
                    images.add(ending)
                if not entry.name.startswith("."):
                    counts[layouts.suffix_of(entry.name)] += 1
        except (OSError, ValueError):
            return None
        return cls(counts, tuple(sorted(images)))
