"""Boxes, and outlines as masks, in COCO's json files: PATH/annotations/instances_train2017.json with
PATH/train2017/*.jpg as COCO is published, or files of any names. Images are in the order of their ids.

A json file belongs to the split that its name or its folder names (train.json, val/_annotations.coco.json); one alone
is split by the draw. Its images lie in the folder that has most of those it names first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions
from sightline.data.sources.annotations import Annotations, read_annotations
from sightline.data.sources.box_images import BoxImages, kind_described, open_split
from sightline.data.sources.index_files import Names
from sightline.data.sources.layouts import (
    NAMES,
    SPLITS,
    TEST,
    Place,
    Splits,
    is_description,
    no_test_split,
    read_description,
    subfolders,
)
from sightline.data.sources.outlines import CocoMasks, Outlined, read_outlined
from sightline.errors import BadData, UsageError, first_of
from sightline.files.regular import is_file, regular
from sightline.parts import Split

EXPECTED = "PATH/annotations/instances_{0}2017.json with PATH/{0}2017/*.jpg, or instances_{0}.json with {0}/"
PUBLISHED = "instances_{}2017.json"
_YEARS = ("2017", "")
_JSON_FOLDERS = ("annotations", "annotation", "labels")
_IMAGE_FOLDERS = ("images", "JPEGImages", "imgs", "img", "photos", "data")
_LISTS = re.compile(rb'"(?:images|annotations|categories)"\s*:\s*\[')
_ANNOTATION = re.compile(rb'"annotations"\s*:\s*\[\s*\{')
_BLOCK, _OVERLAP = 2**22, 2**10
_HEAD = 2**16  # bytes of a json file in which one of its lists begins
_OTHER_TASKS = {"captions", "keypoints", "panoptic", "stuff", "info"}  # in the names of COCO's other files
_MOST_JSONS = 100  # in one folder; more are files per image, of another format
_SAMPLED = 16  # names that decide about a folder
_DESCRIBE = (
    "name both in a description, e.g. `kind: coco`, `train: {images: photos, labels: train.json}`; "
    "docs/reference/data.md"
)
Read = Callable[[Path, Path], Annotations]  # (json file, folder of its index)


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the annotations of a split and list its images."""

    def read(file: Path, root: Path) -> Annotations:
        return options.once(("coco", file), lambda: read_annotations(file, root))

    layout, split, annotations = _located(path, split, read)
    return open_split("coco", layout, split, annotations, options)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> CocoMasks:
    """Read the annotations of a split, where their outlines are in the file, and list its images."""
    outlined: list[Outlined] = []

    def read(file: Path, root: Path) -> Annotations:
        outlined.append(options.once(("coco outlines", file), lambda: read_outlined(file, root)))
        return outlined[-1].annotations

    layout, split, annotations = _located(path, split, read)
    return CocoMasks(layout, split, next(each for each in outlined if each.annotations is annotations), options)


def _located(path: str, split: Split, read_file: Read) -> tuple[Splits, Split, Annotations]:
    """Return where the splits lie, which one this is (the test split may be val), and the annotations of its file."""
    files = Files.at(path)
    if split == "test" and files.test_validates:
        split = "val"
    if split not in (*files.jsons, "test") and (split == "train" or files.is_half_published):
        raise BadData(f"{path} has no {split} split of COCO; expected {EXPECTED.format(split)}")
    needed = [each for each in files.jsons if each in (split, "train") or each not in files.folders]
    read = {each: read_file(files.jsons[each], files.index_root(each)) for each in needed}
    test = _read_test(files, read_file, is_wanted=split == "test")
    annotations = (test if split == "test" else read.get(split)) or read["train"]
    if annotations is not read.get("train", annotations):
        annotations.check_classes(read["train"], str(files.file(split)), str(files.jsons["train"]))
    layout = files.layout({each: found.names for each, found in read.items()}, "val" if split == "test" else split)
    if files.test_validates:
        layout = replace(layout, test=layout.val)
    elif test is not None:
        layout = _with_test(layout, files, test, is_wanted=split == "test")
    return layout, split, annotations


