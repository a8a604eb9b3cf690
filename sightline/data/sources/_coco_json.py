"""COCO's instances_*.json, 450 MB for the training set, read piece by piece into `Annotations`.

Only what boxes need is kept, so the outlines, which are most of the file, never lie in memory together. Anything that
contradicts itself is BadData with the file and the id. What was read is kept as an index, by size and time of the file.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.sources import index_files
from sightline.data.sources.annotations import Annotations, assembled
from sightline.errors import BadData
from sightline.files.archive import clean_name
from sightline.files.json_lists import BLOCK, JsonLists
from sightline.files.typed_json import short

_MAX_SIDE = 2**20
_WANTED = ("images", "annotations", "categories")


def read_annotations(file: Path, root: Path) -> Annotations:
    """All of a file, from an earlier run where it still has the size and time it had then. `root` is the data path."""
    try:
        found = file.stat()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}; unpack annotations_trainval2017.zip") from error
    key = index_files.digest("coco annotations", 1, file.name, found.st_size, found.st_mtime_ns)
    name = f"coco-{file.stem}"
    kept = index_files.load(root, name, key)
    if kept is not None:
        try:
            return Annotations.loaded(kept)
        except (ValueError, KeyError, IndexError):
            kept = None
    is_settled = index_files.is_settled([found.st_mtime_ns])
    annotations = _Reading(file).annotations()
    if is_settled:
        index_files.save(root, name, key, annotations.arrays())
    return annotations


class _Reading:
    """What has been read of a file so far."""

    def __init__(self, file: Path):
        self.file = file
        self.pictures: dict[int, tuple[int, int, bytes]] = {}
        self.classes: dict[int, str] = {}
        self.ids, self.image_of, self.categories = array("q"), array("q"), array("q")
        self.boxes, self.area = array("d"), array("d")
        self.crowd = array("b")

    def annotations(self) -> Annotations:
        seen = set()
        for key, _, entry in JsonLists(_chunks(self.file), str(self.file)).entries(_WANTED):
            seen.add(key)
            if key == "images":
                self._add_picture(entry)
            elif key == "annotations":
                self._add_object(entry)
            elif key == "categories":
                self._add_class(entry)
        if missing := [key for key in _WANTED if key not in seen]:
            raise BadData(
                f"{self.file} has no {' and no '.join(missing)}; expected COCO's instances_*.json "
                f"(captions and keypoints are other files)"
            )
        image_of, categories = np.asarray(self.image_of, np.int64), np.asarray(self.categories, np.int64)
        ids = np.asarray(self.ids, np.int64)
        self._refuse(ids, ~np.isin(image_of, list(self.pictures)), "is on image", image_of, "images")
        self._refuse(ids, ~np.isin(categories, list(self.classes)), "is of category", categories, "categories")
        values, counts = np.unique(ids, return_counts=True)
        if np.any(counts > 1):
            raise BadData(f"{self.file}: annotation id {values[counts > 1][0]} stands there twice; ids are unique")
        return assembled(
            self.pictures,
            self.classes,
            image_of,
            np.asarray(self.boxes, np.float64),
            np.asarray(self.area, np.float64),
            np.asarray(self.crowd, np.int8),
            categories,
        )

    def _refuse(self, ids: np.ndarray, wrong: np.ndarray, verb: str, values: np.ndarray, where: str) -> None:
        if np.any(wrong):
            first = int(np.flatnonzero(wrong)[0])
            raise BadData(
                f"{self.file}: annotation {ids[first]} {verb} {values[first]}, which is not among its {where} "
                f"({int(wrong.sum())} such annotations); take the file as it was published, or remove them"
            )

    def _add_picture(self, entry: dict[str, Any]) -> None:
        number = self._whole(entry, "id", "images", -(2**63), 2**63 - 1)
        what = f"image {number}"
        height = self._whole(entry, "height", what, 1, _MAX_SIDE)
        width = self._whole(entry, "width", what, 1, _MAX_SIDE)
        if number in self.pictures:
            raise BadData(f"{self.file}: image id {number} stands there twice; ids are unique")
        name = entry.get("file_name")
        if not isinstance(name, str):
            raise BadData(f"{self.file}: {what} has file_name {short(name)}, expected the name of a picture")
        self.pictures[number] = (height, width, clean_name(name, f"{self.file}: {what}").encode("utf-8", "replace"))

    def _add_class(self, entry: dict[str, Any]) -> None:
        number = self._whole(entry, "id", "categories", 0, 2**31)
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            raise BadData(f"{self.file}: category {number} has name {short(name)}, expected a text")
        if number in self.classes:
            raise BadData(f"{self.file}: category id {number} stands there twice; ids are unique")
        self.classes[number] = name.encode("utf-8", "replace").decode()

    def _add_object(self, entry: dict[str, Any]) -> None:
        number = self._whole(entry, "id", "annotations", -(2**63), 2**63 - 1)
        what = f"annotation {number}"
        box = entry.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(_is_finite(side) for side in box):
            raise BadData(
                f"{self.file}: {what} has bbox {short(box)}, expected four finite numbers x, y, width, height"
            )
        # Some tools leave these two out: then the box is the outline, and nothing is a crowd.
        area = entry.get("area", float(box[2]) * float(box[3]))
        if not _is_finite(area):
            raise BadData(f"{self.file}: {what} has area {short(area)}, expected a finite number")
        self.ids.append(number)
        self.image_of.append(self._whole(entry, "image_id", what, -(2**63), 2**63 - 1))
        self.categories.append(self._whole(entry, "category_id", what, 0, 2**31))
        self.boxes.extend(map(float, box))
        self.area.append(float(area))
        self.crowd.append(self._whole(entry, "iscrowd", what, 0, 1) if "iscrowd" in entry else 0)

    def _whole(self, entry: dict[str, Any], key: str, what: str, least: int, most: int) -> int:
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            shown = short(value if isinstance(entry, dict) else entry)
            raise BadData(f"{self.file}: {what}: {key} is {shown}, expected a whole number from {least} to {most}")
        return value


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _chunks(file: Path) -> Iterator[bytes]:
    try:
        with open(file, "rb") as handle:
            progress = index_files.Progress(str(file), max(1, file.stat().st_size >> 20), "MiB")
            while chunk := handle.read(BLOCK):
                yield chunk
                progress(handle.tell() >> 20)
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error
