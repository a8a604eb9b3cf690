"""What a tool for labelling says of one image: its shapes, as boxes and as outlines that `outlines.drawn` fills."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sightline.data.formats.coco import MAX_SIDE
from sightline.data.formats.image_headers import MAX_PIXELS
from sightline.files.typed_json import short

ROTATED = "rotated boxes enclosed by upright ones"
WITHOUT_AREA = "points, lines and other shapes without an area left out"
IGNORE = "__ignore__"  # the class of LabelMe that counts for nothing
LARGEST = 1e9  # pixels
MOST_NAME = 1000  # letters of a class
_CORNERS = 64  # of an ellipse: its outline is at most 0.12 % of its radius off


class WrongEntry(Exception):
    """What is wrong with one entry of an export."""


class Shape(NamedTuple):
    """One object: polygons or run lengths as COCO has them, its box x, y, width, height, and the outline's area."""

    label: str
    outline: Any
    box: tuple[float, float, float, float]
    area: float
    is_crowd: bool = False


@dataclass
class Marked:
    """One image as its tool describes it; a side of 0 is unknown."""

    name: str
    height: int = 0
    width: int = 0
    shapes: list[Shape] = field(default_factory=list)  # those below others first
    labels: list[str] = field(default_factory=list)  # of the whole image
    notes: Counter[str] = field(default_factory=Counter)  # what to tell of how it was read
    holds_image: bool = False  # the file of the entry does
    subset: str = ""  # as the tool calls it


def number(value: object, what: str) -> float:
    """Return a finite number, also one that is written as text."""
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= LARGEST:
        raise WrongEntry(f"{what} is {short(value)}, expected a finite number")
    return found


def numbers(values: object, what: str, count: int = 0) -> list[float]:
    """Return a list of finite numbers, of so many if that is given."""
    if not isinstance(values, list | tuple) or (count and len(values) != count):
        raise WrongEntry(f"{what} is {short(values)}, expected {count or 'a list of'} numbers")
    return [number(each, what) for each in values]


def points(values: object, what: str) -> np.ndarray:
    """Return (n, 2) corners out of a list of [x, y]."""
    if not isinstance(values, list):
        raise WrongEntry(f"{what} is {short(values)}, expected a list of points")
    with suppress(ValueError, TypeError, OverflowError):  # said below
        found = np.asarray(values, np.float64)
        if found.ndim == 2 and found.shape[1] == 2 and (np.abs(found) <= LARGEST).all():
            return found
    return np.asarray([numbers(each, what, 2) for each in values], np.float64).reshape(-1, 2)


def side(value: object) -> int:
    """Return a side in pixels; 0 if it is not one."""
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return 0
    return int(found) if 1 <= found <= MAX_SIDE and found == int(found) else 0


def name(value: object, what: str) -> str:
    """Return the name of a class; white space at its ends and doubled within it does not count."""
    found = " ".join(value.split()) if isinstance(value, str) else ""
    if not found or len(found) > MOST_NAME or any("\ud800" <= letter <= "\udfff" for letter in found):
        raise WrongEntry(f"{what} is {short(value)}, expected the name of a class")
    return found


def polygon(label: str, corners: np.ndarray) -> Shape | None:
    """Return a polygon; None if it has fewer than three corners."""
    if len(corners) < 3:
        return None
    x, y = (corners - corners[0]).T  # the first is 0, 0, so nothing is to be added for the last edge
    area = abs(float(x[:-1] @ y[1:] - y[:-1] @ x[1:])) / 2
    (left, top), (right, bottom) = corners.min(0).tolist(), corners.max(0).tolist()
    return Shape(label, [corners.ravel().tolist()], (left, top, right - left, bottom - top), area)


def rectangle(label: str, left: float, top: float, right: float, bottom: float) -> Shape:
    """Return a box from two opposite corners."""
    left, right, top, bottom = min(left, right), max(left, right), min(top, bottom), max(top, bottom)
    corners = [left, top, right, top, right, bottom, left, bottom]
    wide, tall = right - left, bottom - top
    return Shape(label, [corners], (left, top, wide, tall), wide * tall)


def turned(corners: np.ndarray, degrees: float, about: tuple[float, float]) -> np.ndarray:
    """Turn points clockwise, as they are seen, about another one."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (corners - about) @ np.asarray([[cos, sin], [-sin, cos]]) + about


def ellipse(label: str, x: float, y: float, rx: float, ry: float, degrees: float = 0.0) -> Shape | None:
    """Return an ellipse as a polygon of so many corners that nobody sees them; None without a radius."""
    if min(abs(rx), abs(ry)) <= 0:
        return None
    angle = np.arange(_CORNERS) * (2 * np.pi / _CORNERS)
    corners = np.stack([x + abs(rx) * np.cos(angle), y + abs(ry) * np.sin(angle)], 1)
    return polygon(label, turned(corners, degrees, (x, y)) if degrees else corners)


def region(label: str, inside: np.ndarray, left: int, top: int, height: int, width: int) -> Shape | None:
    """Return the shape of the true pixels of a region whose corner lies at left, top of an image; None if there are
    none in it."""
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and height * width <= MAX_PIXELS):
        raise WrongEntry(f"a mask in an image of {width}x{height}, expected at most {MAX_PIXELS} pixels")
    inside = inside[max(0, -top) : max(0, height - top), max(0, -left) : max(0, width - left)]
    top, left = max(top, 0), max(left, 0)
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        return None
    columns_of = np.zeros((inside.shape[1], height), bool)  # run lengths go down them; the others are outside
    columns_of[:, top : top + inside.shape[0]] = inside.T
    counts = run_lengths(columns_of.ravel())
    counts[0] += left * height
    counts += [0] * (len(counts) % 2 == 0)  # the last is outside
    counts[-1] += (width - left - inside.shape[1]) * height
    box = (left + columns[0], top + rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1)
    outline = {"size": [height, width], "counts": counts}
    return Shape(label, outline, tuple(map(float, box)), float(inside.sum()))  # type: ignore[arg-type]  # four


def run_lengths(flat: np.ndarray) -> list[int]:
    """Return the lengths of runs of equal values, false first."""
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    ends = [0, *changes.tolist(), len(flat)]
    lengths = np.diff(ends).tolist()
    return [0, *lengths] if len(flat) and flat[0] else lengths


def is_background(name: str) -> bool:
    """Return whether a class of masks is what no object covers: by its name, or called by its value because it has no
    other name."""
    return name.lower().strip("_") in ("background", "bg", "0", "#000000")


def kept(marked: Marked, shapes: Iterable[Shape | None]) -> None:
    """Add shapes to an image; those without an area are counted."""
    for each in shapes:
        if each is None:
            marked.notes[WITHOUT_AREA] += 1
        else:
            marked.shapes.append(each)


def clipped(boxes: np.ndarray, height: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return boxes x, y, width, height cut off at the borders of their images; one outside has no area."""
    sides = np.stack([width, height], 1)
    start = np.clip(boxes[:, :2], 0, sides)
    return np.concatenate([start, np.clip(boxes[:, :2] + boxes[:, 2:], 0, sides) - start], 1)