def _read_test(files: Files, read_file: Read, is_wanted: bool) -> Annotations | None:
    """Read the annotations of the test split. Unless it is wanted, None without one, or if they cannot be read."""
    if not is_wanted and (files.test is None or files.test_validates):
        return None
    file = files.file("test")
    try:
        return read_file(file, files.index_root("test"))
    except BadData:
        if is_wanted:
            raise
        return None


def _with_test(layout: Splits, files: Files, test: Annotations, is_wanted: bool) -> Splits:
    """Add the place of the test split; unless it is wanted, its images may be missing."""
    try:
        return replace(layout, test=files.test_place(test.names))
    except BadData:
        if is_wanted:
            raise
        return layout


def detect(path: str) -> bool:
    """Return whether PATH is a json file or a description of some, or a folder with the annotations of a split."""
    if is_description(path):
        return kind_described(path) == "coco"
    try:
        return bool(Files.at(path).jsons)
    except UsageError:  # several that could be meant, which is said when they are opened
        return True
    except BadData:
        return False


def find(root: Path, split: Split) -> tuple[Path, Path] | None:
    """Return (annotations, folder of images) of a split under COCO's own names, if both are there."""
    return next((pair for pair in places(root, split) if os.path.isfile(pair[0]) and os.path.isdir(pair[1])), None)


def places(root: Path, split: Split) -> list[tuple[Path, Path]]:
    """Return where COCO's names have (annotations, folder of images) of a split: with its year, or without."""
    return [(root / "annotations" / f"instances_{split}{year}.json", root / f"{split}{year}") for year in _YEARS]


