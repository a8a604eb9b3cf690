"""COCO's instances_*.json as tables, every number looked at: what `prepare coco` writes from and `check` judges.

What is wrong goes to a callback: `check` notes it and reads on, `prepare` stops there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sightline.errors import BadData

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


def read_instances(data: bytes, name: str, wrong: Wrong = stop_at) -> Instances:
    """The tables of a file. BadData if it is no such file at all; single entries that are wrong are left out."""
    content = _load(data, name)
    found = Instances()
    titles = set[str]()
    for where, entry in _entries(content, "categories", name, wrong):
        number: Any = entry.get("id")
        title: Any = entry.get("name")
        if not _is_whole(number, -_LARGEST_ID, _LARGEST_ID) or not _is_text(title):
            wrong("unreadable entry", where, f"id {number!r} and name {title!r}; expected a whole number and a text")
        elif number in found.categories:
            wrong("duplicate id", where, f"category {number} is {found.categories[number]!r} already")
        elif title in titles:
            wrong("same name twice", where, f"two categories are called {title!r}")
        else:
            found.categories[number] = title
            titles.add(title)
    for where, entry in _entries(content, "images", name, wrong):
        image = _image(entry, where, wrong)
        if image is not None and image.id in found.boxes:
            wrong("duplicate id", where, f"picture {image.id} is there already")
        elif image is not None:
            found.images.append(image)
            found.boxes[image.id] = []
    ids = set[int]()
    for where, entry in _entries(content, "annotations", name, wrong):
        box = _box(entry, where, found, wrong)
        if box is not None and box.id in ids:
            wrong("duplicate id", where, f"annotation {box.id} is there already")
        elif box is not None:
            ids.add(box.id)
            found.boxes[box.image_id].append(box)
    return found


def _load(data: bytes, name: str) -> dict[str, Any]:
    if len(data) > MAX_JSON_BYTES:
        raise BadData(f"{name}: {len(data)} bytes, more than the {MAX_JSON_BYTES} allowed for annotations")
    try:
        # Outlines are not read here; dropped as they come, they never fill the memory all together.
        content = json.loads(data, object_hook=_without_outline)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{name} cannot be read as JSON: {str(error)[:200]}; fetch it again") from None
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        raise BadData(f"{name} has no list of images; expected COCO's instances_*.json")
    if not isinstance(content.get("categories"), list):
        raise BadData(f"{name} has no list of categories; captions are no boxes, give instances_*.json")
    return content


def _without_outline(entry: dict[str, Any]) -> dict[str, Any]:
    entry.pop("segmentation", None)
    return entry


def _entries(content: dict[str, Any], key: str, name: str, wrong: Wrong) -> Iterator[tuple[str, dict[str, Any]]]:
    entries = content.get(key, [])
    if not isinstance(entries, list):
        raise BadData(f"{name}: {key} is no list; fetch it again")
    for number, entry in enumerate(entries):
        where = f"{name}: {key}[{number}]"
        if isinstance(entry, dict):
            yield where, entry
        else:
            wrong("unreadable entry", where, f"{str(entry)[:40]!r}, expected an object")


def _image(entry: dict[str, Any], where: str, wrong: Wrong) -> Image | None:
    number, file = entry.get("id"), entry.get("file_name")
    sides = entry.get("height"), entry.get("width")
    if not _is_whole(number, -_LARGEST_ID, _LARGEST_ID) or not _is_text(file):
        wrong("unreadable entry", where, f"id {number!r} and file_name {file!r}; expected a whole number and a name")
    elif not all(_is_whole(side, 1, _LARGEST_SIDE) for side in sides):
        wrong("unreadable entry", where, f"height and width {sides}; expected two whole numbers from 1")
    else:
        return Image(int(number), file, *map(int, sides))  # type: ignore[arg-type]  # whole numbers, as just seen
    return None


def _box(entry: dict[str, Any], where: str, found: Instances, wrong: Wrong) -> Box | None:
    number, image_id, category = (entry.get(key) for key in ("id", "image_id", "category_id"))
    numbers = entry.get("bbox")
    if not all(_is_whole(each, -_LARGEST_ID, _LARGEST_ID) for each in (number, image_id, category)):
        text = f"id {number!r}, image_id {image_id!r}, category_id {category!r}; expected whole numbers"
        wrong("unreadable entry", where, text)
    elif not isinstance(numbers, list) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        wrong("unreadable entry", where, f"bbox {str(numbers)[:80]}; expected x, y, width, height")
    elif image_id not in found.boxes:
        wrong("unknown picture", where, f"annotation {number} belongs to picture {image_id}, which is not in the list")
    elif category not in found.categories:
        wrong("unknown category", where, f"annotation {number} has category {category}, which is not in the list")
    else:
        x, y, width, height = map(float, numbers)
        # Sets that are like COCO often leave these two out.
        area, crowd = (
            entry.get("area", width * height if math.isfinite(width * height) else 0.0),
            entry.get("iscrowd", 0),
        )
        if not _is_number(area) or not abs(area) <= _LARGEST_AREA:
            wrong("unreadable entry", where, f"area {str(area)[:40]}; expected a number")
        elif crowd not in (0, 1):
            wrong("unreadable entry", where, f"iscrowd {str(crowd)[:40]}; expected 0 or 1")
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
