"""Files that name the classes of masks: Roboflow's _classes.csv, class_dict.csv, CVAT's labelmap.txt, CamVid's
label_colors.txt, or one name per line. They give each class a number or a colour.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sightline.errors import BadData
from sightline.files.regular import is_file, regular
from sightline.files.typed_json import short

FILES = (  # the preferred first
    *("_classes.csv", "class_dict.csv", "class_dict_seg.csv", "classes.csv", "labels.csv", "labelmap.txt"),
    *("label_colors.txt", "class_names.txt", "classes.txt", "codes.txt", "labels.txt"),
)
MOST = 2**16  # rows
LARGEST = 2**16 - 1  # number of a class
_MAX_BYTES = 2**20
_NAME = ("class", "name", "label", "class_name", "classname")
_NUMBER = ("pixel_value", "value", "id", "index", "pixel", "class_id", "class_index")
_COLOUR = (("r", "red"), ("g", "green"), ("b", "blue"))
_CVAT = re.compile(r"([^:]+):(\d+),(\d+),(\d+)(?::.*)?")
_CAMVID = re.compile(r"(\d+)\s+(\d+)\s+(\d+)\s+(\S.*)")
_UNLABELLED = "__ignore__"  # labelme's first name, of the number -1


@dataclass(frozen=True)
class ClassTable:
    """The classes that a file names."""

    file: Path
    names: dict[int, str]  # by number, or by colour as 0xRRGGBB, in the order of the file
    is_coloured: bool


def find_table(folders: Sequence[Path]) -> ClassTable | None:
    """Return the table of the first of some folders that has one. Raises BadData for a file that is not a table."""
    for folder in folders:
        for name in FILES:
            if is_file(folder / name) and (found := read_table(folder / name)):
                return found
    return None


def read_table(file: Path) -> ClassTable | None:
    """Read a table; None for a csv file about something else. Raises BadData for a row that is wrong."""
    try:
        with open(file, "rb", opener=regular) as opened:
            lines = opened.read(_MAX_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error
    rows = _csv_rows(file, lines) if file.suffix == ".csv" else _text_rows(file, lines)
    if rows is None or not rows[0]:
        return None
    names: dict[int, str] = {}
    for number, name in rows[0]:
        if number in names:
            called = _shown(number, rows[1])
            raise BadData(f"{file} gives {called} to {short(names[number])} and to {short(name)}; each needs its own")
        names[number] = name
    of_name: dict[str, int] = {}
    for number, name in names.items():
        if (other := of_name.setdefault(name, number)) != number:
            both = f"{_shown(other, rows[1])} and {_shown(number, rows[1])}"
            raise BadData(f"{file} calls {both} {short(name)}; scores are by name, so each needs its own")
    return ClassTable(file, names, rows[1])


def _shown(number: int, is_coloured: bool) -> str:
    return colour_text(number) if is_coloured else f"the number {number}"


def colour_text(colour: int) -> str:
    """Return a colour as people write it."""
    return f"#{colour:06x}"


Rows = tuple[list[tuple[int, str]], bool]  # (number or colour, name) of each class, and whether they are colours


def _csv_rows(file: Path, lines: Sequence[str]) -> Rows | None:
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise BadData(f"{file} is not a CSV file: {error}") from error
    if not rows:
        return None
    heads = [re.sub(r"\W+", "_", cell.lower()) for cell in rows[0]]
    name_at = next((heads.index(name) for name in _NAME if name in heads), None)
    number_at = next((heads.index(name) for name in _NUMBER if name in heads), None)
    colours_at = [next((heads.index(name) for name in names if name in heads), None) for names in _COLOUR]
    if name_at is None or (number_at is None and None in colours_at):
        return None
    is_coloured = None not in colours_at
    places = [at for at in colours_at if at is not None] if is_coloured else [number_at or 0]
    found = []
    for line, row in enumerate(rows[1:], 2):
        cells = [row[at] if at < len(row) else "" for at in (*places, name_at)]
        found.append((_number(cells[:-1], is_coloured, f"{file}, row {line}"), cells[-1] or str(line - 2)))
    return found, is_coloured


def _text_rows(file: Path, lines: Sequence[str]) -> Rows | None:
    texts = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for pattern, name_first in ((_CVAT, True), (_CAMVID, False)):
        matches = [pattern.fullmatch(text) for text in texts]
        if texts and all(matches):
            groups = [match.groups() for match in matches if match]
            cells = [(each[1:], each[0]) if name_first else (each[:3], each[3]) for each in groups]
            return [(_number(colour, True, str(file)), name.strip()) for colour, name in cells], True
    texts = texts[1:] if texts[:1] == [_UNLABELLED] else texts
    return (list(enumerate(texts)), False) if len(texts) <= MOST else None


def _number(cells: Sequence[str], is_coloured: bool, where: str) -> int:
    most = 255 if is_coloured else LARGEST
    numbers = [int(cell) if re.fullmatch(r"\d{1,5}", cell) else -1 for cell in cells]
    if not all(0 <= number <= most for number in numbers):
        raise BadData(f"{where}: {short(', '.join(cells))}, expected whole numbers from 0 to {most}")
    return numbers[0] << 16 | numbers[1] << 8 | numbers[2] if is_coloured else numbers[0]
