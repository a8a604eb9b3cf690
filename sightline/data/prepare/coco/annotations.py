"""COCO's instances_*.json as tables, every number looked at: what `prepare coco` writes from and `check` judges.

What is wrong goes to a callback: `check` notes it and reads on, `prepare` stops there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sightline.errors import BadData
from sightline.files.json_lists import JsonLists
from sightline.files.typed_json import short

# Of the whole file: COCO's training annotations have 450 MB, nearly all of it outlines.
MAX_JSON_BYTES = 2 * 2**30
_LARGEST_ID = 2**63 - 1
_LARGEST_SIDE = 2**31 - 1
_LARGEST_AREA = 1e38  # what the 32 bits of a record hold

Wrong = Callable[[str, str, str], None]  # kind, where, what is wrong


class Image(NamedTuple):
    """One entry of `images`."""

    id: int
    file: str
    height: int
    width: int


class Box(NamedTuple):
    """One entry of `annotations`: x, y, width, height in pixels; numbers may be NaN or lie anywhere."""

    id: int
    image_id: int
    category: int
    x: float
    y: float
    width: float
    height: float
    area: float
    is_crowd: bool


@dataclass
class Instances:
    """The three lists of a file; boxes lie with their picture, in the order of the file."""

    images: list[Image] = field(default_factory=list)
    boxes: dict[int, list[Box]] = field(default_factory=dict)  # by image id
    categories: dict[int, str] = field(default_factory=dict)  # id -> name


def fault_of(box: Box, image: Image) -> str:
    """Why a box cannot be trained on, or ''.

    The rule of the original's converter, sums in 64 bits as there, and of the left and upper edge too, which it forgot.
    """
    x, y, width, height = numbers = (box.x, box.y, box.width, box.height)
    if not all(map(math.isfinite, numbers)):
        return "not a number"
    if width <= 0 or height <= 0:
        return "without an area"
    if x < 0 or y < 0 or x + width > image.width or y + height > image.height:
        return "outside of the picture"
    return ""


def stop_at(kind: str, where: str, text: str) -> None:
    """A `Wrong` that ends the command."""
    raise BadData(f"{where}: {text} ({kind}); `sightline check` lists all there is, mend the file and start again")


def read_instances(chunks: Iterable[bytes], name: str, wrong: Wrong = stop_at) -> Instances:
    """The tables of a file, given as its bytes in pieces, and read to its end. BadData if it is no such file at all;
    single entries that are wrong are left out."""
    found = Instances()
    titles = set[str]()
    boxes, places = list[Box](), array("q")
    reading = JsonLists(_bounded(chunks, name), name)
    for key, number, entry in reading.entries(("categories", "images", "annotations")):
        where = f"{name}: {key}[{number}]"
        if not isinstance(entry, dict):
            wrong("unreadable entry", where, f"{short(entry)[:40]!r}, expected an object")
        elif key == "categories":
            _add_category(entry, where, found, titles, wrong)
        elif key == "images":
            _add_image(entry, where, found, wrong)
        elif (box := _box(entry, where, wrong)) is not None:
            boxes.append(box)
            places.append(number)
    if "images" not in reading.lists:
        raise BadData(f"{name} has no list of images; expected COCO's instances_*.json")
    if "categories" not in reading.lists:
        raise BadData(f"{name} has no list of categories; captions are no boxes, give instances_*.json")
    _add_boxes(boxes, [f"{name}: annotations[{place}]" for place in places], found, wrong)
    return found


def _bounded(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_JSON_BYTES:
            raise BadData(f"{name}: more than the {MAX_JSON_BYTES} bytes allowed for annotations")
        yield chunk


def _add_category(entry: dict[str, Any], where: str, found: Instances, titles: set[str], wrong: Wrong) -> None:
    number: Any = entry.get("id")
    title: Any = entry.get("name")
    if not _is_whole(number, -_LARGEST_ID, _LARGEST_ID) or not _is_text(title):
        text = f"id {short(number)} and name {short(title)}; expected a whole number and a text"
        wrong("unreadable entry", where, text)
    elif number in found.categories:
        wrong("duplicate id", where, f"category {number} is {short(found.categories[number])} already")
    elif title in titles:
        wrong("same name twice", where, f"two categories are called {short(title)}")
    else:
        found.categories[number] = title
        titles.add(title)


def _add_image(entry: dict[str, Any], where: str, found: Instances, wrong: Wrong) -> None:
    image = _image(entry, where, wrong)
    if image is not None and image.id in found.boxes:
        wrong("duplicate id", where, f"picture {image.id} is there already")
    elif image is not None:
        found.images.append(image)
        found.boxes[image.id] = []


def _add_boxes(boxes: Iterable[Box], places: Iterable[str], found: Instances, wrong: Wrong) -> None:
    """At the end: annotations may stand before the pictures that they belong to."""
    ids = set[int]()
    for box, where in zip(boxes, places, strict=True):
        if box.image_id not in found.boxes:
            text = f"annotation {box.id} belongs to picture {box.image_id}, which is not in the list"
            wrong("unknown picture", where, text)
        elif box.category not in found.categories:
            text = f"annotation {box.id} has category {box.category}, which is not in the list"
            wrong("unknown category", where, text)
        elif box.id in ids:
            wrong("duplicate id", where, f"annotation {box.id} is there already")
        else:
            ids.add(box.id)
            found.boxes[box.image_id].append(box)


def _image(entry: dict[str, Any], where: str, wrong: Wrong) -> Image | None:
    number, file = entry.get("id"), entry.get("file_name")
    sides = entry.get("height"), entry.get("width")
    if not _is_whole(number, -_LARGEST_ID, _LARGEST_ID) or not _is_text(file):
        text = f"id {short(number)} and file_name {short(file)}; expected a whole number and a name"
        wrong("unreadable entry", where, text)
    elif not all(_is_whole(side, 1, _LARGEST_SIDE) for side in sides):
        wrong("unreadable entry", where, f"height and width {short(sides)}; expected two whole numbers from 1")
    else:
        return Image(int(number), file, *map(int, sides))  # type: ignore[arg-type]  # whole numbers, as just seen
    return None


def _box(entry: dict[str, Any], where: str, wrong: Wrong) -> Box | None:
    number, image_id, category = (entry.get(key) for key in ("id", "image_id", "category_id"))
    numbers = entry.get("bbox")
    if not all(_is_whole(each, -_LARGEST_ID, _LARGEST_ID) for each in (number, image_id, category)):
        text = f"id {short(number)}, image_id {short(image_id)}, category_id {short(category)}; expected whole numbers"
        wrong("unreadable entry", where, text)
    elif not isinstance(numbers, list) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        wrong("unreadable entry", where, f"bbox {short(numbers)}; expected x, y, width, height")
    else:
        x, y, width, height = map(float, numbers)
        # Sets that are like COCO often leave these two out.
        area, crowd = (
            entry.get("area", width * height if math.isfinite(width * height) else 0.0),
            entry.get("iscrowd", 0),
        )
        if not _is_number(area) or not abs(area) <= _LARGEST_AREA:
            wrong("unreadable entry", where, f"area {short(area)}; expected a number")
        elif crowd not in (0, 1):
            wrong("unreadable entry", where, f"iscrowd {short(crowd)}; expected 0 or 1")
        else:
            return Box(number, image_id, category, x, y, width, height, float(area), bool(crowd))  # type: ignore[arg-type]
    return None


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: object) -> bool:
    """JSON can spell half characters, which no file and no record can hold."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_number(value: object) -> bool:
    """Python's JSON also reads NaN and Infinity, and integers of any length."""
    return isinstance(value, float) or _is_whole(value, -_LARGEST_ID, _LARGEST_ID)
