"""VIA's json files of versions 1 and 2: a project, or annotations exported as JSON, such as via_region_data.json.

The class of a region is its attribute; with several, the one called class, label, name, type or category. So are labels
of images, from attributes of files. A region without any is of the only other class, or of the class `object`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.formats import marked as m
from sightline.data.formats.marked import Marked, Shape, WrongEntry
from sightline.data.sources.annotations import chunks_of
from sightline.data.sources.tool_exports import MOST_BYTES, Entry, Tool
from sightline.errors import BadData
from sightline.files.json_lists import JsonLists
from sightline.files.typed_json import loads, short

OBJECT = "object"  # the class of regions without an attribute
_CLASS = ("class", "label", "name", "type", "category", "object", "classname", "class_name")
_PROJECT = re.compile(rb'"_via_(?:settings|img_metadata|attributes|data_format_version)"\s*:')
_REGIONS = re.compile(rb'"(?:regions|file_attributes)"\s*:\s*[\[{]')
_VERSION_3 = re.compile(rb'"vid_list"\s*:|"data_format_version"\s*:\s*"3|"fid_list"\s*:')
_KEYS = ("filename", "regions")


class Via(Tool):
    kind, title, nameless = "via", "VIA", OBJECT

    def is_export(self, head: bytes) -> bool:
        if not head.lstrip().startswith(b"{"):
            return False
        if _PROJECT.search(head) or _VERSION_3.search(head):
            return True
        return b'"filename"' in head and _REGIONS.search(head) is not None

    def entries(self, file: Path) -> Iterator[Entry]:
        with_head = next(chunks_of(file), b"")[: 2**16]
        if _VERSION_3.search(with_head):
            raise BadData(
                f"{file} is a project of VIA 3, which is not read; in VIA 3 choose Export, COCO format, or annotate "
                "images with VIA 2"
            )
        within = "_via_img_metadata" if _PROJECT.search(with_head) else ""
        lists = JsonLists(chunks_of(file), str(file), MOST_BYTES)
        for _, value in lists.members(within):
            if within or isinstance(value, dict):
                yield (*lists.span(), value)

    def value(self, data: bytes) -> Any:
        return loads(data)

    def read(self, value: Any, file: str) -> Marked | None:
        if not isinstance(value, dict) or any(key not in value for key in _KEYS):
            raise WrongEntry(f"{short(value)}, expected an image with `filename` and `regions`")
        name = value["filename"]
        if not isinstance(name, str) or not name.strip():
            raise WrongEntry(f"filename is {short(name)}, expected a name")
        found = Marked(name)
        regions = value["regions"]
        if isinstance(regions, dict):  # VIA 1
            regions = list(regions.values())
        if not isinstance(regions, list):
            raise WrongEntry(f"regions is {short(regions)}, expected a list")
        for number, each in enumerate(regions):
            if not isinstance(each, dict) or not isinstance(each.get("shape_attributes"), dict):
                raise WrongEntry(f"regions[{number}] is {short(each)}, expected one with `shape_attributes`")
            label = next(iter(_classes(each.get("region_attributes"), f"regions[{number}]")), OBJECT)
            m.kept(found, [_shape(label, each["shape_attributes"], f"regions[{number}]")])
        try:
            found.labels = _classes(value.get("file_attributes"), "file_attributes")
        except WrongEntry:  # captions, licences: several that say nothing of a class
            found.labels = []
        return found


def _classes(attributes: object, where: str) -> list[str]:
    """Return the values of the attribute that says the class: one of a text, several of boxes that are ticked."""
    if not isinstance(attributes, dict):
        return []
    filled = {key: value for key, value in attributes.items() if value not in ("", None, {}) and value is not False}
    if not filled:
        return []
    known = {key.strip().lower(): key for key in filled}
    chosen = next((known[key] for key in _CLASS if key in known), "")
    if not chosen and len({str(value) for value in filled.values()}) > 1:
        raise WrongEntry(
            f"{where} has the attributes {', '.join(map(short, filled))}, of which none is called "
            f"{', '.join(_CLASS[:5])}; rename the one that says the class"
        )
    value = filled[chosen or next(iter(filled))]
    if isinstance(value, dict):
        return [m.name(key, where) for key, is_set in value.items() if is_set is True]
    return [m.name(str(value) if isinstance(value, int | float) else value, where)]


def _shape(label: str, each: dict[str, Any], where: str) -> Shape | None:
    kind = each.get("name")

    def read(*keys: str) -> list[float]:
        return [m.number(each.get(key), f"{key} of {where}") for key in keys]

    if kind == "rect":
        left, top, wide, tall = read("x", "y", "width", "height")
        return m.rectangle(label, left, top, left + wide, top + tall)
    if kind == "circle":
        x, y, radius = read("cx", "cy", "r")
        return m.ellipse(label, x, y, radius, radius)
    if kind == "ellipse":
        x, y, rx, ry = read("cx", "cy", "rx", "ry")
        theta = m.number(each.get("theta", 0), f"theta of {where}")  # radians
        return m.ellipse(label, x, y, rx, ry, float(np.degrees(theta)))
    if kind in ("polygon", "polyline"):
        xs, ys = (m.numbers(each.get(f"all_points_{axis}"), f"all_points_{axis} of {where}") for axis in "xy")
        if len(xs) != len(ys):
            raise WrongEntry(f"{where} has {len(xs)} x and {len(ys)} y, expected as many")
        corners = np.asarray([xs, ys], np.float64).T.reshape(-1, 2)
        is_closed = len(corners) > 3 and np.array_equal(corners[0], corners[-1])
        return m.polygon(label, corners) if kind == "polygon" or is_closed else None
    return None


TOOL = Via()
detect, open_boxes, open_masks, open_source = TOOL.detect, TOOL.open_boxes, TOOL.open_masks, TOOL.open_source
