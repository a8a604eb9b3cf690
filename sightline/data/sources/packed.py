"""Images with boxes or masks that lie in few large files: what parquet.py and tar.py share.

They say what a row holds; here all rows are looked at once, for the sizes of images, classes and values of masks. What
was found is kept as an index; images and masks are read from their files, a row at a time.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sightline.data.decode import decode_channels, decode_rgb, read_header
from sightline.data.formats.marked import Shape, WrongEntry, clipped
from sightline.data.sources import BoxSource, MaskSource, Objects, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, assembled, kept_or_read
from sightline.data.sources.box_images import chosen, drawn
from sightline.data.sources.layouts import no_test_split
from sightline.data.sources.mask_classes import MaskClasses, decide
from sightline.data.sources.mask_images import common_pixels
from sightline.data.sources.mask_survey import SeenMask, Survey, look_at, together
from sightline.data.sources.masks import indices_in
from sightline.data.sources.metadata import CATEGORIES
from sightline.data.sources.shards import Shard
from sightline.errors import BadData, BadSample, first_of
from sightline.parts import Split

What = Literal["image", "mask"]


class Packed(ABC):
    """The rows of one split. Pickled to loader workers, so it holds no open files."""

    kind: str
    title: str  # in the first line of a run
    root: Path
    split: str
    shards: tuple[Shard, ...]
    names: index_files.Names  # of the rows, each its own
    classes: tuple[str, ...] = ()  # where the files name them

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def read(self, row: int, what: What) -> bytes:
        """Return the bytes of an image or mask. Raises BadSample."""

    @abstractmethod
    def shapes(self, row: int) -> Iterable[Shape | None]:
        """Return the boxes of a row. Raises WrongEntry or BadData."""

    @property
    def key(self) -> list[object]:
        """Return what changes with any of the files."""
        return [(shard.name, shard.size, shard.changed_ns) for shard in self.shards]

    @property
    def changed_ns(self) -> list[int]:
        """Return when each file was last changed."""
        return [shard.changed_ns for shard in self.shards]

    def where(self) -> str:
        """Name the rows for a message."""
        return str(self.shards[0].path.parent)


OfSplit = Callable[[str], Packed | None]  # None if there is no such split


def _located(of_split: OfSplit, path: str, split: Split, kind: str) -> tuple[Packed, Packed, bool]:
    """Return the rows of a split, those that define the classes, and whether a part of train validates."""
    here = of_split(split)
    if here is None and split == "test":
        raise no_test_split(kind)
    train = here if split == "train" else of_split("train")
    found = here or train
    if found is None:
        raise BadData(f"{path} has no {split} split")
    return found, train or found, split != "test" and of_split("val") is None


def _rows_of(
    packed: Packed, is_drawn: bool, split: Split, options: SourceOptions
) -> tuple[np.ndarray, index_files.Names | None]:
    """Return the rows of a split, and the names of those that validate if they are drawn."""
    if not is_drawn:
        return np.arange(len(packed)), None
    is_val = drawn(packed.names.all(), options, packed.where(), split)
    held_out = packed.names.take(np.flatnonzero(is_val))
    return np.flatnonzero(is_val == (split == "val")), held_out


def boxes_of_split(of_split: OfSplit, path: str, split: Split, options: SourceOptions, kind: str) -> PackedBoxes:
    """Open the boxes of a split."""
    here, defining, is_drawn = _located(of_split, path, split, kind)
    annotations = _annotated(here, options)
    classes = defining.classes or (annotations if defining is here else _annotated(defining, options)).classes
    if unknown := sorted(set(annotations.classes) - set(classes)):
        raise BadData(f"{here.where()} has classes that train lacks: {first_of(unknown)}; remove them")
    rows, held_out = _rows_of(here, is_drawn, split, options)
    found = chosen(annotations.renumbered(classes).of_images(rows), split, here.where(), kind, options)
    source = PackedBoxes(here, found)
    source.held_out = held_out
    return source


def _annotated(packed: Packed, options: SourceOptions) -> Annotations:
    return options.once(
        ("packed boxes", packed.kind, packed.root, packed.split),
        lambda: kept_or_read(
            packed.root,
            f"{packed.kind}-boxes-{packed.split}",
            index_files.digest(f"{packed.kind} boxes", 2, packed.key),
            packed.changed_ns,
            partial(_read_boxes, packed),
            are_anywhere=True,
        ),
    )


def _read_boxes(packed: Packed) -> Annotations:
    """Look at all rows: the size of each image, and its boxes. The annotations' area holds nothing else."""
    names = packed.names
    classes: dict[str, int] = {}
    sides, counts, labels, boxes, areas = array("q"), array("q"), array("q"), array("d"), array("d")
    crowds = array("b")
    progress = index_files.ScanProgress(packed.where(), len(packed), "images")
    for row in range(len(packed)):
        progress(row)
        try:
            shapes = [shape for shape in packed.shapes(row) if shape is not None]
        except WrongEntry as error:
            raise BadData(f"{packed.shards[0].path.parent}: {names[row]}: {error}") from None
        try:
            sides.extend(read_header(packed.read(row, "image"), names[row]).shape[:2])
        except BadSample:  # said again when it is read
            sides.extend((1, 1))
        counts.append(len(shapes))
        for shape in shapes:
            labels.append(classes.setdefault(shape.label, len(classes)))
            boxes.extend(shape.box)
            areas.append(shape.area)
            crowds.append(shape.is_crowd)
    of_image = np.repeat(np.arange(1, len(packed) + 1), np.asarray(counts, np.int64))
    every_side = np.asarray(sides, np.int64).reshape(-1, 2)
    ordered = sorted(classes)
    new = np.argsort(np.argsort(list(classes))) + 1 if classes else np.zeros(0, np.int64)
    return assembled(
        {row + 1: (*map(int, every_side[row]), os.fsencode(names[row])) for row in range(len(packed))},  # type: ignore[misc]
        dict(enumerate(ordered, 1)),
        of_image,
        clipped(np.asarray(boxes, np.float64).reshape(-1, 4), *every_side[of_image - 1].T),
        np.asarray(areas, np.float64),
        np.asarray(crowds, bool),
        new[np.asarray(labels, np.int64)],
    )


