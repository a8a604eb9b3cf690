"""Masks that are drawn from outlines when they are asked for: polygons and run lengths of COCO's json files, and, in
yolo.py, polygons of labels. Outlines stay in their files, of which they are most; an index says where each one begins.

Run lengths are read here, within bounds, because strangers wrote them; polygons are filled by the code that scores
COCO, to the pixels that pycocotools gives.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sightline.data.contents import PathsBelow
from sightline.data.formats.coco import read_instances
from sightline.data.formats.image_headers import MAX_PIXELS
from sightline.data.sources import IGNORED, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, chunks_of, of_instances
from sightline.data.sources.box_images import missing_images
from sightline.data.sources.layouts import Splits, no_test_split
from sightline.data.sources.mask_images import MOST_CLASSES, MaskImages, pixels_of, split_rows
from sightline.errors import BadData, BadSample, first_of
from sightline.files.json_lists import MAX_ENTRY
from sightline.files.regular import regular
from sightline.files.typed_json import loads, short
from sightline.parts import Split

BACKGROUND = "background"
_MOST_BYTES = 4 * MAX_ENTRY  # of one object: a letter takes up to four
LEAST_POLYGON = 6  # numbers
_MOST_STEPS = 2**24  # along the edges of one polygon, in fifths of a pixel: it is followed in such steps
_BITS, _MORE, _SIGN = 5, 0x20, 0x10  # of a letter of compressed run lengths
_FIRST_LETTER = 48
_MOST_LETTERS = 7  # of one run length: 35 bits


@dataclass(frozen=True)
class Outlined:
    """The annotations of a json file of COCO's, and where in it each object lies, in their order."""

    file: Path
    annotations: Annotations
    starts: np.ndarray
    stops: np.ndarray  # 0 of an object without an outline


def read_outlined(file: Path, root: Path) -> Outlined:
    """Read all of a json file, or what an earlier run kept if size and time are the same; the index lies at `root`."""
    try:
        info = file.stat()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}; fetch it again") from error
    key = index_files.digest("coco outlines", 1, file.name, info.st_size, info.st_mtime_ns)
    name = f"coco-outlines-{file.stem}"
    if kept := index_files.load(root, name, key):
        try:
            annotations = Annotations.loaded(kept)
            annotations.names.below()
            if len(kept["starts"]) == len(kept["stops"]) == len(annotations.categories):
                return Outlined(file, annotations, kept["starts"], kept["stops"])
        except (ValueError, KeyError, IndexError):
            pass
    is_settled = index_files.is_settled([info.st_mtime_ns])
    instances = read_instances(chunks_of(file), str(file))
    annotations = of_instances(instances)
    ids = np.asarray([image.id for image in instances.images], np.int64)
    order = np.argsort(ids[instances.rows], kind="stable")  # as annotations have them
    starts, stops = np.ascontiguousarray(instances.spans[order].T)
    if is_settled:
        index_files.save(root, name, key, annotations.arrays() | {"starts": starts, "stops": stops})
    return Outlined(file, annotations, starts, stops)


