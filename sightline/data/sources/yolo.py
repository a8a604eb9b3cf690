"""Boxes as YOLO has them: a data.yaml with the folders of the images (or lists of them) and the names of the classes,
and in labels/ instead of images/ a .txt file per image. Also such folders without a data.yaml; see yolo_places.py.

An image without a label file, or with an empty one, has no objects. Images are in the order of their names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sightline.data.formats.coco import Image, Instances, Wrong, refuse
from sightline.data.formats.yolo import MAX_LABEL_BYTES, Line, in_pixels, read_lines
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, kept_or_read, of_instances
from sightline.data.sources.box_images import UNKNOWN_SIDE, BoxImages, list_files, open_split, sides_of
from sightline.data.sources.layouts import IMAGES, Layout, Place
from sightline.data.sources.outlines import YoloMasks
from sightline.data.sources.yolo_places import CLASSES, label_of, layout_at
from sightline.data.sources.yolo_places import detect as detect
from sightline.errors import BadData
from sightline.parts import Split

_MAX_LIST_BYTES = 2**28


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the labels of a split and list its images."""
    layout, annotations = _located(path, split)
    return open_split("yolo", layout, split, annotations, options)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> YoloMasks:
    """Read the labels of a split, which are polygons, and list its images."""
    layout, annotations = _located(path, split)
    labels = {pair.name: pair.label for pair in Pairs.at(layout, layout.place(split), refuse).pairs}
    return YoloMasks(layout, split, annotations, labels, options)


def _located(path: str, split: Split) -> tuple[Layout, Annotations]:
    """Return where the splits lie, and the labels of the place of one."""
    layout = layout_at(path)
    place = layout.place(split)
    read = {place: _read(layout, place)}
    if not layout.classes:  # numbered up to the largest in either split
        places = [each for each in (layout.train, layout.val) if each]
        read |= {each: _read(layout, each) for each in places if each not in read}
        largest = max(int(read[each].categories.max(initial=-1)) for each in places)
        layout = replace(layout, classes=tuple(map(str, range(largest + 1))))
    if (largest := int(read[place].categories.max(initial=-1))) >= len(layout.classes):
        raise BadData(f"{place.labels} has class {largest}, train and val have classes 0 to {len(layout.classes) - 1}")
    return layout, read[place].of_classes(dict(enumerate(layout.classes)))


def _read(layout: Layout, place: Place) -> Annotations:
    """Read the labels of a place, or what an earlier run kept if no file has changed."""
    pairs = Pairs.at(layout, place, refuse)
    folder = place.labels or place.images
    is_list = os.path.isfile(folder)
    return kept_or_read(
        folder.parent if is_list else folder,
        f"yolo-{folder.stem if is_list else place.images.name}",
        index_files.digest("yolo", 1, len(layout.classes), os.path.relpath(place.images, folder), pairs.key),
        pairs.changed_ns,
        lambda: of_instances(read_instances(pairs, layout.classes, refuse)),
    )


class Pair(NamedTuple):
    """An image and its label file; `name` is the image's path from the folder, or the label's if there is no image."""

    name: str
    image: Path | None
    label: Path | None


@dataclass(frozen=True)
class Pairs:
    """The images of a place with their labels, in the order of their names."""

    root: Path
    pairs: list[Pair]
    key: list[object]  # changes with any of the files
    changed_ns: list[int]

    @classmethod
    def at(cls, layout: Layout, place: Place, wrong: Wrong) -> Pairs:
        """List the files of a place; two images of one label are reported to `wrong`."""
        if place.labels is not None and os.path.isfile(place.labels):
            return cls._listed(place.labels)
        folder = place.labels or place.images
        images, labels = list_files(place.images, IMAGES), list_files(folder, (".txt",))
        left = {name for name in labels.files if os.path.basename(name) != CLASSES}
        pairs, used = [], dict[str, str]()
        for name in images.files:
            label = f"{os.path.splitext(name)[0]}.txt"
            if label in used:
                text = f"has the label of {used[label]}, {label}; rename one of them"
                wrong("two images of one label", str(place.images / name), text)
                continue
            has_label = label in labels.files
            if has_label:
                used[label] = name
                left.discard(label)
            pairs.append(Pair(name, place.images / name, folder / label if has_label else None))
        shared = [each.labels for each in (layout.train, layout.val, layout.own_test) if each]
        is_shared = shared.count(place.labels) > 1
        if folder != place.images and not is_shared:  # beside images lie texts of all sorts
            pairs += [Pair(label, None, folder / label) for label in left]
        if not used:
            raise BadData(f"{folder} has no label (.txt) of any of the {len(images.files)} images in {place.images}")
        changed = [*images.changed_ns(), *labels.changed_ns()]
        return cls(place.images, sorted(pairs), [images.key(), labels.key()], changed)

    @classmethod
    def _listed(cls, file: Path) -> Pairs:
        """List what a .txt file names, line by line, from its own folder or as absolute paths."""
        try:
            with file.open("rb") as opened:
                text = opened.read(_MAX_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            raise BadData(f"{file} cannot be read: {error.strerror}") from error
        names = sorted({os.path.normpath(line.strip()) for line in text.splitlines() if line.strip()})
        if not names or "\0" in text:
            raise BadData(f"{file} lists no images, expected one path per line")
        pairs, times = [], list[tuple[int, int]]()
        for name in names:
            image = file.parent / name
            label = label_of(image)
            pairs.append(Pair(name, image, label if os.path.isfile(label) else None))
            times += [_size_and_time(path) for path in (image, label)]
        return cls(file.parent, pairs, [names, times], [changed for _, changed in times])


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def read_instances(pairs: Pairs, classes: tuple[str, ...], wrong: Wrong) -> Instances:
    """Read all labels; lines that are reported to `wrong` are left out."""
    images: list[Image] = []
    rows: list[int] = []
    labels: list[int] = []
    boxes = [np.zeros((0, 4))]
    progress = index_files.ScanProgress(str(pairs.root), len(pairs.pairs), "images")
    for number, pair in enumerate(pairs.pairs):
        progress(number)
        try:
            lines = _lines(pair.label, len(classes), wrong if pair.image else refuse) if pair.label else []
        except BadData:
            if pair.image:
                raise
            continue  # a text of another sort: no label, and no image
        height, width = sides_of(pair.image) if pair.image else (UNKNOWN_SIDE, UNKNOWN_SIDE)
        rows += [len(images)] * len(lines)
        images.append(Image(number + 1, pair.name, height, width))
        labels += [line.category for line in lines]
        boxes.append(in_pixels(lines, height, width))
    together = np.concatenate(boxes)
    count = len(classes) or max(labels, default=-1) + 1
    return Instances(
        images,
        dict(enumerate(classes or map(str, range(count)))),
        np.arange(1, len(labels) + 1),
        np.asarray(rows, np.int64),
        np.asarray(labels, np.int64),
        together,
        together[:, 2] * together[:, 3],
        np.zeros(len(labels), bool),
    )


def _lines(file: Path, classes: int, wrong: Wrong) -> list[Line]:
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_LABEL_BYTES + 1)
    except OSError as error:
        wrong("unreadable entry", str(file), f"cannot be read: {error.strerror}")
        return []
    return read_lines(data, str(file), classes, wrong)
