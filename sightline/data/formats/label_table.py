"""Tables of labels: CSV files with a line per image, as spreadsheets and Kaggle have them, read with line numbers.

Columns: the file; its label, or several separated by ; or |, or a column of 0 and 1 for every class; optionally split.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sightline.errors import BadData, first_of
from sightline.files.typed_json import short

# Names of the columns, of several the first.
FILE = ("file", "filename", "file_name", "image", "image_id", "path", "filepath", "file_path", "name")
LABEL = ("label", "labels", "class", "target", "category")
SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
EXPECTED = "a CSV file with a header, e.g. `file,label`, and a line per image, e.g. `a.jpg,cat` (docs/data_labels.md)"
_BITS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_DELIMITERS = (",", ";", "\t")
_MAX_BYTES = 2**30
_SNIFFED = 2**16  # characters in which the header must begin


class Row(NamedTuple):
    """One image of a table; `split` is train, val, test, or "" if the table does not say."""

    line: int
    file: str
    labels: tuple[str, ...]
    split: str


@dataclass(frozen=True)
class LabelTable:
    """The rows of a table, and its class columns if it has one for each class."""

    path: Path
    rows: list[Row]
    columns: tuple[str, ...]
    is_multi_label: bool

    def fail(self, row: Row, text: str) -> BadData:
        """Return an error that names the file and the line."""
        return _fail(self.path, row.line, text)


class _Columns(NamedTuple):
    """Places of the columns in a line."""

    file: int
    label: int | None
    split: int | None
    classes: dict[str, int]
    width: int


def read_table(path: Path) -> LabelTable:
    """Read a table; BadData names the line that cannot be used."""
    text = _text(path)
    first = re.split("[\r\n]", text[:_SNIFFED].lstrip(), maxsplit=1)[0]
    delimiter = next((each for each in _DELIMITERS if _file_column(next(csv.reader([first], delimiter=each), []))), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: _Columns | None = None
    rows = []
    separates = False
    try:
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if columns is None:
                columns = _columns(path, cells)
                continue
            rows.append(_row(path, reader.line_num, cells, columns))
            separates = separates or (columns.label is not None and bool(re.search("[;|]", cells[columns.label])))
    except csv.Error as error:
        raise _fail(path, reader.line_num, f"is not CSV: {error}; expected {EXPECTED}") from error
    if columns is None:
        raise BadData(f"{path} is empty; expected {EXPECTED}")
    if not rows:
        raise BadData(f"{path} has a header and no rows; add a line per image, or remove the file")
    return LabelTable(path, rows, tuple(columns.classes), separates or bool(columns.classes))


def _fail(path: Path, line: int, text: str) -> BadData:
    return BadData(f"{path} line {line}: {text}")


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise BadData(f"{path} has more than {_MAX_BYTES >> 20} MiB; expected {EXPECTED}")
        data = path.read_bytes()
    except OSError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; expected {EXPECTED}") from error
    if (at := data.find(b"\0")) >= 0:
        raise _fail(path, data.count(b"\n", 0, at) + 1, "has a NUL byte, so it is not UTF-8 text; save it as CSV UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _fail(path, line, f"is not UTF-8 (byte {data[error.start]:#x}); save it as CSV UTF-8") from error


def _file_column(header: Sequence[str]) -> str:
    names = [name.strip().lower() for name in header]
    return next((name for name in FILE if name in names), "")


def _columns(path: Path, header: list[str]) -> _Columns:
    names = [name.lower() for name in header]
    found = first_of([short(name) for name in header], 8)
    if not (file := _file_column(header)):
        raise _fail(path, 1, f"no column of files: found {found}; call one {', '.join(FILE)}, or add a header line")
    at = names.index(file)
    split = names.index("split") if "split" in names else None
    label = next((names.index(name) for name in LABEL if name in names), None)
    places = [i for i, name in enumerate(header) if name and i not in (at, split)] if label is None else []
    classes = {header[i]: i for i in places}
    if label is None and not places:
        raise _fail(path, 1, f"no column of labels: found {found}; call one {', '.join(LABEL)}")
    if len(classes) < len(places):
        raise _fail(path, 1, f"two columns have one name: found {found}; rename one of them")
    return _Columns(at, label, split, classes, len(header))


def _row(path: Path, line: int, cells: list[str], columns: _Columns) -> Row:
    if len(cells) < columns.width or any(cells[columns.width :]):
        raise _fail(
            path, line, f"{len(cells)} cells, the header has {columns.width}; quote cells that hold a delimiter"
        )
    file = cells[columns.file]
    if not file:
        raise _fail(path, line, "names no file; remove the line")
    if columns.label is not None:
        labels = tuple(dict.fromkeys(part.strip() for part in re.split("[;|]", cells[columns.label]) if part.strip()))
    else:
        labels = tuple(name for name, at in columns.classes.items() if _bit(path, line, name, cells[at]))
    split = ""
    if columns.split is not None:
        split = SPLITS.get(cells[columns.split].lower(), "")
        if not split:
            said = short(cells[columns.split])
            raise _fail(path, line, f"split is {said}, expected train, val or test; correct it or remove the column")
    return Row(line, file, labels, split)


def _bit(path: Path, line: int, name: str, cell: str) -> bool:
    bit = _BITS.get(cell.lower())
    if bit is None:
        raise _fail(
            path,
            line,
            f"{name} is {short(cell)}, expected 0 or 1: without a column called label, each is a class; remove the "
            f"column, or call that of the labels label",
        )
    return bit
