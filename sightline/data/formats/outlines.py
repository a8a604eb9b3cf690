"""Outlines of objects -> pixels of a mask: polygons, and run lengths as COCO has them, compressed or not.

Run lengths are read here, within bounds, because strangers wrote them; polygons are filled by the code that scores
COCO, to the pixels that pycocotools gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sightline.files.typed_json import short

LEAST_POLYGON = 6  # numbers
_MOST_STEPS = 2**24  # along the edges of one polygon, in fifths of a pixel: it is followed in such steps
_BITS, _MORE, _SIGN = 5, 0x20, 0x10  # of a letter of compressed run lengths
_FIRST_LETTER = 48
_MOST_LETTERS = 7  # of one run length: 35 bits


class WrongOutline(Exception):
    """What is wrong with an outline."""


def drawn(height: int, width: int, objects: Iterable[tuple[Any, int]]) -> np.ndarray:
    """Return (height, width) uint8: the value of the last object at each pixel, 0 without one. An outline is a list of
    polygons or an object with run lengths. Raises WrongOutline."""
    columns = np.zeros(width * height, np.uint8)  # run lengths go down the columns
    for outline, value in objects:
        for counts in _runs(outline, height, width):
            ends = np.cumsum(counts)
            for start, end in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=False):
                columns[start:end] = value
    return np.ascontiguousarray(columns.reshape(width, height).T)


def _runs(outline: Any, height: int, width: int) -> Iterator[np.ndarray]:
    """Yield run lengths, of pixels outside and inside by turns."""
    if isinstance(outline, dict):
        if outline.get("size") != [height, width]:
            raise WrongOutline(f"an outline of size {short(outline.get('size'))}, expected {[height, width]}")
        yield _checked(outline.get("counts"), height * width)
        return
    if not isinstance(outline, list) or not outline:
        raise WrongOutline(f"an outline {short(outline)}, expected polygons or run lengths")
    for polygon in outline if isinstance(outline[0], list) else [outline]:
        yield from _filled(polygon, height, width)


def _checked(counts: Any, pixels: int) -> np.ndarray:
    numbers = _decompressed(counts) if isinstance(counts, str) else counts
    if not isinstance(numbers, list) or not all(type(each) is int and 0 <= each <= pixels for each in numbers):
        raise WrongOutline(f"run lengths {short(counts)}, expected whole numbers from 0 to {pixels}")
    if sum(numbers) > pixels:
        raise WrongOutline(f"run lengths of {sum(numbers)} pixels in an image of {pixels}")
    return np.asarray(numbers, np.int64)


def _decompressed(text: str) -> list[int]:
    """Return the run lengths of a text, five bits to a letter; from the fourth on it has differences to the last but
    one."""
    found: list[int] = []
    number = letters = 0
    for place, letter in enumerate(text):
        code = ord(letter) - _FIRST_LETTER
        if not 0 <= code < 2 * _MORE or letters >= _MOST_LETTERS:
            raise WrongOutline(f"run lengths with {letter!r} at place {place}, which no run length has there")
        number |= (code & (_MORE - 1)) << _BITS * letters
        letters += 1
        if code & _MORE:
            continue
        if code & _SIGN:
            number -= 1 << _BITS * letters
        found.append(number + (found[-2] if len(found) > 2 else 0))
        number, letters = 0, 0
    if letters:
        raise WrongOutline("run lengths that are cut off")
    return found


def _filled(polygon: Any, height: int, width: int) -> Iterator[np.ndarray]:
    """Yield the run lengths of the inside of a polygon; nothing if it has fewer than three corners."""
    if not isinstance(polygon, list) or len(polygon) % 2 or not all(map(_is_finite, polygon)):
        raise WrongOutline(f"a polygon {short(polygon)}, expected x and y of each corner by turns")
    if len(polygon) < LEAST_POLYGON:
        return
    from faster_coco_eval.core import mask as coco_mask  # 0.2 s, for those that draw polygons

    corners = _within(polygon, height, width)
    (found,) = coco_mask.frPyObjects([corners], height, width)
    text = found["counts"]
    yield _checked(text.decode() if isinstance(text, bytes) else text, height * width)


def _within(polygon: Sequence[float], height: int, width: int) -> list[float]:
    """Return the corners, those far outside of the image moved to one side's length from it."""
    sides = np.asarray((width, height), np.float64)
    corners = np.clip(np.asarray(polygon, np.float64).reshape(-1, 2), -sides, 2 * sides)
    steps = 5 * np.abs(np.diff(corners, axis=0, append=corners[:1])).max(1).sum()
    if steps > _MOST_STEPS:
        raise WrongOutline(f"a polygon of {len(corners)} corners whose edges are {steps / 5:.0f} pixels long")
    return corners.ravel().tolist()


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False
