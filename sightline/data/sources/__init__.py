"""Sources: where samples lie. One file is one kind: `detect(path)` and `open_source(path, split, options)` for images
with a label; `open_boxes` or `open_masks`, the same for boxes or a class per pixel; `open_volumes` for volumes.

All kinds give samples in one order (by class and file name; by image id), so the same images in another form make the
same batches. (TFRecords without file names keep the order of their records.)"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sightline import plugins
from sightline.data.sources.layouts import Splits, contents, is_description, read_description, subfolders
from sightline.errors import BadData, UsageError
from sightline.parts import IGNORED as IGNORED
from sightline.parts import DataSpec, Split

if TYPE_CHECKING:
    from sightline.data.sources.index_files import Names

OneSource = TypeVar("OneSource", bound="Images")
Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Sample:
    """One index as it lies on disk: encoded bytes, or pixels (height, width, 3) where nothing needs decoding."""

    data: bytes | np.ndarray
    label: int | np.ndarray  # the class; (classes,) uint8 of 0 and 1 if an image may have several


@dataclass(frozen=True)
class SourceOptions:
    """Facts about the data that a user knows and the files do not say."""

    first_label: int = 1  # tfrecord: the smallest label in the files
    classes: int = 0  # tar, tfrecord: how many there are, where some of the numbered labels have no samples
    val_fraction: float = 0.2  # without a val split: the share of every class that validates
    split: str = ""  # without a val split: a file that lists the samples that validate; "": they are drawn; "all"
    mask_pattern: str = ""  # masks: the name of a mask without its ending, {} for what it shares with its image
    ignore: str = ""  # masks: numbers, #RRGGBB or names of classes that count for nothing; "none"; "": see masks.py
    file_column: str = ""  # table: the column of file names; "": by name or content
    label_column: str = ""  # table: the column of labels, or several of 0 and 1, by names or a pattern
    skips_missing: bool = False  # listed files that do not exist are bad samples when read, not an error at once
    keeps_all: bool = False  # to convert them: training too has all boxes and images, and no sample is left out
    listed: dict[Hashable, Any] | None = field(default=None, compare=False, repr=False)  # see `once`

    def once(self, key: Hashable, read: Callable[[], Shared]) -> Shared:
        """Return what `read` returns. Options of both splits with the same `listed` read it once for the two."""
        if self.listed is None:
            return read()
        if key not in self.listed:
            self.listed[key] = read()
        found: Shared = self.listed[key]
        return found


DEFAULT_OPTIONS = SourceOptions()


@dataclass(frozen=True)
class Objects:
    """The annotations of one image, to the last digit of the files; (n,) and (n, 4) arrays in their order.

    A box is x, y, width, height in pixels, x and y of its upper left corner. Label 1 is the first class.
    """

    image_id: int
    height: int
    width: int
    boxes: np.ndarray  # (n, 4) float64: x, y, width, height in pixels
    labels: np.ndarray  # (n,) int64: 1 is the first class
    area: np.ndarray  # (n,) float64: of the outline, which is not that of the box
    crowd: np.ndarray  # (n,) bool


class Images(ABC):
    """Random access to the images of one split. Pickled to loader workers, so it holds no open files."""

    classes: tuple[str, ...]
    fingerprint: str
    files: Sequence[Path] = ()  # that hold the images; none of data that are drawn
    inner: str = ""  # the folder below the path that holds the files, where they lie one deeper
    layout: Splits | None = None  # where both splits were found, of kinds that may lie anywhere
    held_out: Names | None = None  # of a split that was drawn: the names of the samples that validate
    ignored: Mapping[str, int] = MappingProxyType({})  # files that are not read, by their endings
    notes: Sequence[str] = ()  # what to say of how the data were read
    missing: Sequence[str] = ()  # files of samples that do not exist, of kinds that list files
    _is_test: bool = False  # of the val split: it is the test split, for want of another

    def is_own_test(self, val: Images | None) -> bool:
        """Return whether this test split neither trains nor validates; if it validates, note that in `val`."""
        if val is None or self.fingerprint != val.fingerprint:
            return True
        val._is_test = True
        return False

    @property
    def val_name(self) -> str:
        """The name of the split or folder that validates, if it is not called val, e.g. test."""
        if self.held_out is not None:
            return ""
        return (self.layout.other_val if self.layout else "") or "test" * self._is_test

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a sample for people."""


class Source(Images):
    """Images with one label each, or with any number of them."""

    is_multi_label: bool = False
    labels: np.ndarray  # the class of each image; all classes of the first image, then of the second... if multi-label

    @abstractmethod
    def read(self, index: int) -> Sample: ...

    def per_class(self) -> np.ndarray:
        """Count the images of every class, also those that cannot be read; labels of no class are damaged."""
        known = self.labels[(self.labels >= 0) & (self.labels < len(self.classes))]
        return np.bincount(known, minlength=len(self.classes))


