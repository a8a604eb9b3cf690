"""COCO as it is published: PATH/annotations/instances_train2017.json with PATH/train2017/*.jpg, and the same of val.

Also instances_train.json with train/, for data of one's own in that form. Images are in the order of their ids.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sightline.data.decode import MAX_BYTES
from sightline.data.sources import DEFAULT_OPTIONS, BoxSource, Objects, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, read_annotations
from sightline.errors import BadData, BadSample
from sightline.parts import Split

_SPLITS: tuple[Split, ...] = ("train", "val")
_YEARS = ("2017", "")
EXPECTED = "PATH/annotations/instances_{0}2017.json with PATH/{0}2017/*.jpg, or instances_{0}.json with {0}/"


def detect(path: str) -> bool:
    """Return whether PATH has the annotations and the images of a split."""
    return any(find(Path(path), split) is not None for split in _SPLITS)


def find(root: Path, split: Split) -> tuple[Path, Path] | None:
    """Return (annotations, folder of images) of a split, if both are there."""
    return next((pair for pair in places(root, split) if pair[0].is_file() and pair[1].is_dir()), None)


def places(root: Path, split: Split) -> list[tuple[Path, Path]]:
    """Return where (annotations, folder of images) of a split may lie: with COCO's year, or one's own without."""
    return [(root / "annotations" / f"instances_{split}{year}.json", root / f"{split}{year}") for year in _YEARS]


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> CocoSource:
    """Read the annotations of a split and list its images."""
    root = Path(path)
    found = find(root, split)
    if found is None:
        raise BadData(f"{path} has no {split} split of COCO; expected {EXPECTED.format(split)}")
    file, folder = found
    annotations = read_annotations(file, root)
    if split != "train" and (training := find(root, "train")):
        annotations.check_classes(read_annotations(training[0], root), str(file), str(training[0]))
    return CocoSource(file, folder, chosen(annotations, split, str(file)))


def chosen(annotations: Annotations, split: Split, file: str) -> Annotations:
    """Return what a split takes of its file: training leaves out boxes by rule and images without one."""
    if split != "train":
        return annotations
    kept = annotations.for_training()
    if not len(kept):
        raise BadData(f"{file}: none of its {len(annotations)} images has a box inside it; nothing can be trained on")
    return kept


class CocoSource(BoxSource):
    """Image files and the arrays of their annotations."""

    def __init__(self, file: Path, folder: Path, annotations: Annotations):
        self.folder = folder
        self.annotations = annotations
        self.classes = annotations.classes
        self.class_ids = tuple(annotations.class_ids.tolist())
        self.most_objects = int(annotations.counts.max(initial=0))
        self.room = _sizes(folder, annotations.names, file, annotations.image_ids)
        self.fingerprint = index_files.digest("coco", 1, annotations.content(), self.room.tobytes())

    def __len__(self) -> int:
        return len(self.annotations)

    def name(self, index: int) -> str:
        return f"{self.folder.name}/{self.annotations.names[index]}"

    def image(self, index: int) -> bytes:
        path = self.folder / self.annotations.names[index]
        try:
            if path.stat().st_size > MAX_BYTES:
                raise BadSample(self.name(index), f"more than the {MAX_BYTES} bytes allowed for one image; shrink it")
            return path.read_bytes()
        except OSError as error:
            raise BadSample(self.name(index), f"cannot be read: {error.strerror}") from error

    def objects(self, index: int) -> Objects:
        return self.annotations.objects(index)


def _sizes(folder: Path, names: index_files.Names, file: Path, image_ids: np.ndarray) -> np.ndarray:
    """Return the bytes of every image; a missing one is an error, because a data set is not unpacked in part."""
    listed: dict[bytes, dict[bytes, int]] = {}
    sizes = np.full(len(names), -1, np.int64)
    for row, name in enumerate(names.all()):
        below, _, last = name.rpartition(b"/")
        if below not in listed:
            listed[below] = _listing(os.path.join(os.fsencode(folder), below))
        sizes[row] = listed[below].get(last, -1)
    if missing := np.flatnonzero(sizes < 0).tolist():
        raise BadData(
            f"{folder} lacks {len(missing)} of the {len(names)} images of {file}, the first one "
            f"{names[missing[0]]} (image {image_ids[missing[0]]}); unpack {folder.name}.zip again"
        )
    return sizes


def _listing(folder: bytes) -> dict[bytes, int]:
    """Return name -> bytes of the files in a folder; 0 for a link that leads nowhere, which reading reports."""
    found = {}
    try:
        for entry in os.scandir(folder):
            try:
                found[entry.name] = entry.stat().st_size
            except OSError:
                found[entry.name] = 0
    except OSError:  # no such folder: all of its images are missing, which is said
        return {}
    return found