@dataclass(frozen=True)
class Files:
    """The json files of a dataset, and the folders of their images as far as they are known."""

    root: Path
    jsons: Mapping[Split, Path]  # of train and val
    folders: dict[Split, Path] = field(default_factory=dict)
    test: Path | None = None  # the json file of the test split, also if it validates
    no_test: str = ""

    @classmethod
    def at(cls, path: str) -> Files:
        """Find the files at a path; BadData if there are none, UsageError if several could be meant."""
        root = Path(path)
        if kind_described(path):
            return _described(path)
        if root.suffix.lower() == ".json" and os.path.isfile(root):
            folder = root.parent.parent if root.parent.name.lower() in _JSON_FOLDERS else root.parent
            if tool := _tool_of(root):
                raise BadData(f"{root} is a file of {tool}, not COCO's json; give its folder, {folder}")
            return cls(folder, {"train": root})
        published = {split: pair for split in SPLITS if (pair := find(root, split))}
        jsons: dict[Split, Path] = {split: pair[0] for split, pair in published.items()}
        folders = {split: pair[1] for split, pair in published.items()}
        if len(published) < len(SPLITS) and not any(name.endswith(".tfrecord") for name in _names(root)):
            jsons = _named(root) | jsons
        if not jsons:
            raise BadData(f"{path} holds no json file with images, annotations and categories, as COCO has them")
        if pair := find(root, "test"):
            folders["test"] = pair[1]
        test, no_test = (pair[0], "") if pair else _test_json(root)
        if test and test != jsons.get("val") and not _has_annotations(test):
            return cls(root, jsons, folders, no_test=f"{test} has no annotations")
        return cls(root, jsons, folders, test, no_test)

    @property
    def is_half_published(self) -> bool:
        """True for COCO's training set without its validation set."""
        return list(self.jsons) == ["train"] and self.jsons["train"].name == PUBLISHED.format("train")

    def file(self, split: Split) -> Path:
        """Return the json file of a split; NoTestSplit if that is missing."""
        if split != "test":
            return self.jsons[split]
        if self.test is None:
            raise no_test_split("coco", self.no_test)
        return self.test

    @property
    def test_validates(self) -> bool:
        """True if the json file of the test split is that of val, for want of another."""
        return self.test is not None and self.test == self.jsons.get("val")

    def test_place(self, names: Sequence[str] | Names) -> Place:
        """Return where the test split lies; `names` are those of its images."""
        return Place(self.folders.get("test") or self._image_folder("test", names), self.file("test"))

    def index_root(self, split: Split) -> Path:
        """Return the folder in which an index of the json file is kept."""
        folder = self.file(split).parent
        return self.root if folder == self.root / "annotations" else folder

    def layout(self, names: Mapping[Split, Sequence[str] | Names], wanted: Split = "train") -> Splits:
        """Return where all lies; `names` are those of the images, of splits whose folder is not known. If val is
        wanted, the images of train may be missing."""
        found: dict[Split, Place] = {}
        for split, file in self.jsons.items():
            try:
                found[split] = Place(self.folders.get(split) or self._image_folder(split, names[split]), file)
            except BadData:
                if split == "val" or wanted == "train":
                    raise
        if self.is_half_published:  # no val split is drawn where one has been published
            found["val"] = Place(*reversed(places(self.root, "val")[0]))
        return Splits("coco", found.get("train"), found.get("val"), no_test=self.no_test)

    def _image_folder(self, split: Split, names: Sequence[str] | Names) -> Path:
        """Return the folder that has most of some names; BadData if none has any."""
        step = max(1, len(names) // _SAMPLED)
        some = [names[at] for at in range(0, len(names), step)][:_SAMPLED]
        tried: list[Path] = []
        for folders in self._candidates(split):
            found = [sum(os.path.isfile(folder / name) for name in some) for folder in folders]
            if any(found):
                return folders[found.index(max(found))]
            tried += [folder for folder in folders if folder not in tried]
        is_published = self.file(split).name == PUBLISHED.format(split)
        raise BadData(
            f"{self.file(split)} names {len(names)} images ({', '.join(some[:2])} ...), none of them in "
            f"{first_of(tried)}; " + (f"unpack {split}2017.zip into {self.root}" if is_published else _DESCRIBE)
        )

    def _candidates(self, split: Split) -> Iterator[list[Path]]:
        """Yield folders that may hold the images: those that are called like the split, those that name none, and where
        there is none of the split's own, all. Both splits may number their images alike, so one that misses some must
        not be read from the other's folder."""
        own = list(self._of_split(split))
        yield own
        beside = self.file(split).parent
        below = {self.root / name: name for name in subfolders(self.root)}
        unnamed = [path for path, name in below.items() if split_of(name) is None and not is_of_test(name)]
        yield [*(self.root / name for name in _IMAGE_FOLDERS), self.root, beside, *unnamed]
        if not any(map(os.path.isdir, own)):
            yield [*below]

    def _of_split(self, split: Split) -> Iterator[Path]:
        """Yield folders that are called like a split, or lie with its json file in a folder of their own."""
        beside = self.file(split).parent
        if beside != self.root and beside.name.lower() not in _JSON_FOLDERS:
            yield from (beside, *(beside / name for name in _IMAGE_FOLDERS))
        is_own = is_of_test if split == "test" else lambda name: split_of(name) == split
        own = [name for name in subfolders(self.root) if is_own(name)]
        in_images = [name for name in subfolders(self.root / "images") if is_own(name)]
        if len(self.jsons) > 1 or is_own(self.file(split).name):  # else the file is of all splits
            yield from (self.root / name for name in own)
            yield from (self.root / name / "images" for name in own)
            yield from (self.root / "images" / name for name in in_images)


def _tool_of(file: Path) -> str:
    """Return the tool for labelling that wrote a json file; "" for COCO's and others."""
    from sightline.data.sources import labelme, labelstudio, via  # which import this

    tools = (each.TOOL for each in (labelme, labelstudio, via))
    return next((tool.title for tool in tools if tool.is_file_of(file)), "")


def split_of(name: str) -> Split | None:
    """Return the split that a name names by one of its words, e.g. instances_val2017; None if none or both."""
    words = re.findall("[a-z]+", name.lower())
    named = [split for split in SPLITS if any(word in NAMES[split] for word in words)]
    return named[0] if len(named) == 1 else None


def is_of_test(name: str) -> bool:
    """Return whether a name names the test split and no other, e.g. instances_test2017."""
    words = set(re.findall("[a-z]+", name.lower()))
    return not words.isdisjoint(TEST) and words.isdisjoint((*NAMES["train"], *NAMES["val"][:-1]))


def _test_json(root: Path) -> tuple[Path | None, str]:
    """Return the json file of the test split, or why several are none."""
    found: dict[bool, list[Path]] = {}
    below = [root / name for name in subfolders(root) if name.lower() in _JSON_FOLDERS or is_of_test(name)]
    for folder in [root, *below]:
        for name in _json_names(folder):
            if is_of_test(name) or (folder != root and is_of_test(folder.name) and split_of(name) is None):
                found.setdefault("instances" not in name.lower(), []).append(folder / name)
    first = found[min(found)] if found else []
    if len(first) > 1:
        listed = first_of([file.relative_to(root) for file in first])
        return None, f"{root} has {len(first)} json files that could be its test split: {listed}; {_DESCRIBE}"
    return (first[0] if first else None), ""


def _described(path: str) -> Files:
    layout = read_description(path)
    jsons: dict[Split, Path] = {}
    folders: dict[Split, Path] = {}
    splits: tuple[Split, ...] = (*SPLITS, "test")
    for split in splits:
        if place := getattr(layout, split):
            if place.labels is None or not os.path.isfile(place.labels):
                raise UsageError(f"{path}: labels of {split} is {place.labels}, expected a json file; {_DESCRIBE}")
            jsons[split], folders[split] = place.labels, place.images
    test = jsons.pop("test", None)
    return Files(Path(path).parent, jsons, folders, test)


def _named(root: Path) -> dict[Split, Path]:
    """Return the json files of a folder by their splits; one that names none is of `train`."""
    found: dict[Split | None, list[Path]] = {}
    below = [root / name for name in subfolders(root) if name.lower() in _JSON_FOLDERS or split_of(name)]
    for folder in [root, *below]:
        for name in _json_names(folder):
            split = split_of(name) or (split_of(folder.name) if folder != root else None)
            found.setdefault(split, []).append(folder / name)
    if "train" not in found and None in found:
        found["train"] = found[None]
    return {split: _best(found[split], split, root) for split in SPLITS if split in found}


def _best(files: list[Path], split: Split, root: Path) -> Path:
    """Return the one file of a split: that of the most usual name, then the one that holds boxes by its name."""
    ranked: dict[tuple[int, bool], list[Path]] = {}
    for file in files:
        words = re.findall("[a-z]+", f"{file.stem} {file.parent.name if file.parent != root else ''}".lower())
        rank = min((NAMES[split].index(word) for word in words if word in NAMES[split]), default=len(NAMES[split]))
        ranked.setdefault((rank, "instances" not in words), []).append(file)
    first = ranked[min(ranked)]
    if len(first) > 1:
        listed = first_of([file.relative_to(root) for file in first])
        raise UsageError(f"{root} has {len(first)} json files that could be its {split} split: {listed}; {_DESCRIBE}")
    return first[0]


def _json_names(folder: Path) -> list[str]:
    names = [name for name in _names(folder) if name.lower().endswith(".json")]
    names = [name for name in names if not _OTHER_TASKS & set(re.findall("[a-z]+", name.lower()))]
    return [name for name in names if _has_lists(folder / name)] if len(names) <= _MOST_JSONS else []


def _has_lists(file: Path) -> bool:
    if not is_file(file):
        return False
    try:
        with open(file, "rb", opener=regular) as opened:
            head = opened.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
            return head.startswith(b"{") and _LISTS.search(head) is not None  # a list is of Label Studio
    except OSError:
        return False


def _has_annotations(file: Path) -> bool:
    """Return whether a json file lists an annotation: those of images that others are to label have none."""
    try:
        with open(file, "rb", opener=regular) as opened:
            before = b""
            while block := opened.read(_BLOCK):
                if _ANNOTATION.search(before + block):
                    return True
                before = block[-_OVERLAP:]
    except OSError:  # said when it is read
        return True
    return False


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError:
        return []
