"""Label Studio's export JSON: a list of tasks, with rectangles, ellipses, polygons, brushes and choices.

The newest annotation of a task that was not cancelled counts; predictions do not. Tasks without one are left out.
Images are found by the name in the task, with and without what an upload puts before it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from sightline.data.formats import marked as m
from sightline.data.formats.image_headers import MAX_PIXELS
from sightline.data.formats.marked import Marked, Shape, WrongEntry
from sightline.data.sources.annotations import chunks_of
from sightline.data.sources.layouts import IMAGES
from sightline.data.sources.tool_exports import MOST_BYTES, Entry, Tool
from sightline.errors import BadData
from sightline.files.json_lists import JsonLists
from sightline.files.typed_json import loads, short

_DATA = re.compile(rb'"data"\s*:\s*\{')
_ANNOTATED = re.compile(rb'"(?:annotations|completions)"\s*:\s*\[')
_RESULT = re.compile(rb'"(?:from_name|lead_time|annotation_id|file_upload|was_cancelled|total_annotations)"\s*:')
_MINIMAL = re.compile(rb'"annotation_id"\s*:')
_LIST = re.compile(rb"\s*\[")
_PLAIN = ("rectangle", "polygon", "brush", "ellipse")  # regions whose labels come as another result
_BY_KEY = {"points": "polygonlabels", "rle": "brushlabels", "radiusX": "ellipselabels", "width": "rectanglelabels"}
_GEOMETRY = {*_BY_KEY, "x", "y"}
_DIGITS = 6  # of pixels: what came out of percent is 20.5 again, not 20.499999999999996
_CHANNELS = 4  # of a brush: red, green, blue, alpha


class LabelStudio(Tool):
    kind, title = "labelstudio", "Label Studio"

    def is_export(self, head: bytes) -> bool:
        if not _LIST.match(head) or not head.lstrip()[1:].lstrip().startswith(b"{"):
            return False
        is_whole = _DATA.search(head) and _ANNOTATED.search(head)
        return bool(is_whole or (_RESULT.search(head) and (_MINIMAL.search(head) or _DATA.search(head))))

    def entries(self, file: Path) -> Iterator[Entry]:
        head = next(chunks_of(file), b"")[: 2**16]
        if _MINIMAL.search(head) and not _ANNOTATED.search(head):
            raise BadData(f"{file} is Label Studio's JSON-MIN, which is not read; in Label Studio choose Export, JSON")
        lists = JsonLists(chunks_of(file), str(file), MOST_BYTES)
        for value in lists.listed():
            yield (*lists.span(), value)

    def value(self, data: bytes) -> Any:
        return loads(data)

    def read(self, value: Any, file: str) -> Marked | None:
        if not isinstance(value, dict) or not isinstance(value.get("data"), dict):
            raise WrongEntry(f"{short(value)}, expected a task with `data`")
        annotations = value.get("annotations", value.get("completions"))
        if annotations is not None and not isinstance(annotations, list):
            raise WrongEntry(f"annotations is {short(annotations)}, expected a list")
        done = [each for each in annotations or [] if isinstance(each, dict) and not _is_cancelled(each)]
        if not done:
            return None
        newest = max(done, key=lambda each: str(each.get("created_at", "")))
        results = newest.get("result")
        if not isinstance(results, list):
            raise WrongEntry(f"result is {short(results)}, expected a list")
        found = Marked(_image_of(value))
        for each in results:  # some tools write the size of the image once
            sides = [m.side(each.get(f"original_{side}")) for side in ("height", "width") if isinstance(each, dict)]
            if all(sides) and sides:
                found.height, found.width = sides
                break
        labelled = {
            str(each.get("id")) for each in results if isinstance(each, dict) and _kind_of(each).endswith("labels")
        }
        for number, each in enumerate(results):
            if isinstance(each, dict) and each.get("type") in _PLAIN and str(each.get("id")) in labelled:
                continue  # of <Rectangle> beside <Labels>: the labels have the same numbers
            if not isinstance(each, dict) or not isinstance(each.get("value"), dict):
                if isinstance(each, dict) and each.get("type") == "relation":
                    continue
                raise WrongEntry(f"result[{number}] is {short(each)}, expected one with `value`")
            _add(found, each, f"result[{number}]")
        return found


def _is_cancelled(annotation: dict[str, Any]) -> bool:
    return bool(annotation.get("was_cancelled") or annotation.get("skipped"))


def _image_of(task: dict[str, Any]) -> str:
    """Return the path of a task's image: of its data the text that ends like one, from a URL or a local file."""
    texts = [each for each in task["data"].values() if isinstance(each, str)]
    for text in (*texts, task.get("file_upload")):
        if isinstance(text, str) and (name := _path_in(text)).lower().endswith(IMAGES):
            return name
    if len(texts) == 1:
        return _path_in(texts[0])
    raise WrongEntry(f"data is {short(task['data'])}, expected the name of an image ({', '.join(IMAGES)})")


def _path_in(text: str) -> str:
    try:
        parts = urlsplit(text)
        local = parse_qs(parts.query).get("d")
    except ValueError:
        return text
    if local:  # /data/local-files/?d=folder/a.jpg
        return local[0]
    return unquote(parts.path) if parts.scheme or text.startswith("/data/") else text


