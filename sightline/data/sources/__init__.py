"""Sources: where samples lie. One file is one kind: `detect(path)` and `open_source(path, split, options)` for pictures
with a label, `open_boxes(path, split)` for pictures with boxes, or `open_volumes(path, split, spec, fold, folds)`.

All kinds give samples in one order (by class and file name; by image id), so the same pictures in another form make the
same batches. (TFRecords without file names keep the order of their records.)
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from sightline.errors import UsageError
from sightline.parts import DataSpec, Split


@dataclass(frozen=True)
class Sample:
    """What lies on disk for one index: encoded bytes, or pixels (height, width, 3) where nothing needs decoding."""

    data: bytes | np.ndarray
    label: int


@dataclass(frozen=True)
class SourceOptions:
    """What a user knows of the data and the files do not say."""

    first_label: int = 1  # tfrecord: the smallest label in the files
    classes: int = 0  # tar, tfrecord: how many there are, where some of the numbered labels have no samples


DEFAULT_OPTIONS = SourceOptions()


@dataclass(frozen=True)
class Objects:
    """What is annotated on one picture, to the last digit of the files; (n,) and (n, 4) arrays in their order."""

    image_id: int
    height: int
    width: int
    boxes: np.ndarray  # (n, 4) float64: x, y, width, height in pixels
    labels: np.ndarray  # (n,) int64: 1 is the first class
    area: np.ndarray  # (n,) float64: of the outline, which is not that of the box
    crowd: np.ndarray  # (n,) bool


class Pictures(ABC):
    """Random access to the pictures of one split. Pickled to loader workers, so it holds no open files."""

    classes: tuple[str, ...]
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person would call this sample."""


class Source(Pictures):
    """Pictures with one label each."""

    @abstractmethod
    def read(self, index: int) -> Sample: ...


class BoxSource(Pictures):
    """Pictures with boxes. Those for training have a usable box each, and no others; see `annotations.usable`."""

    class_ids: tuple[int, ...]  # what the files call the classes
    most_objects: int  # of one picture
    room: np.ndarray  # (n,) int64: bytes that the encoded picture takes at most

    @abstractmethod
    def picture(self, index: int) -> bytes | np.ndarray:
        """Encoded, or pixels (height, width, 3) where nothing needs decoding. Raises BadSample."""

    @abstractmethod
    def objects(self, index: int) -> Objects: ...


class VolumeSource(ABC):
    """Volumes with a class for every voxel, prepared for the network. Pickled to loader workers."""

    spec: DataSpec
    fingerprint: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person would call this volume."""

    @abstractmethod
    def shape(self, index: int) -> tuple[int, int, int]:
        """(depth, height, width), known without reading."""

    @abstractmethod
    def image(self, index: int) -> np.ndarray:
        """(channels, depth, height, width) float32; of a file only what is looked at is read. Raises BadSample."""

    @abstractmethod
    def label(self, index: int) -> np.ndarray:
        """(depth, height, width) uint8, in the same way."""


def kinds(opener: str = "open_source") -> list[str]:
    """All kinds of source that have this function; they are files of this folder. Those with _ serve several."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return [name for name in names if hasattr(importlib.import_module(f"{__name__}.{name}"), opener)]


def open_source(kind: str, path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> Source:
    """The source of this kind, or with `auto` the one that recognises the path."""
    if kind == "auto":
        for candidate in kinds():
            module = importlib.import_module(f"{__name__}.{candidate}")
            if module.detect(path):
                return module.open_source(path, split, options)
        raise UsageError(
            f"--data.path '{path}' is nothing a source can read; expected a folder with train/CLASS/*.jpg and "
            f"val/CLASS/*.jpg (draw one with `sightline prepare shapes --out DIR`), with train/*.tar and val/*.tar, or "
            f"with train/train-00000-of-01024 and validation/validation-00000-of-00128; "
            f"known sources: {', '.join(kinds())}"
        )
    if kind not in kinds():
        raise UsageError(f"unknown --data.source '{kind}'; known: auto, {', '.join(kinds())}")
    return importlib.import_module(f"{__name__}.{kind}").open_source(path, split, options)


def open_boxes(kind: str, path: str, split: Split) -> BoxSource:
    """As `open_source`, for pictures with boxes."""
    known = kinds("open_boxes")
    if kind not in ("auto", *known):
        raise UsageError(f"unknown --data.source '{kind}'; known: auto, {', '.join(known)}")
    for candidate in known if kind == "auto" else [kind]:
        module = importlib.import_module(f"{__name__}.{candidate}")
        if kind != "auto" or module.detect(path):
            return module.open_boxes(path, split)
    raise UsageError(
        f"--data.path '{path}' is nothing a source of boxes can read; expected annotations/instances_train2017.json "
        f"with train2017/*.jpg, and the same of val (draw some with `sightline prepare shapes --out DIR`, then "
        f"DIR/detection), or train-00000-of-00256.tfrecord and val-00000-of-00032.tfrecord; "
        f"known sources: {', '.join(known)}"
    )


def open_volumes(kind: str, path: str, split: Split, fold: int, folds: int, spec: DataSpec) -> VolumeSource:
    """As `open_source`, for volumes: training takes all but one of `folds` parts, validation that one, number `fold`.

    `spec` is what the recipe declares; volumes that are drawn are drawn to it.
    """
    known = kinds("open_volumes")
    if kind not in ("auto", *known):
        raise UsageError(f"unknown --data.source '{kind}'; known: auto, {', '.join(known)}")
    for candidate in known if kind == "auto" else [kind]:
        module = importlib.import_module(f"{__name__}.{candidate}")
        if kind != "auto" or module.detect(path):
            return module.open_volumes(path, split, spec, fold, folds)
    raise UsageError(
        f"--data.path '{path}' is nothing a source of volumes can read; expected a folder with plan.json as "
        f"`sightline prepare decathlon --source DIR --out {path or 'PATH'}` writes it, or synthetic:samples=64; "
        f"known sources: {', '.join(known)}"
    )
