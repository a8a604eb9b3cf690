"""Tables of labels: CSV files with a line per image, as spreadsheets and Kaggle have them, read with line numbers.

Columns: the file; its label, or several separated by ; or | or as a list, or a column of 0 and 1 for every class;
optionally split. Rows are kept as arrays: a million lines take some 50 MB.
"""

from __future__ import annotations

import codecs
import csv
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from sightline.data.sources.index_files import Names
from sightline.errors import BadData, first_of
from sightline.files.regular import regular
from sightline.files.typed_json import short

# Names of the columns, of several the first.
FILE = (
    *("file", "filename", "file_name", "image", "image_id", "path", "filepath", "file_path", "name"),
    *("image_path", "img_path", "image_name", "img", "id"),
)
LABEL = ("label", "labels", "class", "target", "category")
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
NUMBERS = {"train": 1, "val": 2, "test": 3}  # of splits in LabelTable.splits; 0: the table does not say
EXPECTED = (
    "a CSV file with a header, e.g. `file,label`, and a line per image, e.g. `a.jpg,cat` "
    "(docs/reference/data_labels.md)"
)
BITS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_DELIMITERS = (",", ";", "\t")
_MAX_BYTES = 2**30
_MAX_COLUMNS = 2**16
_MAX_RECORD = 2**22  # characters of a line, or of several that quotes join
_SNIFFED = 2**16  # characters in which the header must begin
_HEAD = 100  # rows that decide what columns hold
_SHOWN = 20  # problems in one message
_LIST = re.compile(r"""\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"|(-?\d+(?:\.\d+)?))\s*(?:,|$|(?=['"]))""")


class Problems:
    """What is wrong with the lines of tables: the first of them, and how many there are."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[tuple[Path, int, str]] = []

    def add(self, path: Path, line: int, text: str) -> None:
        """Note a problem of a line."""
        self.count += 1
        if self.count <= _SHOWN:
            self._shown.append((path, line, text))

    def refuse(self, also: str = "") -> None:
        """Raise BadData with all of them, if there are any; `also` is said after them."""
        if self.count == 1:
            path, line, text = self._shown[0]
            raise line_error(path, line, f"{text}; {also}" if also else text)
        if self.count:
            path = self._shown[0][0]
            every = sorted(self._shown)
            shown = [f"\n  {'' if each == path else f'{each} '}line {line}: {text}" for each, line, text in every]
            more = f"\n  and {self.count - _SHOWN} more" if self.count > _SHOWN else ""
            more += f"\n  {also}" if also else ""
            raise BadData(f"{path}: {self.count} lines cannot be used:{''.join(shown)}{more}")


class Head(NamedTuple):
    """The beginning of a table."""

    path: Path
    delimiter: str
    names: list[str]  # of the columns
    rows: list[list[str]]  # the first ones, each as long as the header

    def place(self, names: Iterable[str]) -> int | None:
        """Return the place of the first of these names that a column has, in any case."""
        known = [name.lower() for name in self.names]
        return next((known.index(name) for name in names if name in known), None)


class Columns(NamedTuple):
    """Places of the columns in a line."""

    file: int
    label: int | None
    split: int | None
    classes: dict[str, int]
    width: int


@dataclass(frozen=True)
class LabelTable:
    """The rows of a table, and its class columns if it has one for each class."""

    path: Path
    files: Names
    lines: np.ndarray  # (rows,) int32
    splits: np.ndarray  # (rows,) uint8, see NUMBERS
    names: list[str]  # of the labels, as they first came
    labels: np.ndarray  # int32 places in `names`: all of the first row, then of the second...
    ends: np.ndarray  # (rows,) int64 in `labels`
    columns: tuple[str, ...]
    is_multi_label: bool


def line_error(path: Path, line: int, text: str) -> BadData:
    """Return an error that names the file and the line."""
    return BadData(f"{path} line {line}: {text}")


def read_head(path: Path) -> Head:
    """Read the header and the first rows; BadData if the file is not text, or has no header or no rows."""
    _check_text(path)
    with _opened(path) as file:
        first = re.split("[\r\n]", file.read(_SNIFFED).lstrip(), maxsplit=1)[0]
    headers = {each: next(csv.reader([first], delimiter=each), []) for each in _DELIMITERS}
    known = [each for each in _DELIMITERS if {name.strip().lower() for name in headers[each]} & {*FILE}]
    delimiter = known[0] if known else max(_DELIMITERS, key=lambda each: len(headers[each]))
    records = _records(path, delimiter)
    _, names = next(records, (0, []))
    if not names:
        raise BadData(f"{path} is empty; expected {EXPECTED}")
    rows = []
    for _, cells in records:
        rows.append([*cells[: len(names)], *[""] * (len(names) - len(cells))])
        if len(rows) == _HEAD:
            break
    if not rows:
        raise BadData(f"{path} has a header and no rows; add a line per image, or remove the file")
    return Head(path, delimiter, names, rows)


def rows_of(head: Head) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row; rows of another length are left out."""
    records = _records(head.path, head.delimiter)
    next(records, None)
    return ((line, cells) for line, cells in records if len(cells) == len(head.names))


