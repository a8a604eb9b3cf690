"""YOLO's label files: one line per object, `class cx cy w h` as shares of the image's sides.

Lines with a polygon, `class x1 y1 x2 y2 x3 y3 ...`, become its bounding box. Each line that cannot be used goes to a
callback, as for COCO's json files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sightline.data.formats.coco import FAULTS, Wrong
from sightline.files.typed_json import short

MAX_LABEL_BYTES = 16 * 2**20  # of one image: 400,000 boxes
MAX_CLASSES = 10_000  # where nothing names them
_BOX = 5  # columns
_LEAST_POLYGON = 7
_LARGEST = 1e9  # what is beyond is not a share of anything
_OVER = 0.5  # pixels: rounded shares put edges that far over the border; they are put on it


class Line(NamedTuple):
    """An object: the number of its class, its left, top, right and bottom edge as shares, and its outline."""

    category: int
    edges: tuple[float, float, float, float]
    polygon: tuple[float, ...] = ()  # x and y of its corners by turns; () of a box


def read_lines(data: bytes, name: str, classes: int, wrong: Wrong) -> list[Line]:
    """Read a label file; lines that are reported to `wrong` are left out. `classes` is how many there are; 0 allows
    any."""
    if len(data) > MAX_LABEL_BYTES:
        wrong("unreadable entry", name, f"has more than the {MAX_LABEL_BYTES} bytes allowed for one label file")
        return []
    lines = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        if not (words := line.split()):
            continue
        try:
            lines.append(_read_line(words, classes))
        except _WrongLine as error:
            wrong(error.kind, f"{name}:{number}", str(error))
    return lines


def in_pixels(lines: list[Line], height: int, width: int) -> np.ndarray:
    """Return x, y, width, height of each line's box in an image of this size, (n, 4) float64."""
    edges = np.asarray([line.edges for line in lines], np.float64).reshape(-1, 4) * (width, height, width, height)
    ends = np.asarray((width, height), np.float64)
    low, high = edges[:, :2], edges[:, 2:]
    low = np.where((low < 0) & (low >= -_OVER), 0, low)
    high = np.where((high > ends) & (high <= ends + _OVER), ends, high)
    extent = high - low
    # A sum that rounding puts over the border would count as outside.
    extent = np.where((high <= ends) & (low + extent > ends), np.nextafter(extent, 0), extent)
    return np.concatenate([low, extent], 1)


class _WrongLine(Exception):
    def __init__(self, text: str, kind: str = "unreadable entry"):
        super().__init__(text)
        self.kind = kind


def _read_line(words: list[str], classes: int) -> Line:
    is_polygon = len(words) >= _LEAST_POLYGON and len(words) % 2 == 1
    if len(words) != _BOX and not is_polygon:
        raise _WrongLine(f"{len(words)} values, expected class cx cy w h, or class and a polygon x1 y1 x2 y2 x3 y3 ...")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise _WrongLine(f"{short(' '.join(words))} is not a line of numbers") from None
    if not all(abs(number) <= _LARGEST for number in numbers):  # a NaN is not either
        raise _WrongLine(f"{short(' '.join(words))}, expected finite numbers", f"box {FAULTS[1]}")
    category, shares = numbers[0], numbers[1:]
    most = (classes or MAX_CLASSES) - 1
    if category != int(category) or not 0 <= category <= most:
        raise _WrongLine(f"class {words[0]}, expected a whole number from 0 to {most}", "unknown category")
    if is_polygon:
        across, down = shares[::2], shares[1::2]
        return Line(int(category), (min(across), min(down), max(across), max(down)), tuple(shares))
    x, y, wide, tall = shares
    return Line(int(category), (x - wide / 2, y - tall / 2, x + wide / 2, y + tall / 2))