def _add(found: Marked, each: dict[str, Any], where: str) -> None:
    value = each["value"]
    if choices := value.get("choices"):
        if each.get("type", "choices") == "choices" and not _GEOMETRY & value.keys():  # else they are of a region
            found.labels += [m.name(name, f"choices of {where}") for name in _list(choices, where)]
        return
    kind = _kind_of(each)
    if not kind.endswith("labels") or not value.get(kind):
        if kind in _PLAIN or (kind.endswith("labels") and kind in value):
            found.notes["regions without a label left out"] += 1
        return
    sides = [m.side(each.get(f"original_{side}")) for side in ("height", "width")]
    if not found.height:
        raise WrongEntry(f"{where} has no original_width and original_height")
    if all(sides) and [found.height, found.width] != sides:
        raise WrongEntry(f"{where} belongs to an image of {sides[1]}x{sides[0]}, others to another size")
    labels = _list(value[kind], where)
    if len(labels) > 1:
        found.notes["regions with several labels, of which the first counts"] += 1
    label = m.name(labels[0], f"{kind} of {where}")
    if kind == "labels":  # of any region
        kind = next((of for key, of in _BY_KEY.items() if key in value), kind)
    m.kept(found, [_shape(label, kind, value, found, where)])


def _kind_of(each: dict[str, Any]) -> str:
    kind, value = each.get("type"), each.get("value")
    if isinstance(kind, str):
        return kind
    return next((key for key in value if key.endswith("labels")), "") if isinstance(value, dict) else ""


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list) or not value:
        raise WrongEntry(f"{where} has the labels {short(value)}, expected a list")
    return value


def _shape(label: str, kind: str, value: dict[str, Any], image: Marked, where: str) -> Shape | None:
    """Return a shape, whose numbers are percent of the image."""

    def read(key: str, of: int) -> float:
        return round(m.number(value.get(key), f"{key} of {where}") * of / 100, _DIGITS)

    degrees = m.number(value.get("rotation") or 0, f"rotation of {where}")
    if kind == "rectanglelabels":
        left, top = read("x", image.width), read("y", image.height)
        wide, tall = read("width", image.width), read("height", image.height)
        if not degrees:
            return m.rectangle(label, left, top, left + wide, top + tall)
        image.notes[m.ROTATED] += 1
        corners = np.asarray([(left, top), (left + wide, top), (left + wide, top + tall), (left, top + tall)])
        return m.polygon(label, m.turned(corners, degrees, (left, top)))  # about its first corner
    if kind == "ellipselabels":
        x, y = read("x", image.width), read("y", image.height)
        return m.ellipse(label, x, y, read("radiusX", image.width), read("radiusY", image.height), degrees)
    if kind == "polygonlabels":
        corners = m.points(value.get("points"), f"points of {where}")
        return m.polygon(label, np.round(corners * (image.width, image.height) / 100, _DIGITS))
    if kind == "brushlabels":
        return _brush(label, value, image, where)
    return None


def _brush(label: str, value: dict[str, Any], image: Marked, where: str) -> Shape | None:
    if value.get("format", "rle") != "rle":
        raise WrongEntry(f"format of {where} is {short(value.get('format'))}, expected rle")
    rle = value.get("rle")
    if not isinstance(rle, list) or not all(type(each) is int and 0 <= each < 256 for each in rle):
        raise WrongEntry(f"rle of {where} is {short(rle)}, expected bytes")
    if image.height * image.width > MAX_PIXELS:
        raise WrongEntry(
            f"{where} belongs to an image of {image.width}x{image.height}, {MAX_PIXELS} pixels are allowed"
        )
    alpha = decoded(bytes(rle), image.height * image.width * _CHANNELS)[_CHANNELS - 1 :: _CHANNELS]
    return m.region(label, alpha.reshape(image.height, image.width) > 0, 0, 0, image.height, image.width)


def decoded(data: bytes, expected: int) -> np.ndarray:
    """Return (expected,) uint8 out of run lengths in the form that Label Studio stores: 32 bits with the count, 5 with
    the bits of a value less one, four times 4 with those of a length less one; then runs of a value, or of several."""
    bits = _Bits(data)
    count, word = bits.read(32), bits.read(5) + 1
    sizes = [bits.read(4) + 1 for _ in range(4)]
    if count != expected or word > 8:
        raise WrongEntry(f"a brush of {count} values of {word} bits, expected {expected} of 8")
    found = np.zeros(count, np.uint8)
    at = 0
    while at < count:
        is_run = bits.read(1)
        end = at + 1 + bits.read(sizes[bits.read(2)])
        if end > count:
            raise WrongEntry(f"a brush of more than {count} values")
        if is_run:
            found[at:end] = bits.read(word)
        else:
            found[at:end] = [bits.read(word) for _ in range(at, end)]
        at = end
    return found


class _Bits:
    """Bits of some bytes, the highest first."""

    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def read(self, count: int) -> int:
        first, last = self._at // 8, (self._at + count + 7) // 8
        self._at += count
        if last > len(self._data):
            raise WrongEntry("a brush that is cut off")
        whole = int.from_bytes(self._data[first:last], "big")
        return (whole >> (8 * last - self._at)) & ((1 << count) - 1)


TOOL = LabelStudio()
detect, open_boxes, open_masks, open_source = TOOL.detect, TOOL.open_boxes, TOOL.open_masks, TOOL.open_source
