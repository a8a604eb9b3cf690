"""COCO's instances_*.json, 450 MB for the training set: one reader and one rule about boxes, for `train`, `check` and
`prepare coco`.

Only what boxes need is kept, so the outlines, which are most of the file, never lie in memory together. Each entry that
cannot be used goes to a callback: the default raises BadData, `check` collects and reads on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sightline.errors import BadData
from sightline.files.archive import clean_name
from sightline.files.json_lists import JsonLists
from sightline.files.typed_json import short

MAX_SIDE = 2**20
MAX_CATEGORY = 2**31
MIN_ID, MAX_ID = -(2**63), 2**63 - 1
FAULTS = ("", "not a number", "without an area", "outside of the image")  # of a box, by the numbers of `faults`
_LARGEST_AREA = 1e38  # what the 32 bits of a record hold

Wrong = Callable[[str, str, str], None]  # kind, where, what is wrong


def faults(boxes: np.ndarray, height: int | np.ndarray, width: int | np.ndarray) -> np.ndarray:
    """Return for each box (n, 4) of x, y, width, height why it cannot be trained on, as its place in FAULTS; 0 is none.

    The rule of the original's converter, sums in 64 bits as there; it did not look at the upper left edges, over which
    no box of COCO reaches.
    """
    x, y, wide, tall = boxes.T
    with np.errstate(over="ignore", invalid="ignore"):  # 1e308 + 1e308 is infinite, and outside
        is_inside = (x >= 0) & (y >= 0) & (x + wide <= width) & (y + tall <= height)
    found = np.where(is_inside, 0, 3)
    found[(wide <= 0) | (tall <= 0)] = 2
    found[~np.isfinite(boxes).all(1)] = 1
    return found


def usable(boxes: np.ndarray, height: int | np.ndarray, width: int | np.ndarray) -> np.ndarray:
    """Return which boxes may be trained on: those with an area that lie inside the image."""
    return faults(boxes, height, width) == 0


class Image(NamedTuple):
    """One entry of `images`; `file` is a clean relative path."""

    id: int
    file: str
    height: int
    width: int


@dataclass(frozen=True)
class Instances:
    """The three lists of a file, in its order; the arrays have one row per object."""

    images: list[Image]
    categories: dict[int, str]  # id -> name
    ids: np.ndarray  # (n,) int64
    rows: np.ndarray  # (n,) int64: the object's place in `images`
    labels: np.ndarray  # (n,) int64: the category's id
    boxes: np.ndarray  # (n, 4) float64: x, y, width, height in pixels
    area: np.ndarray  # (n,) float64
    crowd: np.ndarray  # (n,) bool
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))  # (n, 2): see `read_instances`

    def faults(self) -> np.ndarray:
        """Return `faults` of all boxes, each in its image."""
        sides = np.asarray([(image.height, image.width) for image in self.images], np.int64).reshape(-1, 2)
        return faults(self.boxes, *sides[self.rows].T)

    def of_images(self, places: np.ndarray) -> Instances:
        """Return those of some images, given by their places in `images`."""
        new = np.full(len(self.images), -1, np.int64)
        new[places] = np.arange(len(places))
        kept = new[self.rows] >= 0
        columns = {name: getattr(self, name)[kept] for name in ("ids", "labels", "boxes", "area", "crowd")}
        columns["spans"] = self.spans[kept] if len(self.spans) else self.spans
        images = [self.images[place] for place in places.tolist()]
        return replace(self, images=images, rows=new[self.rows[kept]], **columns)


def refuse(kind: str, where: str, text: str) -> None:
    """Raise BadData: the callback of those that need the whole file."""
    raise BadData(f"{where}: {text} ({kind}); `sightline check` lists all that is wrong, fix the file and start again")


def read_instances(chunks: Iterable[bytes], name: str, wrong: Wrong = refuse) -> Instances:
    """Read a file, given as its bytes in pieces, to its end; entries that are reported to `wrong` are left out.

    `spans` of what is returned says which bytes of the file each object takes, so that its outline can be read later;
    both are 0 if it has none. Raises BadData for a file that is not of this form at all.
    """
    reading = _Reading(name, wrong)
    lists = JsonLists(chunks, name)
    add = {"images": reading.add_image, "annotations": reading.add_object, "categories": reading.add_category}
    seen = set()
    for key, number, entry in lists.entries(add):
        seen.add(key)
        try:
            if not isinstance(entry, dict):
                raise _WrongEntry(f"{short(entry)}, expected an object")
            add[key](entry, number)
            if key == "annotations":
                reading.spans.extend(lists.span() if entry.get("segmentation") else (0, 0))
        except _WrongEntry as error:
            wrong(error.kind, f"{name}: {key}[{number}]", str(error))
    if missing := [key for key in add if key not in seen]:
        raise BadData(
            f"{name} has no {' and no '.join(missing)}; expected COCO's instances_*.json "
            f"(captions and keypoints are other files)"
        )
    return reading.instances()


class _WrongEntry(Exception):
    def __init__(self, text: str, kind: str = "unreadable entry"):
        super().__init__(text)
        self.kind = kind


class _Reading:
    """The entries of a file that have been read so far."""

    def __init__(self, name: str, wrong: Wrong):
        self.name, self.wrong = name, wrong
        self.images: dict[int, Image] = {}
        self.categories: dict[int, str] = {}
        self.places, self.ids, self.image_ids, self.labels, self.spans = (array("q") for _ in range(5))
        self.boxes, self.area, self.crowd = array("d"), array("d"), array("b")

    def add_image(self, entry: dict[str, Any], number: int) -> None:
        image_id = _whole(entry, "id", MIN_ID, MAX_ID)
        height, width = (_whole(entry, side, 1, MAX_SIDE) for side in ("height", "width"))
        try:
            file = clean_name(_text(entry, "file_name"), f"image {image_id}")
        except BadData as error:
            raise _WrongEntry(str(error)) from None
        if not file:
            raise _WrongEntry(f"image {image_id} has file_name '.', expected the name of a file")
        if image_id in self.images:
            raise _WrongEntry(f"image {image_id} appears twice; ids are unique", "duplicate id")
        self.images[image_id] = Image(image_id, file, height, width)

    def add_category(self, entry: dict[str, Any], number: int) -> None:
        category = _whole(entry, "id", 0, MAX_CATEGORY)
        name = _text(entry, "name")
        if category in self.categories:
            text = f"category {category} is {short(self.categories[category])} already; ids are unique"
            raise _WrongEntry(text, "duplicate id")
        self.categories[category] = name

    def add_object(self, entry: dict[str, Any], number: int) -> None:
        ids = [_whole(entry, key, MIN_ID, MAX_ID) for key in ("id", "image_id")]
        label = _whole(entry, "category_id", 0, MAX_CATEGORY)
        box = entry.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
            raise _WrongEntry(f"annotation {ids[0]} has bbox {short(box)}, expected x, y, width, height")
        if not all(map(_is_finite, box)):
            text = f"annotation {ids[0]} has bbox {short(box)}, expected four finite numbers x, y, width, height"
            raise _WrongEntry(text, f"box {FAULTS[1]}")
        # Some tools leave these two out: then the box is the outline, and nothing is a crowd.
        area = entry.get("area", float(box[2]) * float(box[3]))
        if "area" not in entry and not abs(area) <= _LARGEST_AREA:
            area = 0.0  # of a box far outside
        if not _is_number(area) or not _is_finite(area) or abs(area) > _LARGEST_AREA:
            raise _WrongEntry(f"annotation {ids[0]} has area {short(area)}, expected a finite number")
        crowd = _whole(entry, "iscrowd", 0, 1) if "iscrowd" in entry else 0
        self.places.append(number)
        self.ids.append(ids[0])
        self.image_ids.append(ids[1])
        self.labels.append(label)
        self.boxes.extend(map(float, box))
        self.area.append(float(area))
        self.crowd.append(crowd)

    def instances(self) -> Instances:
        """Join the lists; at the end, because annotations may stand before what they belong to."""
        ids, image_ids, labels = (np.asarray(each, np.int64) for each in (self.ids, self.image_ids, self.labels))
        has_image, has_category = np.isin(image_ids, list(self.images)), np.isin(labels, list(self.categories))
        is_first = np.zeros(len(ids), bool)
        is_first[np.unique(ids, return_index=True)[1]] = True
        kept = has_image & has_category & is_first
        for row in np.flatnonzero(~kept).tolist():
            kind, text = "duplicate id", "appears twice; ids are unique"
            if not has_image[row]:
                kind, text = "unknown image", f"belongs to image {image_ids[row]}, which is not in the list"
            elif not has_category[row]:
                kind, text = "unknown category", f"has category {labels[row]}, which is not in the list"
            self.wrong(kind, f"{self.name}: annotations[{self.places[row]}]", f"annotation {ids[row]} {text}")
        known = np.asarray(list(self.images), np.int64)
        order = np.argsort(known)
        return Instances(
            list(self.images.values()),
            self.categories,
            ids[kept],
            order[np.searchsorted(known, image_ids[kept], sorter=order)],
            labels[kept],
            np.asarray(self.boxes, np.float64).reshape(-1, 4)[kept],
            np.asarray(self.area, np.float64)[kept],
            np.asarray(self.crowd, bool)[kept],
            np.asarray(self.spans, np.int64).reshape(-1, 2)[kept],
        )


def _whole(entry: dict[str, Any], key: str, least: int, most: int) -> int:
    value = entry.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _WrongEntry(f"{key} is {short(value)}, expected a whole number from {least} to {most}")
    return value


def _text(entry: dict[str, Any], key: str) -> str:
    """Return a text that is not empty; JSON can also spell half characters, which no file and no record can hold."""
    value = entry.get(key)
    if not isinstance(value, str) or not value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _WrongEntry(f"{key} is {short(value)}, expected a text")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