class PackedBoxes(BoxSource):
    """Images of shards with boxes."""

    is_upright = True

    def __init__(self, packed: Packed, annotations: Annotations):
        self.packed, self.annotations = packed, annotations
        self.kind = packed.kind
        self.classes = annotations.classes
        self.class_ids = tuple(annotations.class_ids.tolist())
        self.most_objects = int(annotations.counts.max())
        # A decoded image takes more than an encoded one, but for the smallest.
        self.room = 3 * annotations.heights * annotations.widths + 2**12
        self.files = [shard.path for shard in packed.shards]
        sizes = [(shard.name, shard.size) for shard in packed.shards]
        self.fingerprint = index_files.digest(f"{self.kind} boxes", 1, annotations.content(), sizes)
        self.notes = (f"from {packed.title}",)

    def __len__(self) -> int:
        return len(self.annotations)

    def name(self, index: int) -> str:
        return self.annotations.names[index]

    def image(self, index: int) -> bytes:
        return self.packed.read(int(self.annotations.image_ids[index]) - 1, "image")

    def objects(self, index: int) -> Objects:
        return self.annotations.objects(index)


def masks_of_split(of_split: OfSplit, path: str, split: Split, options: SourceOptions, kind: str) -> PackedMasks:
    """Open the masks of a split; those of train and val decide the classes together."""
    here, _, is_drawn = _located(of_split, path, split, kind)
    deciding: dict[str, Packed] = {each: found for each in ("train", "val") if (found := of_split(each))}
    surveys = {each: _surveyed(found, options) for each, found in (deciding or {split: here}).items()}
    classes = decide([*surveys.values()], None, options.ignore)
    if classes.problem:
        raise BadData(f"{path}: {classes.problem[0]}: {classes.problem[1]}")
    seen = next((surveys[each] for each, found in deciding.items() if found is here), None) or _surveyed(here, options)
    rows, held_out = _rows_of(here, is_drawn, split, options)
    faults = seen.faults.all()
    bad = [row for row in rows.tolist() if faults[row]]
    if bad and not options.skips_missing:
        raise BadData(f"{path}: {here.names[bad[0]]}: {faults[bad[0]].decode()} (so are {len(bad)} of {len(rows)})")
    values = seen.colours if classes.is_coloured else seen.values
    if unknown := sorted(set(np.unique(values).tolist()) - {*classes.values, *classes.ignored}):
        raise BadData(f"{path}: masks of {split} have values that train lacks: {first_of(unknown)}")
    source = PackedMasks(here, rows, classes, seen, common_pixels_of(surveys.values()))
    source.held_out = held_out
    return source