class BoxSource(Images):
    """Images with boxes. Those for training have a usable box each, and no others; see `formats.coco.usable`.

    A source sets `classes`, `fingerprint`, `class_ids` (what the files call the classes), `most_objects` (of one image)
    and `room` (bytes that each encoded image takes at most); `files`, so that a resumed run notices changed images.
    """

    class_ids: tuple[int, ...]  # what the files call the classes
    most_objects: int  # of one image
    is_upright: bool = False  # annotated as a person sees the images, turned by their EXIF; else perhaps as stored
    room: np.ndarray  # (n,) int64: bytes that the encoded image takes at most

    @abstractmethod
    def image(self, index: int) -> bytes | np.ndarray:
        """Return an image encoded, or as pixels (height, width, 3) where nothing needs decoding. Raises BadSample."""

    @abstractmethod
    def objects(self, index: int) -> Objects: ...


class MaskSource(Images):
    """Images with a class for every pixel."""

    values: tuple[int, ...]  # what the files call the classes: numbers, or colours as 0xRRGGBB with is_coloured
    is_coloured: bool = False
    channels: int = 3  # of the images: 1 to 4
    bits: int = 8  # of each channel: 8 or 16

    @abstractmethod
    def image(self, index: int) -> bytes | np.ndarray:
        """Return an image encoded, or as pixels (height, width, channels). Raises BadSample."""

    @abstractmethod
    def mask(self, index: int) -> np.ndarray:
        """Return (height, width) uint8: the index of each pixel's class, or IGNORED. Raises BadSample."""

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Return (height, width), from the header. Raises BadSample."""


class VolumeSource(ABC):
    """Volumes with a class for every voxel, prepared for the network. Pickled to loader workers."""

    spec: DataSpec
    fingerprint: str
    files: Sequence[Path] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the name of a volume for people."""

    @abstractmethod
    def shape(self, index: int) -> tuple[int, int, int]:
        """Return (depth, height, width), known without reading."""

    @abstractmethod
    def image(self, index: int) -> np.ndarray:
        """Return (channels, depth, height, width) float32; of a file only what is used is read. Raises BadSample."""

    @abstractmethod
    def label(self, index: int) -> np.ndarray:
        """Return (depth, height, width) uint8, in the same way."""


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` indices of so many samples, evenly from the first to the last."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).astype(int)).tolist()


def wrong_classes(path: str, found: int, declared: int) -> BadData:
    """Return the error of data that have another number of classes than was declared, or than a run was trained on."""
    return BadData(
        f"{path} has {found} classes, the recipe declares {declared}; give the right --data.path, or --data.classes "
        f"{found} to train on these. To score a test set that lacks some classes "
        "see docs/reference/data.md, Scores on other data"
    )


def kinds(opener: str = "open_source") -> list[str]:
    """Return all kinds of source that have this function: files of this folder, of which some only serve others."""
    return [name for name in _files(tuple(__path__)) if hasattr(_module(name), opener)]


@cache  # a start asks a dozen times
def _files(folders: tuple[str, ...]) -> list[str]:
    # Masks that lie beside images come before outlines in a json file of the same folder.
    return sorted((module.name for module in pkgutil.iter_modules(folders)), key=lambda name: (name != "masks", name))


def open_source(kind: str, path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> Source:
    """Open the source of this kind, or with `auto` the one that recognises the path."""
    source: Source = _open("open_source", kind, _LABELLED, path, split, options)
    return source


def open_boxes(kind: str, path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxSource:
    """Open images with boxes in the same way."""
    source: BoxSource = _open("open_boxes", kind, _WITH_BOXES, path, split, options)
    return source


def open_masks(kind: str, path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> MaskSource:
    """Open images with masks in the same way."""
    kind = kind_of_masks(kind, path, options)
    source: MaskSource = _open("open_masks", kind, _WITH_MASKS, path, split, options)
    return source


class Opener:
    """Opens the sources of one start: what both splits share is listed once, and each source is opened once. Not for
    two starts, between which files may change."""

    def __init__(self, opened: Mapping[Any, Any] = MappingProxyType({})):
        self.opened: dict[Any, Any] = dict(opened)
        self._listed: dict[Hashable, Any] = {}

    def open(
        self,
        open_one: Callable[[str, str, Split, SourceOptions], OneSource],  # open_source, open_boxes or open_masks
        kind: str,
        path: str,
        split: Split,
        options: SourceOptions,
    ) -> OneSource:
        """Open a source, or return the one that was opened in the same way; also without its number of classes."""
        key = _key(open_one.__name__, kind, path, split, options)
        if key not in self.opened:
            source = open_one(kind, path, split, replace(options, listed=self._listed))
            for count in {options.classes, len(source.classes)}:
                self.opened[_key(open_one.__name__, kind, path, split, replace(options, classes=count))] = source
        found: OneSource = self.opened[key]
        return found


def _key(opener: str, kind: str, path: str, split: Split, options: SourceOptions) -> tuple[object, ...]:
    """Return what tells two sources apart; paths count from any directory."""
    place = os.path.abspath(path) if os.path.exists(path) else path
    drawn = os.path.abspath(options.split) if options.split else ""
    return opener, kind, place, split, replace(options, split=drawn)


def open_volumes(kind: str, path: str, split: Split, fold: int, folds: int, spec: DataSpec) -> VolumeSource:
    """Open volumes in the same way: training takes all but one of `folds` parts, validation that one, number `fold`.

    `spec` is what the recipe declares; volumes that are drawn are drawn to it.
    """
    source: VolumeSource = _open("open_volumes", kind, _VOLUMES, path, split, spec, fold, folds)
    return source


def kind_of_boxes(kind: str, path: str) -> str:
    """Return the kind of source that reads these images with boxes: the first that recognises the path for `auto`."""
    return _kind("open_boxes", kind, path, _WITH_BOXES)


def kind_of_masks(kind: str, path: str, options: SourceOptions) -> str:
    """Return the kind of source that reads these images with masks: that of files, if their names need a pattern."""
    needs_pattern = kind == "auto" and options.mask_pattern and os.path.isdir(path)
    return "masks" if needs_pattern else _kind("open_masks", kind, path, _WITH_MASKS)


def _open(name: str, kind: str, expected: str, path: str, split: Split, *given: object) -> Any:
    """Open with the function `name` of a kind of source, or with `auto` of the first kind that recognises the path."""
    chosen = _kind(name, kind, path, expected)
    if not _is_ours(chosen):
        return _module("of_plugins").opened(name, chosen, path, split, *given)
    source = getattr(_module(chosen), name)(path, split, *given)
    if isinstance(source, Images) and source.layout:
        places = (source.layout.train, source.layout.val, source.layout.test)
        _module("predicted").refuse_drawings([path, *(place.images for place in places if place)], source.files)
    return source


def _kind(name: str, kind: str, path: str, expected: str) -> str:
    known = kinds(name)
    if kind not in ("auto", *known) and not _is_of_plugin(kind, name):
        if not _is_ours(kind) and plugins.has("sources", kind):
            raise UsageError(_of_another_task(kind, name))
        raise UsageError(
            f"unknown --data.source '{kind}'; known: auto, {', '.join(known)}{plugins.also_known('sources')}"
        )
    if kind != "auto":
        return kind
    if found := recognised(name, path) or _recognised_by_plugin(name, path):
        return found
    raise UsageError(_unknown(name, path, expected.format(path or "PATH")))


def recognised(name: str, path: str) -> str:
    """Return the first kind of ours with the function `name` that recognises a path; "" if none does."""
    return next((kind for kind in kinds(name) if _module(kind).detect(path)), "")


def _recognised_by_plugin(name: str, path: str) -> str:
    """Return the kind of another installed package that recognises a path that none of ours does; "" if none does."""
    others = plugins.names("sources") if os.path.exists(path) else []
    others = [kind for kind in others if _is_of_plugin(kind, name)]
    return next((kind for kind in others if plugins.load("sources", kind).detect(path)), "")


def _is_of_plugin(kind: str, opener: str) -> bool:
    """Return whether another installed package brings this kind of source, with this function."""
    return not _is_ours(kind) and plugins.has("sources", kind) and hasattr(plugins.load("sources", kind), opener)


def _of_another_task(kind: str, opener: str) -> str:
    """Say what a source of another package reads instead of what this recipe needs."""
    part = plugins.load("sources", kind)
    reads = [said for name, said in _RECIPES.items() if hasattr(part, name)]
    return (
        f"--data.source '{kind}' of the package {plugins.package('sources', kind)} has no {opener}, which a source of "
        f"{_RECIPES[opener]} has; it reads {' and '.join(reads) or 'nothing, as it defines none of the functions'}; "
        "use the recipe that fits it, or another source"
    )


def _is_ours(kind: str) -> bool:
    return kind in _files(tuple(__path__))


def _unknown(name: str, path: str, expected: str) -> str:
    """Say what lies at a path that no source of one sort recognises, and what to do."""
    if is_description(path):
        layout = read_description(path)
        return f"{path}: kind '{layout.kind}' is unknown; known: {', '.join(kinds(name))}"
    if not os.path.exists(path):
        return f"--data.path '{path}' does not exist, or is a link that leads nowhere; expected {expected}"
    from sightline.data.sources import foreign, predicted

    if said := predicted.said_of(path):
        return said
    found = contents(Path(path))
    others = [each for each in _RECIPES if each not in (name, "open_source") and recognised(each, path)]
    if others and name == "open_source":  # boxes have their images one folder deeper
        return f"--data.path '{path}' holds {_RECIPES[others[0]]}, which this recipe cannot read; found there: {found}"
    for below in subfolders(Path(path)):
        if recognised(name, inner := os.path.join(path, below)):
            return f"--data.path '{path}' holds data one folder deeper; use --data.path {shlex.quote(inner)}"
    if name == "open_masks" and (volumes := _of_volumes(Path(path))):
        return f"--data.path '{path}' holds {volumes}"
    for other, of_other in _RECIPES.items():
        if other != name and recognised(other, path):
            said = f"--data.path '{path}' holds {of_other}, which this recipe cannot read; found there: {found}"
            # Folders of masks with unknown names look like classes.
            return f"{said}; expected {expected}" if name == "open_masks" else said
    if known := foreign.said(Path(path)):
        return f"--data.path '{path}' holds {known}"
    tables = sorted(each.name for each in Path(path).glob("*.[cC][sS][vV]")) if name == "open_source" else []
    said = f"--data.path '{path}' holds nothing that this recipe can read: {found}; expected {expected}"
    for table in tables[:1]:
        said += f"; if {table} lists images with labels, use --data.path {shlex.quote(os.path.join(path, table))}"
    return said


def _of_volumes(path: Path) -> str:
    """Say what volumes lie at a path that was given for images with masks, and what reads them; "" for none."""
    from sightline.data.volumes import layouts

    readers = (
        "prepare them with `sightline prepare decathlon`, then `sightline train unet2d` or `finetune_segmentation`"
    )
    if (place := layouts.find_raw(path)) is not None:
        return f"{layouts.describe_raw(place)}; {layouts.remedy(place, 2)} or `sightline train finetune_segmentation`"
    has_volumes = path.is_dir() and any(name.lower().endswith((".nii", ".nii.gz")) for name in os.listdir(path))
    return f"volumes in files of NIfTI, without labels beside them; {readers}" if has_volumes else ""


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


_RECIPES = {  # folders of images and masks could also be two classes
    "open_boxes": "images with boxes (for `sightline train detection`)",
    "open_masks": "images with masks (for `sightline train segmentation`)",
    "open_source": "images with a label (for `sightline train classification`)",
    "open_volumes": "prepared volumes (for unet2d, finetune_segmentation and demo_segmentation)",
}
_LABELLED = (
    "two or more folders, one per class, with .jpg, .png, .bmp, .webp or .tif images, also below train/ and val/ "
    "(draw some with `sightline prepare shapes --out DIR`), labels.csv with columns file and label, "
    "metadata.jsonl or parquet files of Hugging Face, flags, tags or choices of LabelMe, VIA, CVAT or Label Studio, "
    "train/*.tar and val/*.tar, or train/train-00000-of-01024 and validation/validation-00000-of-00128"
)
_WITH_BOXES = (
    "COCO's json files with their images (train.json and val.json, or one json; also annotations/"
    "instances_train2017.json with train2017/*.jpg), YOLO's data.yaml or images/ with labels/*.txt, Pascal VOC's "
    "Annotations/*.xml with JPEGImages/, an export of LabelMe, VIA, CVAT or Label Studio with its images, "
    "metadata.jsonl or parquet files of Hugging Face, tar shards with KEY.jpg and KEY.json, or "
    "train-00000-of-00256.tfrecord (draw some with `sightline prepare shapes --out DIR`, then DIR/detection)"
)
_WITH_MASKS = (
    "images/ with masks/ (or JPEGImages/ with SegmentationClass/), X.jpg with X_mask.png in one folder, a Roboflow "
    "export with _classes.csv, COCO's json files with outlines, YOLO's data.yaml with polygons, an export of LabelMe, "
    "VIA, CVAT or Label Studio with its images, metadata.jsonl or parquet files of Hugging Face, tar shards with "
    "KEY.jpg and KEY.seg.png, or a description with `kind: masks` that names folders called otherwise "
    "(docs/reference/data_masks.md)"
)
_VOLUMES = (
    "a folder with plan.json as `sightline prepare decathlon --source DIR --out PREPARED` writes it, or "
    "synthetic:samples=64"
)