def read_table(head: Head, columns: Columns, problems: Problems) -> LabelTable:
    """Read a table and note the lines that cannot be used; BadData where it is not CSV."""
    names, blob, ends = dict[str, int](), bytearray(), array("q")
    lines, splits, labels, label_ends = array("i"), array("B"), array("i"), array("q")
    known: dict[str, tuple[int, ...]] = {}  # cells to labels
    separates = False
    records = _records(head.path, head.delimiter)
    next(records, None)
    for name in columns.classes:
        names[name] = len(names)
    for line, cells in records:
        before = problems.count
        if not (file := _file(head.path, line, cells, columns, problems)):
            continue
        split = _split(head.path, line, cells, columns, problems)
        if columns.label is not None:
            cell = cells[columns.label]
            if cell not in known:
                found, several = labels_in(cell)
                separates = separates or several
                known[cell] = tuple(names.setdefault(name, len(names)) for name in found)
            chosen = known[cell]
        else:
            chosen = _ones(head.path, line, cells, columns, problems)
        if problems.count > before:
            continue
        blob += file.encode()
        ends.append(len(blob))
        lines.append(line)
        splits.append(split)
        labels.extend(chosen)
        label_ends.append(len(labels))
    return LabelTable(
        head.path,
        Names(bytes(blob), np.frombuffer(ends, np.int64)),
        np.frombuffer(lines, np.int32),
        np.frombuffer(splits, np.uint8),
        list(names),
        np.frombuffer(labels, np.int32),
        np.frombuffer(label_ends, np.int64),
        tuple(columns.classes),
        separates or bool(columns.classes),
    )


def labels_in(cell: str) -> tuple[tuple[str, ...], bool]:
    """Return the labels in a cell, and whether it is of a kind that may hold several: separated by ; or |, or a list
    as Python, JSON and NumPy write it."""
    listed = _listed(cell) if cell[:1] + cell[-1:] == "[]" else None
    parts = re.split("[;|]", cell) if listed is None else listed
    labels = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    return labels, len(parts) > 1 if listed is None else len(labels) != 1


def _listed(cell: str) -> list[str] | None:
    """Return the items of ['a', "b", 3] or ['a' 'b']; None if it is not such a list."""
    inside, at, items = cell[1:-1].strip(), 0, []
    while at < len(inside):
        if not (found := _LIST.match(inside, at)):
            return None
        single, double, number = found.groups()
        items.append(number or re.sub(r"\\(.)", r"\1", single or double or ""))
        at = found.end()
    return items


def _opened(path: Path) -> TextIO:
    try:
        return open(path, encoding="utf-8-sig", newline="", opener=regular)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; expected {EXPECTED}") from error


def _check_text(path: Path) -> None:
    """Raise BadData if a file is too large, or is not UTF-8 text; look at a piece at a time."""
    decoder, lines = codecs.getincrementaldecoder("utf-8")(), 1
    try:
        with open(path, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_size > _MAX_BYTES:
                raise BadData(f"{path} has more than {_MAX_BYTES >> 20} MiB; expected {EXPECTED}")
            while block := file.read(2**20):
                if (at := block.find(b"\0")) >= 0:
                    text = "has a NUL byte, so it is not UTF-8 text; save it as CSV UTF-8"
                    raise line_error(path, lines + block.count(b"\n", 0, at), text)
                decoder.decode(block)
                lines += block.count(b"\n")
            decoder.decode(b"", final=True)
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; expected {EXPECTED}") from error
    except UnicodeDecodeError as error:
        line, byte = lines + error.object.count(b"\n", 0, error.start), error.object[error.start]
        raise line_error(path, line, f"is not UTF-8 (byte {byte:#x}); save it as CSV UTF-8") from error


class _Lines:
    """The lines of a file; BadData if those of one record are too long together."""

    def __init__(self, path: Path, file: TextIO):
        self.taken = 0  # characters, of this record
        self._path, self._file = path, file

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_MAX_RECORD + 1)
        self.taken += len(line)
        if self.taken > _MAX_RECORD:
            raise BadData(f"{self._path} has a line of more than {_MAX_RECORD} characters; expected {EXPECTED}")
        if not line:
            raise StopIteration
        return line


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of every record that is not blank, the header first."""
    with _opened(path) as file:
        lines = _Lines(path, file)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for record in reader:
                lines.taken = 0
                if len(record) > _MAX_COLUMNS:
                    raise line_error(path, reader.line_num, f"{len(record)} cells, at most {_MAX_COLUMNS} are read")
                cells = [cell.strip() for cell in record]
                if any(cells):
                    yield reader.line_num, cells
        except csv.Error as error:
            raise line_error(path, reader.line_num, f"is not CSV: {error}; expected {EXPECTED}") from error
        except UnicodeDecodeError as error:
            raise BadData(f"{path} changed while it was read; try again") from error


def _file(path: Path, line: int, cells: Sequence[str], columns: Columns, problems: Problems) -> str:
    if len(cells) < columns.width or any(cells[columns.width :]):
        text = f"{len(cells)} cells, the header has {columns.width}; quote cells that hold a delimiter"
        problems.add(path, line, text)
        return ""
    if not cells[columns.file]:
        problems.add(path, line, "names no file; remove the line")
    return cells[columns.file]


def _split(path: Path, line: int, cells: Sequence[str], columns: Columns, problems: Problems) -> int:
    if columns.split is None:
        return 0
    split = SPLITS.get(cells[columns.split].lower(), "")
    if not split:
        said = short(cells[columns.split])
        problems.add(path, line, f"split is {said}, expected train, val or test; correct it or remove the column")
    return NUMBERS.get(split, 0)


def _ones(path: Path, line: int, cells: Sequence[str], columns: Columns, problems: Problems) -> tuple[int, ...]:
    """Return the classes whose columns hold a 1."""
    found = []
    for number, (name, at) in enumerate(columns.classes.items()):
        bit = BITS.get(cells[at].lower())
        if bit is None:
            text = (
                f"{name} is {short(cells[at])}, expected 0 or 1: without a column called label, each is a class; "
                f"remove the column, call that of the labels label, or name it with --data.label-column"
            )
            problems.add(path, line, text)
            break
        if bit:
            found.append(number)
    return tuple(found)


def found_names(head: Head) -> str:
    """List the columns of a table for a message."""
    return first_of([short(name) for name in head.names], 8)
