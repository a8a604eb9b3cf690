"""Images whose objects were marked in a tool for labelling: what labelme.py, via.py, cvat.py, labelstudio.py and
metadata.py share. They say how an export looks and what one entry of it says; here is where exports and images lie.

An index keeps boxes, labels and where in the files each entry lies; outlines are read from there when a mask is drawn.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.formats.coco import MAX_SIDE
from sightline.data.formats.marked import IGNORE, Marked, WrongEntry, clipped
from sightline.data.sources import IGNORED, Source, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, assembled
from sightline.data.sources.box_images import (
    UNKNOWN_SIDE,
    BoxImages,
    Listing,
    kind_described,
    list_files,
    missing_images,
    open_split,
    sides_of,
)
from sightline.data.sources.coco import is_of_test, split_of
from sightline.data.sources.layouts import (
    ALL,
    IMAGES,
    Place,
    Splits,
    no_test_split,
    read_description,
    split_folders,
    test_folder,
    validating,
    with_labels_beside,
)
from sightline.data.sources.outlines import OutlineImages
from sightline.data.sources.table import Listed, TableSource
from sightline.errors import BadData, BadSample, first_of
from sightline.files.archive import BadArchive, clean_name
from sightline.files.regular import regular
from sightline.parts import Split

LABEL_FOLDERS = ("annotations", "annotation", "labels", "json", "jsons", "ann")  # beside the images
_UPLOADED = re.compile(r"^[0-9a-f]{6,12}-(?=.)")  # what Label Studio puts before the name of a file
_HEAD = 2**16  # bytes in which a tool's file shows what it is
_LOOKED_AT = 50  # files of a folder in which one is an export
_COLUMNS = ("file_of", "starts", "stops", "tags", "tag_ends", "splits")  # of `Read`
_SPLITS: tuple[Split, ...] = ("train", "val", "test")  # numbers of splits are places in it
MOST_BYTES = 2**24  # of one entry

Entry = tuple[int, int, Any]  # where it lies in its file, and its value


class Tool(ABC):
    """How the exports of a tool look."""

    kind: str
    title: str  # in the first line of a run
    suffixes: tuple[str, ...] = (".json",)
    is_one_file = True  # an export holds many images; else one each
    key = ""  # what else decides how exports are read
    origin = ""  # in the first line of a run; "": annotated in the tool
    hint = "annotate them first"  # where nothing that is needed is marked
    has_subsets = False  # an export of several splits says, by subset or folder, of which each image is
    nameless = ""  # the class of objects that have none; where train has one other, they are of that

    @abstractmethod
    def is_export(self, head: bytes) -> bool:
        """Return whether a file that begins so is of this tool, also if it is one that is then refused."""

    @abstractmethod
    def entries(self, file: Path) -> Iterator[Entry]:
        """Yield the entries of a file. Raises BadData, also for exports that are not read, with the way out."""

    @abstractmethod
    def value(self, data: bytes) -> Any:
        """Return the entry that these bytes are; ValueError if they are none."""

    @abstractmethod
    def read(self, value: Any, file: str) -> Marked | None:
        """Return what an entry says; None if it was not annotated. Raises WrongEntry."""

    # The functions of a source

    def detect(self, path: str) -> bool:
        """Return whether PATH is an export or a description of some, or a folder with one in the usual places."""
        return self._layout(path) is not None

    def open_boxes(self, path: str, split: Split, options: SourceOptions) -> BoxImages:
        """Read the exports of a split and list its images."""
        read = self.located(path, split, options)
        self._refuse_without(read, path, int(read.here.annotations.counts.sum()), "boxes")
        source = open_split(self.kind, read.layout, split, read.annotations, options)
        source.notes = read.notes
        return source

    def open_masks(self, path: str, split: Split, options: SourceOptions) -> ToolMasks:
        """The same with the outlines of objects as masks."""
        read = self.located(path, split, options)
        self._refuse_without(read, path, int(read.here.annotations.counts.sum()), "outlines")
        return ToolMasks(self, read, split, options)

    def open_source(self, path: str, split: Split, options: SourceOptions) -> Source:
        """The same with labels of whole images; those without one are left out."""
        read = self.located(path, split, options)
        self._refuse_without(read, path, len(read.here.tags), "labels of whole images")
        return _labelled(self, read, split, options)

    def _refuse_without(self, read: Located, path: str, count: int, what: str) -> None:
        if count or read.split == "test":
            return
        objects, tags = len(read.here.annotations.categories), len(read.here.tags)
        others = [f"{objects} objects (for `sightline train detection` or `segmentation`)"] * bool(objects)
        others += [f"{tags} labels of images (for `sightline train classification`)"] * bool(tags)
        raise BadData(
            f"{path}: {self.title} marks no {what} in its {len(read.here.annotations)} images; it has "
            f"{' and '.join(others) or 'nothing else either'}; {self.hint}"
        )

    # Where files lie

    def layout_at(self, path: str) -> Splits:
        """Return where the splits lie; BadData if there are none."""
        found = self._layout(path)
        if found is None:
            raise BadData(f"{path} holds no export of {self.title}; docs/reference/data_tools.md shows the layouts")
        return found

    def _layout(self, path: str) -> Splits | None:
        if kind_described(path):
            described = read_description(path)
            return with_labels_beside(described) if described.kind == self.kind else None
        root = Path(path)
        if os.path.isfile(root):
            return Splits(self.kind, Place(_images_of(root), root), None) if self.is_file_of(root) else None
        for base in (root, root / "images", *(root / each for each in LABEL_FOLDERS)):
            if found := self._splits_below(root, base):
                return found
        return None

    def _splits_below(self, root: Path, base: Path) -> Splits | None:
        """Return the splits whose exports lie in a folder, or in folders of it that are called like splits."""
        found: dict[Split, Place] = {}
        folders = split_folders(base)
        if test := test_folder(base):
            folders["test"] = test
        for split, folder in folders.items():
            if labels := next((at for at in (folder, *(folder / n for n in LABEL_FOLDERS)) if self._holds(at)), None):
                images = folder if base == root else root / "images" / folder.name
                found[split] = Place(images if os.path.isdir(images) else root, labels)
        if not found and (exports := self.exports(base, 0 if self.is_one_file else 1)):
            found = {"train": Place(root, base)}
            named = {each: split_of(each.name) for each in exports} if self.is_one_file else {}
            if "train" in named.values() and len(exports) > 1:
                found = {split: Place(root, file) for file, split in named.items() if split}
                if tests := [file for file in exports if is_of_test(file.name)]:
                    found["test"] = Place(root, tests[0])
        if not found:
            return None
        return Splits(self.kind, found.get("train"), found.get("val"), test=found.get("test"))

    def _holds(self, folder: Path) -> bool:
        return bool(self.exports(folder, 1))

    def exports(self, folder: Path, most: int = 0) -> list[Path]:
        """Return the tool's files in a folder, by name; at most so many if that is given. None if the first of them are
        of something else."""
        try:
            names = sorted(each for each in os.listdir(folder) if each.lower().endswith(self.suffixes))
        except OSError:
            return []
        files = [folder / each for each in names if not each.startswith(".")]
        if self.is_one_file:
            return [each for each in files[:_LOOKED_AT] if self._is_export(each)]
        if not any(self._is_export(each) for each in files[:_LOOKED_AT]):
            return []
        return files[:most] if most else files  # the others are looked at when they are read

    def is_file_of(self, file: Path) -> bool:
        """Return whether a file is an export of this tool by its name and how it begins."""
        return file.name.lower().endswith(self.suffixes) and self._is_export(file)

    def _is_export(self, file: Path) -> bool:
        try:
            with open(file, "rb", opener=regular) as opened:
                return self.is_export(opened.read(_HEAD).removeprefix(b"\xef\xbb\xbf"))
        except OSError:
            return False

    def located(self, path: str, split: Split, options: SourceOptions) -> Located:
        """Read the place of a split, and that of train, whose classes are those of all."""
        layout = self.layout_at(path)
        if self.has_subsets and layout.train and layout.val in (None, layout.train):
            every = self._read(layout.train, options)
            if parts := every.by_split():
                layout = replace(layout, val=layout.train, test=layout.train if "test" in parts else layout.test)
                place = layout.place(split)
                here = parts.get(split) or parts.get("test") or self._read(place, options)  # test may validate
                return Located(self, layout, split, place, here, parts["train"])
        place = layout.place(split)
        file = place.labels or place.images
        if not self.is_one_file and layout.draws(split) and options.split != ALL and os.path.isfile(file):
            raise BadData(f"{file} is a file of {self.title}, of one image; give its folder, {_images_of(file)}")
        here = self._read(place, options)
        defining = self._read(layout.train, options) if layout.train and layout.train != place else here
        return Located(self, layout, split, place, here, defining)

    def _read(self, place: Place, options: SourceOptions) -> Read:
        return options.once((self.kind, self.key, place), lambda: _read_place(self, place))


@dataclass(frozen=True)
class Read:
    """All that the exports of a place say: one row per image, in the order of their names."""

    files: tuple[Path, ...]  # the exports
    annotations: Annotations
    file_of: np.ndarray  # the export of each image, and where in it its entry lies
    starts: np.ndarray
    stops: np.ndarray
    tags: np.ndarray  # labels of whole images: numbers of tag_names, those of the first image first
    tag_ends: np.ndarray
    splits: np.ndarray  # of each image, where the export says it: places in _SPLITS; that of train where it does not
    tag_names: index_files.Names
    said: index_files.Names

    def by_split(self) -> dict[Split, Read]:
        """Return the images of each split; nothing unless some are of train and some of another one."""
        rows = {split: np.flatnonzero(self.splits == number) for number, split in enumerate(_SPLITS)}
        found = {split: self._of_images(its) for split, its in rows.items() if len(its)}
        return found if "train" in found and len(found) > 1 else {}

    def _of_images(self, rows: np.ndarray) -> Read:
        """Return those of some images, in their order, with the classes and labels that these have."""
        annotations = self.annotations.of_images(rows)
        used = {*annotations.categories.tolist()}
        counts = np.diff(self.tag_ends, prepend=0)
        tags = self.tags[np.isin(np.repeat(np.arange(len(counts)), counts), rows)]
        used_tags = np.unique(tags)
        return replace(
            self,
            annotations=annotations.of_classes({n: name for n, name in annotations.named_classes() if n in used}),
            **{each: getattr(self, each)[rows] for each in ("file_of", "starts", "stops", "splits")},
            tags=np.searchsorted(used_tags, tags),
            tag_ends=np.cumsum(counts[rows], dtype=np.int64),
            tag_names=self.tag_names.take(used_tags),
        )

    def arrays(self) -> index_files.Arrays:
        plain = {each: getattr(self, each) for each in _COLUMNS}
        names = {**self.tag_names.arrays("tag_names"), **self.said.arrays("said")}
        return {**self.annotations.arrays(), **plain, **names}

    @classmethod
    def loaded(cls, files: tuple[Path, ...], arrays: index_files.Arrays) -> Read:
        """Invert `arrays`; ValueError or KeyError where the parts do not fit each other."""
        annotations = Annotations.loaded(arrays)
        annotations.names.below()
        found = cls(
            files,
            annotations,
            **{each: arrays[each] for each in _COLUMNS},
            tag_names=index_files.Names.loaded(arrays, "tag_names"),
            said=index_files.Names.loaded(arrays, "said"),
        )
        rows = {len(getattr(found, each)) for each in _COLUMNS if each != "tags"} | {len(annotations)}
        counts = np.diff(found.tag_ends, prepend=0)
        if len(rows) != 1 or np.any(counts < 0) or int(counts.sum()) != len(found.tags):
            raise ValueError("columns of different lengths")
        if np.any(found.tags < 0) or np.any(found.tags >= len(found.tag_names)):
            raise ValueError("a label without a name")
        if np.any(found.file_of < 0) or np.any(found.file_of >= len(files)) or np.any(found.starts < 0):
            raise ValueError("an entry that is nowhere")
        if np.any(found.splits < 0) or np.any(found.splits >= len(_SPLITS)):
            raise ValueError("an image of no split")
        return found


@dataclass(frozen=True)
class Located:
    """The place of a split as it was read, and that of train."""

    tool: Tool
    layout: Splits
    split: Split
    place: Place
    here: Read
    defining: Read

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of how the data were read, the tool first."""
        said = [each.decode("utf-8", "replace") for each in self.here.said.all()]
        return (self.tool.origin or f"annotated in {self.tool.title}", *said)

    @cached_property
    def annotations(self) -> Annotations:
        """The annotations with the classes of the training images."""
        named = [name for name in self.defining.annotations.classes if name != self.tool.nameless]
        found = self.here.annotations
        if len(named) == 1 and self.tool.nameless in (*found.classes, *self.defining.annotations.classes):
            self._check(set(found.classes) - {*named, self.tool.nameless})
            return replace(found, categories=np.ones_like(found.categories)).of_classes({1: named[0]})
        classes = self.defining.annotations.classes
        self._check(set(found.classes) - set(classes))
        return found.renumbered(classes)

    def _check(self, unknown: set[str]) -> None:
        if unknown:
            raise BadData(
                f"{self.place.labels} has classes that train lacks: {first_of(sorted(unknown))}; add training images "
                "of them, or remove them"
            )


