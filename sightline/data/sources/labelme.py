"""LabelMe's json files, one for each image, beside the images or in a folder of their own, also below train/ and val/.

Polygons, rectangles, circles and masks become boxes and outlines; flags of an image that are true are its labels. The
json may hold the image itself, which is read from there where no file has it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.decode import decode_values
from sightline.data.formats import marked as m
from sightline.data.formats.marked import Marked, Shape, WrongEntry
from sightline.data.sources.tool_exports import MOST_BYTES, Entry, Tool
from sightline.errors import BadData, BadSample
from sightline.files.image_bytes import span_within
from sightline.files.regular import regular
from sightline.files.typed_json import loads, short

_SHAPES = re.compile(rb'"shapes"\s*:\s*\[')
_OTHERS = re.compile(rb'"(?:imagePath|imageData|version|lineColor|shape_type|fill_color|imageHeight)"\s*:')
_MOST_FILE = 2**28  # bytes: the image itself may be in it


class LabelMe(Tool):
    kind, title, is_one_file = "labelme", "LabelMe", False

    def is_export(self, head: bytes) -> bool:
        found = head.lstrip().startswith(b"{") and _OTHERS.search(head)
        return bool(found) and (_SHAPES.search(head) is not None or b'"imagePath"' in head)

    def entries(self, file: Path) -> Iterator[Entry]:
        try:
            with open(file, "rb", opener=regular) as opened:
                data = opened.read(_MOST_FILE + 1)
        except OSError as error:
            raise BadData(f"{file} cannot be read: {error.strerror}") from error
        try:
            yield 0, len(data), self.value(data)
        except ValueError as error:
            raise BadData(f"{file} is not LabelMe's json: {error}; save it again in LabelMe") from None

    def value(self, data: bytes) -> Any:
        if len(data) > _MOST_FILE:
            raise ValueError(f"more than the {_MOST_FILE} bytes allowed")
        data = _without_image(data)
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than the {MOST_BYTES} bytes allowed beside its image")
        return loads(data)

    def read(self, value: Any, file: str) -> Marked | None:
        if not isinstance(value, dict) or not isinstance(value.get("shapes"), list):
            raise WrongEntry(f"{short(value)}, expected an object with `shapes`")
        name = value.get("imagePath")
        if not isinstance(name, str) or not name.strip():
            name = f"{Path(file).stem}.jpg"
        found = Marked(name, m.side(value.get("imageHeight")), m.side(value.get("imageWidth")))
        found.holds_image = bool(value.get("imageData"))
        for number, each in enumerate(value["shapes"]):
            if not isinstance(each, dict):
                raise WrongEntry(f"shapes[{number}] is {short(each)}, expected an object")
            m.kept(found, [_shape(each, f"shapes[{number}]", found)])
        flags = value.get("flags") or {}
        if isinstance(flags, dict):
            found.labels = [m.name(each, "a flag") for each, is_set in flags.items() if is_set is True]
        return found


def _without_image(data: bytes) -> bytes:
    """Cut out the image that a file may hold; one letter says that there was one."""
    begin, end = span_within(data)
    return data[:begin] + b"1" + data[end:] if begin < end else data


def _shape(each: dict[str, Any], where: str, image: Marked) -> Shape | None:
    label = m.name(each.get("label"), f"label of {where}")
    corners = m.points(each.get("points"), f"points of {where}")
    kind = each.get("shape_type") or "polygon"
    if kind == "mask":
        return _mask(label, each.get("mask"), corners, image, where)
    if kind == "rectangle" and len(corners) in (2, 4):
        return m.rectangle(label, *corners.min(0).tolist(), *corners.max(0).tolist())
    if kind == "circle" and len(corners) == 2:
        (x, y), radius = corners[0].tolist(), float(np.linalg.norm(corners[1] - corners[0]))
        return m.ellipse(label, x, y, radius, radius)
    if kind in ("oriented_rectangle", "rotation", "rotated_rectangle") and len(corners) >= 3:
        image.notes[m.ROTATED] += 1
        return m.polygon(label, corners)
    return m.polygon(label, corners) if kind == "polygon" else None


def _mask(label: str, text: object, corners: np.ndarray, image: Marked, where: str) -> Shape | None:
    """Read a PNG of the pixels within the box of a shape."""
    try:
        data = base64.b64decode(text if isinstance(text, str) else "", validate=True)
        inside = decode_values(data, where)
    except (binascii.Error, ValueError) as error:
        raise WrongEntry(f"mask of {where} is not base64: {error}") from None
    except BadSample as error:
        raise WrongEntry(f"mask of {where} is not an image: {error.reason}") from None
    if inside.ndim != 2 or len(corners) != 2:
        raise WrongEntry(f"mask of {where} is not a grey image with two corners")
    left, top = np.round(corners.min(0)).astype(np.int64).tolist()
    return m.region(label, inside > 0, left, top, image.height, image.width)


TOOL = LabelMe()
detect, open_boxes, open_masks, open_source = TOOL.detect, TOOL.open_boxes, TOOL.open_masks, TOOL.open_source