class OutlineImages(MaskImages):
    """Images whose masks are drawn: what no object covers is class 0, background."""

    def __init__(self, kind: str, layout: Splits, split: Split, every: Annotations, options: SourceOptions, file: str):
        """Take the images of a split; `every` are the annotations of its place, which lie in this file or folder."""
        place = layout.place(split)
        if split == "test" and not every.counts.any():
            raise no_test_split(kind, f"none of the {len(every)} images of {file} has an outline")
        self.rows, self.held_out = split_rows(every.names.all(), layout, split, options, file)
        self.annotations = every.of_images(self.rows)
        names = self.annotations.names
        in_bytes = _bytes_of([place.images / names[row] for row in range(len(names))])
        missing = np.flatnonzero(in_bytes < 0)
        self.missing = tuple(names[row] for row in missing.tolist())
        if self.missing and not options.skips_missing:
            raise BadData(missing_images(kind, place, self.annotations, missing, options))
        files = PathsBelow(place.images, names)
        sizes = np.stack([self.annotations.heights, self.annotations.widths], 1)
        super().__init__(kind, place, names, sizes, pixels_of(files))
        self.layout = layout
        found = [_plain(name) for name in self.annotations.classes]
        self.classes = tuple(dict.fromkeys([BACKGROUND, *found]))  # categories of one name are one class
        if len(self.classes) > MOST_CLASSES:
            raise BadData(f"{file} has {len(found)} classes, at most {MOST_CLASSES - 1} and background are possible")
        self.index_of = np.asarray([self.classes.index(name) for name in found], np.int64)  # of each class of the files
        self.values = tuple(range(len(self.classes)))
        self.fingerprint = index_files.digest(f"{kind} masks", 1, self.annotations.content(), in_bytes.tolist())

    @abstractmethod
    def outlines(self, index: int) -> Iterator[tuple[Any, int]]:
        """Yield each object of an image, those below others first: its outline and the index of its class, or IGNORED.
        Raises BadSample."""

    def mask(self, index: int) -> np.ndarray:
        height, width = self.size(index)
        if height * width > MAX_PIXELS:
            raise BadSample(
                self.name(index), f"annotated as {width}x{height}, more than the {MAX_PIXELS} pixels allowed"
            )
        try:
            return drawn(height, width, self.outlines(index))
        except WrongOutline as error:
            raise BadSample(self.name(index), f"{error}; correct it in {self.place.labels}") from None


class CocoMasks(OutlineImages):
    """Images whose outlines lie in a json file of COCO's. Crowds count for nothing, and lie below other objects."""

    def __init__(self, layout: Splits, split: Split, found: Outlined, options: SourceOptions):
        _check_outlines(found, options)
        super().__init__("coco", layout, split, found.annotations, options, str(found.file))
        self.file = found.file
        counts = self.annotations.counts
        first = (found.annotations.ends - found.annotations.counts)[self.rows] - (self.annotations.ends - counts)
        places = np.arange(int(counts.sum())) + np.repeat(first, counts)
        self.starts, self.stops = found.starts[places], found.stops[places]

    def outlines(self, index: int) -> Iterator[tuple[Any, int]]:
        objects = self.annotations.objects(index)
        first = int(self.annotations.ends[index]) - len(objects.labels)
        try:
            with open(self.file, "rb", opener=regular) as opened:
                for row in np.argsort(~objects.crowd, kind="stable").tolist():
                    outline = self._outline(opened, first + row, index)
                    yield outline, IGNORED if objects.crowd[row] else int(self.index_of[objects.labels[row] - 1])
        except OSError as error:
            raise BadSample(self.name(index), f"{self.file} cannot be read: {error.strerror}") from error

    def _outline(self, opened: BinaryIO, place: int, index: int) -> Any:
        start, stop = int(self.starts[place]), int(self.stops[place])
        if not 0 < stop - start <= _MOST_BYTES:
            raise BadSample(self.name(index), f"an object of it has no outline in {self.file}")
        opened.seek(start)
        try:
            entry = loads(opened.read(stop - start))
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or entry.get("image_id") != int(self.annotations.image_ids[index]):
            raise BadSample(self.name(index), f"{self.file} has changed since it was indexed; start again")
        return entry.get("segmentation")


def _check_outlines(found: Outlined, options: SourceOptions) -> None:
    """Raise BadData for objects without an outline, unless their images may be skipped and some objects have one."""
    without = found.stops == 0
    if not without.any() or (options.skips_missing and not without.all()):
        return
    image_of = np.repeat(np.arange(len(found.annotations)), found.annotations.counts)
    names = [found.annotations.names[row] for row in np.unique(image_of[without])[:5].tolist()]
    raise BadData(
        f"{found.file}: {int(without.sum())} of {len(without)} objects have no outline (segmentation), those of "
        f"{first_of(names)}; this recipe needs outlines, a detection recipe takes boxes"
    )


def _plain(name: str) -> str:
    """Return the name of a class; files may list the background themselves."""
    return BACKGROUND if name.lower().strip("_") == BACKGROUND else name


def _bytes_of(files: Sequence[Path]) -> np.ndarray:
    """Return the sizes of files, -1 of one that is missing."""
    found = np.full(len(files), -1, np.int64)
    for row, file in enumerate(files):
        try:
            found[row] = os.stat(file).st_size
        except OSError:
            continue
    return found


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