def _images_of(file: Path) -> Path:
    """Return the folder below which the images of an export lie."""
    return file.parent.parent if file.parent.name.lower() in LABEL_FOLDERS else file.parent


def _read_place(tool: Tool, place: Place) -> Read:
    """Read the exports of a place, or what an earlier run kept if no file has changed."""
    labels = place.labels or place.images
    is_file = os.path.isfile(labels)
    files = (labels,) if is_file else tuple(tool.exports(labels))
    if not files:
        raise BadData(f"{labels} holds no export of {tool.title}; docs/reference/data_tools.md shows the layouts")
    images = list_files(place.images, IMAGES)
    infos = [_state(file) for file in files]
    folder = labels.parent if is_file else labels
    changed = [*images.changed_ns(), *(changed for _, changed in infos)]
    named = [(file.name, *info) for file, info in zip(files, infos, strict=True)]
    key = index_files.digest(tool.kind, 3, tool.key, os.path.relpath(place.images, folder), named, images.key())
    name = f"{tool.kind}-{labels.stem if is_file else 'all'}"
    return index_files.kept_or_read(
        folder,
        name,
        key,
        changed,
        lambda kept: Read.loaded(files, kept),
        lambda: _Reading(tool, place, files, images).read(),
    )


def _said_of(found: Marked) -> bytes:
    said = repr((found.labels, [(shape.label, *shape[2:]) for shape in found.shapes]))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


