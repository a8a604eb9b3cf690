"""Hugging Face's folders of images with metadata.jsonl or metadata.csv beside them, also below train/, validation/ and
test/: a column `file_name`, and `label`, `objects` with boxes and categories, or a column of masks.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sightline.data.formats import marked as m
from sightline.data.formats.marked import Marked, WrongEntry
from sightline.data.sources import DEFAULT_OPTIONS, MaskSource, Source, SourceOptions
from sightline.data.sources.annotations import chunks_of
from sightline.data.sources.box_images import BoxImages
from sightline.data.sources.layouts import IMAGES, Place
from sightline.data.sources.tool_exports import MOST_BYTES, Entry, Tool
from sightline.errors import BadData
from sightline.files.regular import regular
from sightline.files.typed_json import loads, short
from sightline.parts import Split

NAMES = ("metadata.jsonl", "metadata.csv")
FILE = "file_name"
_LABELS = ("label", "labels", "class", "category")
CATEGORIES = ("category", "categories", "label", "labels", "category_id", "class", "name")
_CROWDS = ("iscrowd", "is_crowd")
_MASKS = ("mask_file_name", "mask", "segmentation_mask_file_name", "annotation_file_name", "label_file_name",
          "conditioning_image_file_name")  # fmt: skip
_FILE_KEY = re.compile(rb'"file_name"\s*:')


class Metadata(Tool):
    kind, title, suffixes = "metadata", "Hugging Face's metadata", NAMES
    origin = "from Hugging Face's metadata"
    hint = "name the column of labels with --data.label-column"

    def __init__(self, label_column: str = ""):
        self.label_column = label_column
        self.key = label_column

    def is_export(self, head: bytes) -> bool:
        first = head.partition(b"\n")[0]
        if head.lstrip().startswith(b"{"):
            return _FILE_KEY.search(first if first.strip() else head) is not None
        return FILE in _row(first.decode("utf-8", "replace"))

    def exports(self, folder: Path, most: int = 0) -> list[Path]:
        return [file for name in NAMES if os.path.isfile(file := folder / name) and self._is_export(file)][:1]

    def entries(self, file: Path) -> Iterator[Entry]:
        if file.suffix == ".csv":
            yield from _of_csv(file)
            return
        for start, stop, line in _lines(file):
            if not line.strip():
                continue
            try:
                value = loads(line)
            except ValueError as error:
                raise BadData(f"{file}: the line at byte {start} is not JSON: {error}; write it again") from None
            yield start, stop, value

    def value(self, data: bytes) -> Any:
        return loads(data)

    def read(self, value: Any, file: str) -> Marked | None:
        if not isinstance(value, dict) or not isinstance(value.get(FILE), str) or not value[FILE].strip():
            raise WrongEntry(f"{short(value)}, expected an object with the name of an image as {FILE}")
        found = Marked(value[FILE], m.side(value.get("height")), m.side(value.get("width")))
        column = next((each for each in (self.label_column, *_LABELS) if each and value.get(each) is not None), "")
        if self.label_column and self.label_column not in value:
            raise WrongEntry(f"no column is called {self.label_column}, as --data.label-column says: {short([*value])}")
        label = value.get(column) if column else None
        if label not in (None, ""):
            labels = label if isinstance(label, list) else [label]
            found.labels = [m.name(_text(each), f"{column} of {value[FILE]}") for each in labels]
        m.kept(found, boxes_of(value.get("objects"), value[FILE]))
        return found


def boxes_of(objects: Any, where: str) -> Iterator[m.Shape | None]:
    """Yield the boxes of `objects`, a dictionary of lists or a list of dictionaries: x, y, width, height in pixels."""
    if isinstance(objects, str):  # a cell of a table
        try:
            objects = loads(objects.encode("utf-8", "surrogatepass")) if objects.strip() else None
        except ValueError as error:
            raise WrongEntry(f"objects of {where} is not JSON: {error}") from None
    if objects in (None, [], {}):
        return
    if isinstance(objects, list):
        if not all(isinstance(each, dict) for each in objects):
            raise WrongEntry(f"objects of {where} is {short(objects)}, expected a list of objects")
        keys = dict.fromkeys(key for each in objects for key in each)
        objects = {key: [each.get(key) for each in objects] for key in keys}
    if not isinstance(objects, dict):
        raise WrongEntry(f"objects of {where} is {short(objects)}, expected bbox and category")
    boxes = objects.get("bbox", objects.get("bboxes", objects.get("boxes")))
    names = next((objects[key] for key in CATEGORIES if key in objects), None)
    if not isinstance(boxes, list) or not isinstance(names, list) or len(boxes) != len(names):
        raise WrongEntry(f"objects of {where} is {short(objects)}, expected as many bbox as category")
    crowds = next((objects[key] for key in _CROWDS if objects.get(key) is not None), [0] * len(boxes))
    if not isinstance(crowds, list) or len(crowds) != len(boxes) or not all(each in (0, 1, None) for each in crowds):
        raise WrongEntry(f"iscrowd of {where} is {short(crowds)}, expected 0 or 1 for each bbox")
    for box, name, is_crowd in zip(boxes, names, crowds, strict=True):
        left, top, wide, tall = m.numbers(box, f"bbox of {where}", 4)
        if wide < 0 or tall < 0:
            raise WrongEntry(f"bbox of {where} is {short(box)}, expected x, y, width, height in pixels")
        shape = m.rectangle(m.name(_text(name), f"category of {where}"), left, top, left + wide, top + tall)
        yield shape._replace(is_crowd=bool(is_crowd))


def _text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _lines(file: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (start, stop, line) of a file; BadData for a line that is too long."""
    try:
        with open(file, "rb", opener=regular) as opened:
            at = 0
            while line := opened.readline(MOST_BYTES + 1):
                if len(line) > MOST_BYTES:
                    raise BadData(f"{file}: the line at byte {at} has more than the {MOST_BYTES} bytes allowed")
                yield at, at + len(line), line
                at += len(line)
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error