def _surveyed(packed: Packed, options: SourceOptions) -> Survey:
    return options.once(("packed masks", packed.kind, packed.root, packed.split), lambda: _survey(packed))


def _survey(packed: Packed) -> Survey:
    key = index_files.digest(f"{packed.kind} masks", 1, packed.key)
    name = f"{packed.kind}-masks-{packed.split}"

    def look() -> Survey:
        progress = index_files.ScanProgress(packed.where(), len(packed), "masks")
        seen = []
        for row in range(len(packed)):
            progress(row)
            seen.append(_seen(packed, row))
        return together(seen)

    return index_files.kept_or_read(
        packed.root, name, key, packed.changed_ns, lambda kept: Survey.loaded(kept, len(packed)), look
    )


def _seen(packed: Packed, row: int) -> SeenMask:
    name = packed.names[row]
    try:
        data = packed.read(row, "mask")
    except BadSample as error:
        return SeenMask(fault=f"unreadable: {error.reason}")
    return look_at(data, name, name, lambda _: read_header(packed.read(row, "image"), name))


def common_pixels_of(surveys: Iterable[Survey]) -> tuple[int, int]:
    """Return the channels and bits of the images of all splits together."""
    forms = [np.stack([each.channels, each.bits], 1)[[not fault for fault in each.faults.all()]] for each in surveys]
    found = common_pixels([], np.concatenate([np.zeros((0, 2), np.int64), *forms]))
    return found.channels, found.bits


class PackedMasks(MaskSource):
    """Images of shards with masks."""

    def __init__(self, packed: Packed, rows: np.ndarray, classes: MaskClasses, seen: Survey, pixels: Sequence[int]):
        self.packed, self.rows = packed, rows
        self.kind = packed.kind
        self.classes, self.values = classes.names, classes.values
        self.is_coloured, self.unused = classes.is_coloured, classes.ignored
        self.channels, self.bits = pixels
        self.sizes = np.stack([seen.heights, seen.widths], 1)[rows]
        self.faults = seen.faults.take(rows)
        self.files = [shard.path for shard in packed.shards]
        sizes = [(shard.name, shard.size) for shard in packed.shards]
        self.fingerprint = index_files.digest(f"{self.kind} masks", 1, self.values, self.unused, rows.tolist(), sizes)
        self.notes = (f"from {packed.title}", *classes.said)

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        return self.packed.names[int(self.rows[index])]

    def size(self, index: int) -> tuple[int, int]:
        if fault := self.faults[index]:
            raise BadSample(self.name(index), f"its mask is not usable: {fault}")
        height, width = self.sizes[index].tolist()
        return height, width

    def image(self, index: int) -> bytes | np.ndarray:
        name, size = self.name(index), self.size(index)
        data = self.packed.read(int(self.rows[index]), "image")
        header = read_header(data, name)
        if header.shape[:2] != size and (header.height, header.width) == size:
            header = replace(header, orientation=1)
            return decode_rgb(data, name, header)
        if header.shape[:2] != size:
            raise BadSample(name, "its image and its mask have other sizes than when they were indexed; start again")
        if self.bits != 8 or self.channels not in (1, 3):
            return decode_channels(data, name, header, self.channels, self.bits)
        return data

    def mask(self, index: int) -> np.ndarray:
        name, size = self.name(index), self.size(index)
        found = indices_in(self.packed.read(int(self.rows[index]), "mask"), name, self.values, self.unused,
                           self.is_coloured)  # fmt: skip
        if found is None or found.shape != size:
            raise BadSample(name, "its mask has other values or another size than when it was indexed; start again")
        return found


def named(objects: Any, names: tuple[str, ...]) -> Any:
    """Return objects whose numbered categories have their names."""
    if not names:
        return objects
    if isinstance(objects, list):
        return [named(each, names) for each in objects]
    if not isinstance(objects, dict):
        return objects

    def name(value: Any) -> Any:
        return names[value] if type(value) is int and 0 <= value < len(names) else value

    changed = {}
    for key in CATEGORIES:
        if key in objects:
            changed[key] = (
                [name(each) for each in objects[key]] if isinstance(objects[key], list) else name(objects[key])
            )
    return objects | changed