def _state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}; allow reading it or remove it") from error
    return found.st_size, found.st_mtime_ns


@dataclass
class _Reading:
    """The entries of some exports, as far as they were read."""

    tool: Tool
    place: Place
    files: tuple[Path, ...]
    images: Listing
    marked: dict[str, tuple[int, int, int, int, int]] = field(default_factory=dict)  # by image: file, span, sides
    classes: dict[str, int] = field(default_factory=dict)
    tag_names: dict[str, int] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    subsets: dict[str, str] = field(default_factory=dict)  # of images that are of one
    parted: str = ""  # how images were split
    said_of: dict[str, bytes] = field(default_factory=dict)  # digests of what was said of each image

    def read(self) -> Read:
        tags: dict[str, list[int]] = {}
        owners: list[str] = []
        counts, labels, boxes, areas, crowds = array("q"), array("q"), array("d"), array("d"), array("b")
        progress = index_files.ScanProgress(str(self.place.labels), len(self.files), "files")
        for number, file in enumerate(self.files):
            progress(number)
            if not (self.tool.is_one_file or self.tool._is_export(file)):
                self.notes[f"{file.suffix} files of something else ignored"] += 1
                continue
            for start, stop, value in self.tool.entries(file):
                try:
                    found = self.tool.read(value, str(file))
                    if found is None:
                        self.notes["images without an annotation left out"] += 1
                        continue
                    image = self._image(found, file)
                    if image in self.marked:
                        self._refuse_other(image, found, file)
                        continue
                except WrongEntry as error:
                    raise BadData(f"{file}, entry at byte {start}: {error}; fix it in {self.tool.title}") from None
                self.marked[image] = (number, start, stop, found.height, found.width)
                self.said_of[image] = _said_of(found)
                if found.subset:
                    self.subsets[image] = found.subset
                tags[image] = [self.tag_names.setdefault(each, len(self.tag_names)) for each in found.labels]
                self.notes.update(found.notes)
                owners.append(image)
                shapes = [shape for shape in found.shapes if shape.label != IGNORE]
                counts.append(len(shapes))
                for shape in shapes:
                    labels.append(self.classes.setdefault(shape.label, len(self.classes)))
                    boxes.extend(shape.box)
                    areas.append(shape.area)
                    crowds.append(shape.is_crowd)
        if not self.marked:
            raise BadData(f"{self.place.labels} has no annotated image; annotate some in {self.tool.title} first")
        return self._joined(owners, counts, labels, boxes, areas, crowds, tags)

    def _refuse_other(self, image: str, found: Marked, file: Path) -> None:
        """Raise WrongEntry for an image that was annotated before, unless both say the same: some folders hold an
        export beside the project that it is of."""
        if _said_of(found) != self.said_of[image]:
            other = self.files[self.marked[image][0]]
            remedy = "remove one of the two" if other == file else "give one of the files as --data.path"
            raise WrongEntry(f"{image} is annotated otherwise in {other.name}; {remedy}")

    def _image(self, found: Marked, file: Path) -> str:
        """Return the image of an entry as its path below the place: as it is named, from the folder of its export or
        from that of the images, else the export that holds it, else the one of this name in any folder; it may be
        missing."""
        name = found.name
        plain = name.replace("\\", "/")
        beside = os.path.relpath(file.parent, self.place.images).replace(os.sep, "/")
        below = [posixpath.join(found.subset, plain)] if found.subset else []
        places = [posixpath.join(at, each) for each in (*below, plain) for at in (beside, "", "images")]
        for at in places:
            if (path := posixpath.normpath(at)) in self.images.files:
                return path
        if found.holds_image and beside.partition("/")[0] != "..":
            self.notes[f"images read from the {file.suffix} files that hold them"] += 1
            return posixpath.normpath(posixpath.join(beside, file.name))
        last = posixpath.basename(plain)
        for base in dict.fromkeys((last, _UPLOADED.sub("", last))):
            same = self._by_name.get(base, [])
            if len(same) > 1:  # the longest end of its path decides
                parts = plain.split("/")
                ends = ["/".join(parts[at:]) for at in range(len(parts))]
                same = next((hit for end in ends if (hit := [s for s in same if f"/{s}".endswith(f"/{end}")])), same)
            if len(same) > 1:
                raise WrongEntry(f"{name} could be {' or '.join(same[:3])}; rename one of them")
            if same:
                return same[0]
        if not self.tool.is_one_file and len(same := self._by_stem.get(file.stem, [])) == 1:
            return same[0]
        try:
            return clean_name(last, "image") or "image"
        except BadArchive as error:
            raise WrongEntry(str(error)) from None

    @cached_property
    def _by_name(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.images.files:
            found.setdefault(posixpath.basename(name), []).append(name)
        return found

    @cached_property
    def _by_stem(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.images.files:
            found.setdefault(os.path.splitext(posixpath.basename(name))[0], []).append(name)
        return found

    def _joined(
        self,
        owners: Sequence[str],
        counts: Sequence[int],
        labels: Sequence[int],
        boxes: Sequence[float],
        areas: Sequence[float],
        crowds: Sequence[int],
        tags: Mapping[str, list[int]],
    ) -> Read:
        names = sorted(self.marked)
        ids = {name: place for place, name in enumerate(names, 1)}
        image_of = np.repeat(np.asarray([ids[each] for each in owners], np.int64), np.asarray(counts, np.int64))
        all_boxes = np.asarray(boxes, np.float64).reshape(-1, 4)
        ends = np.ones((len(names) + 1, 2))  # of the boxes of each image
        np.maximum.at(ends, image_of, np.ceil(all_boxes[:, :2] + all_boxes[:, 2:]))
        facts = {}
        for name in names:
            height, width = self.marked[name][3:]
            if not (height and width):
                height, width = sides_of(self.place.images / name)
                if (height, width) == (UNKNOWN_SIDE, UNKNOWN_SIDE):  # of an image that cannot be read
                    width, height = np.minimum(ends[ids[name]], MAX_SIDE).astype(int).tolist()
            facts[ids[name]] = (height, width, name.encode("utf-8", "surrogateescape"))
        sides_of_objects = np.asarray([facts[number][:2] for number in range(1, len(names) + 1)], np.int64)[
            image_of - 1
        ]
        classes = sorted(self.classes)
        new = np.argsort(np.argsort(list(self.classes))) + 1 if classes else np.zeros(0, np.int64)
        boxes_within = clipped(all_boxes, *sides_of_objects.T)
        if outside := int((boxes_within[:, 2:] <= 0).any(1).sum()):
            self.notes["objects outside their image or without an area"] += outside
        annotations = assembled(
            facts,
            dict(enumerate(classes, 1)),
            image_of,
            boxes_within,
            np.asarray(areas, np.float64),
            np.asarray(crowds, bool),
            new[np.asarray(labels, np.int64)],
        )
        splits = self._splits(names)
        spans = np.asarray([self.marked[name][:3] for name in names], np.int64)
        file_of, starts, stops = np.ascontiguousarray(spans.T)
        sorted_tags = sorted(self.tag_names)
        places = {old: place for place, old in enumerate(self.tag_names[each] for each in sorted_tags)}
        rows = [[places[each] for each in dict.fromkeys(tags[name])] for name in names]
        return Read(
            self.files,
            annotations,
            file_of,
            starts,
            stops,
            np.asarray([each for row in rows for each in row], np.int64),
            np.cumsum([len(row) for row in rows]),
            splits,
            index_files.Names.of([each.encode() for each in sorted_tags]),
            index_files.Names.of(
                [self.parted.encode("utf-8", "replace")] * bool(self.parted)
                + [f"{count} {what}".encode("utf-8", "replace") for what, count in sorted(self.notes.items())]
            ),
        )

    def _splits(self, names: Sequence[str]) -> np.ndarray:
        """Return the split of each image by its subset, or by the folders it lies in. They decide nothing unless some
        are of train and some of another split; then those of none are of train."""
        if not self.tool.has_subsets:
            return np.zeros(len(names), np.int64)
        called = [self.subsets.get(name) or _folder_of_split(name) for name in names]
        counts = Counter(called)
        split_of_subset = {each: _split_called(each) for each in counts}
        splits = {*split_of_subset.values()}
        if "train" not in splits or splits <= {"train", None}:
            for subset in self.subsets.values():
                self.notes[f"images of the subset {subset[:60]}, which decides no split"] += 1
            return np.zeros(len(names), np.int64)
        named = [f"{each[:60]} {counts[each]}" for each in sorted(counts) if split_of_subset[each]]
        self.parted = f"split by subset: {', '.join(named)}" + ", test validates" * ("val" not in splits)
        for subset, split in split_of_subset.items():
            if not split:
                said = f"the subset {subset[:60]}" if subset else "no subset"
                self.notes[f"images of {said}, which are for training"] += counts[subset]
        return np.asarray([_SPLITS.index(split_of_subset[each] or "train") for each in called], np.int64)


def _split_called(name: str) -> Split | None:
    return "test" if is_of_test(name) else split_of(name)


def _folder_of_split(image: str) -> str:
    """Return the first folder of a path that is called like a split, or nothing."""
    return next((each for each in image.split("/")[:-1] if _split_called(each)), "")


class ToolMasks(OutlineImages):
    """Images whose masks are drawn from the shapes of a tool, in the order of its file."""

    def __init__(self, tool: Tool, read: Located, split: Split, options: SourceOptions):
        self.tool = tool
        super().__init__(tool.kind, read.layout, split, read.annotations, options, str(read.place.labels))
        self.notes = read.notes
        self.exports = read.here.files
        self.file_of, self.starts, self.stops = (
            each[self.rows] for each in (read.here.file_of, read.here.starts, read.here.stops)
        )

    def outlines(self, index: int) -> Iterator[tuple[Any, int]]:
        file, start, stop = self.exports[self.file_of[index]], int(self.starts[index]), int(self.stops[index])
        numbers = dict(zip(self.annotations.classes, self.index_of.tolist(), strict=True))
        try:
            with open(file, "rb", opener=regular) as opened:
                opened.seek(start)
                found = self.tool.read(self.tool.value(opened.read(max(0, stop - start))), str(file))
        except OSError as error:
            raise BadSample(self.name(index), f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, WrongEntry):
            found = None
        numbers[IGNORE] = IGNORED
        if len(self.annotations.classes) == 1:
            numbers.setdefault(self.tool.nameless, int(self.index_of[0]))
        if found is None or {shape.label for shape in found.shapes} - numbers.keys():
            raise BadSample(self.name(index), f"{file} has changed since it was indexed; start again")
        for shape in found.shapes:
            yield shape.outline, numbers[shape.label]


def _labelled(tool: Tool, read: Located, split: Split, options: SourceOptions) -> TableSource:
    """Return the images of a split that have a label; with any number of labels each if one of train has several."""
    names = {each.decode(): number for number, each in enumerate(read.defining.tag_names.all())}
    mine = [each.decode() for each in read.here.tag_names.all()]
    read._check(set(mine) - set(names))
    is_multi_label = bool((np.diff(read.defining.tag_ends, prepend=0) > 1).any())
    counts = np.diff(read.here.tag_ends, prepend=0)
    rows = np.flatnonzero(counts)
    if not len(rows) and split == "test":
        raise no_test_split(tool.kind, f"none of the {len(counts)} images of {read.place.labels} has a label")
    if several := np.flatnonzero(counts > 1)[: 0 if is_multi_label else 1].tolist():
        name = read.here.annotations.names[several[0]]
        raise BadData(f"{name} has {counts[several[0]]} labels, each training image has one; remove the others")
    labels = np.asarray([names[each] for each in mine], np.int32)[read.here.tags]
    sizes = np.asarray([_bytes_of(read.place.images / read.here.annotations.names[row]) for row in rows.tolist()])
    missing = np.flatnonzero(sizes < 0)
    if len(missing) and not options.skips_missing:
        raise BadData(missing_images(tool.kind, read.place, read.here.annotations, rows[missing], options))
    files = Listed(read.here.annotations.names.take(rows), labels, np.cumsum(counts[rows]), sizes.astype(np.int64))
    held_out = None
    if read.layout.draws(split):
        groups = np.zeros(len(rows), np.int32) if is_multi_label else labels
        validates = validating(files.names.each(), groups, options, split)
        held_out = files.names.take(np.flatnonzero(validates))
        files = files.take(np.flatnonzero(validates == (split == "val")))
    if not is_multi_label:
        files = files.take(np.argsort(files.labels, kind="stable"))
    source = TableSource(read.place.images, tuple(names), files, is_multi_label)
    left_out = len(counts) - len(rows)
    source.notes = (*read.notes, *[f"{left_out} images without a label left out"] * bool(left_out))
    source.layout, source.held_out = read.layout, held_out
    return source


def _bytes_of(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except (OSError, ValueError):
        return -1