def _row(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _of_csv(file: Path) -> Iterator[Entry]:
    """Yield the rows of a table as dictionaries. They are read once: masks do not come from here."""
    text = io.TextIOWrapper(io.BufferedReader(_Chunks(chunks_of(file))), "utf-8-sig", "surrogateescape", newline="")
    reader = csv.reader(text)
    names: list[str] = []
    try:
        for number, row in enumerate(reader):
            if not number:
                names = row
            elif row:
                if len(row) > len(names):
                    raise BadData(f"{file} line {reader.line_num} has {len(row)} cells, expected {len(names)}")
                yield number, number, dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=True))
    except csv.Error as error:
        raise BadData(f"{file} line {reader.line_num} cannot be read: {error}") from None


class _Chunks(io.RawIOBase):
    """The bytes of an iterator as a file."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._left = self._left or next(self._chunks, b"")
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def masks_of(file: Path) -> dict[str, str]:
    """Return the mask of each image that a file names, both as they stand there; BadData if it has no such column."""
    found: dict[str, str] = {}
    for _, _, value in TOOL.entries(file):
        if not isinstance(value, dict) or not isinstance(value.get(FILE), str):
            raise BadData(f"{file}: {short(value)}, expected an object with the name of an image as {FILE}")
        column = mask_column([*value])
        mask = value.get(column) if column else None
        if not isinstance(mask, str) or not mask:
            raise BadData(f"{file}: {value[FILE]} has no mask; expected its file in one of {', '.join(_MASKS)}")
        found[value[FILE]] = mask
    return found


def mask_column(names: Sequence[str]) -> str:
    """Return the column that holds files of masks; "" if there is none."""
    return next((each for each in _MASKS if each in names), "")


def has_masks(file: Path) -> bool:
    """Return whether the first entry of a file names a mask that is an image."""
    try:
        value = next(iter(TOOL.entries(file)), (0, 0, None))[2]
    except BadData:
        return False
    mask = value.get(mask_column([*value])) if isinstance(value, dict) else None
    return isinstance(mask, str) and mask.lower().endswith(IMAGES)


TOOL = Metadata()
detect = TOOL.detect


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the boxes of `objects`."""
    return TOOL.open_boxes(path, split, options)


def open_source(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> Source:
    """Read the labels of a column."""
    return Metadata(options.label_column).open_source(path, split, options)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> MaskSource:
    """Read the masks that a column names."""
    from sightline.data.sources import masks  # which imports this

    layout = TOOL.layout_at(path)
    return masks.open_named(layout, path, split, options)


def labels_of(place: Place) -> Path | None:
    """Return the file that names the masks of a place of this kind."""
    folder = place.labels or place.images
    files = [folder] * (folder.name in NAMES) if os.path.isfile(folder) else TOOL.exports(folder)
    return next((file for file in files if has_masks(file)), None)
