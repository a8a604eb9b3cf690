"""Boxes, and outlines as masks, as YOLO has them: a data.yaml with the folders of the images (or lists of them) and the
names of the classes, and a .txt file per image; also images/ and labels/ without a data.yaml.

Labels lie where images do, with `labels` instead of the last folder called `images`, or else beside the images. An
image without a label file, or with an empty one, has no objects. Images are in the order of their names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sightline.data.formats.coco import FAULTS, Image, Instances, Wrong, refuse
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files, spread
from sightline.data.sources.annotations import Annotations, kept_or_read, of_instances
from sightline.data.sources.box_images import UNKNOWN_SIDE, BoxImages, kind_described, list_files, open_split, sides_of
from sightline.data.sources.layouts import (
    IMAGES,
    NAMES,
    SPLITS,
    TEST,
    Place,
    Splits,
    has_subfolders,
    is_description,
    read_description,
    split_folders,
    test_folder,
)
from sightline.data.sources.outlines import OutlineImages
from sightline.errors import BadData, BadSample, UsageError, first_of
from sightline.files.plain_yaml import read_yaml
from sightline.files.regular import is_file, regular
from sightline.files.typed_json import short
from sightline.parts import Split

_MAX_LIST_BYTES = 2**28
CLASSES = "classes.txt"
_YAMLS = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
_MOST_YAMLS = 20  # of other names that are looked into
_MAX_CLASSES_BYTES = 2**20
_LOOKED_AT = 64  # labels that tell whether they are polygons
MAX_LABEL_BYTES = 16 * 2**20  # of one image: 400,000 boxes
MAX_CLASSES = 10_000  # where nothing names them
_BOX = 5  # columns
_LEAST_POLYGON = 7
_LARGEST = 1e9  # what is beyond is not a share of anything
_OVER = 0.5  # pixels: rounded shares put edges that far over the border; they are put on it


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the labels of a split and list its images."""
    layout, annotations = _located(path, split)
    return open_split("yolo", layout, split, annotations, options)


def open_masks(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> YoloMasks:
    """Read the labels of a split, which are polygons, and list its images."""
    layout, annotations = _located(path, split)
    labels = {pair.name: pair.label for pair in Pairs.at(layout, layout.place(split), refuse).pairs}
    return YoloMasks(layout, split, annotations, labels, options)


def _located(path: str, split: Split) -> tuple[Splits, Annotations]:
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


def _read(layout: Splits, place: Place) -> Annotations:
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
        are_anywhere=is_list,
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
    def at(cls, layout: Splits, place: Place, wrong: Wrong) -> Pairs:
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
            with open(file, "rb", opener=regular) as opened:
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
            pairs.append(Pair(name, image, label if is_file(label) else None))
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
        with open(file, "rb", opener=regular) as opened:
            data = opened.read(MAX_LABEL_BYTES + 1)
    except OSError as error:
        wrong("unreadable entry", str(file), f"cannot be read: {error.strerror}")
        return []
    return read_lines(data, str(file), classes, wrong)


class YoloMasks(OutlineImages):
    """Images whose outlines are the polygons of YOLO's labels, which lie over those of earlier lines."""

    def __init__(
        self,
        layout: Splits,
        split: Split,
        every: Annotations,
        labels: Mapping[str, Path | None],
        options: SourceOptions,
    ):
        place = layout.place(split)
        super().__init__("yolo", layout, split, every, options, str(place.labels or place.images))
        found = [labels.get(self.names[row]) for row in range(len(self))]
        self.labels = index_files.Names.of([os.fsencode(label.absolute()) if label else b"" for label in found])
        for index in spread(len(self), _LOOKED_AT):
            self._lines(index)

    def outlines(self, index: int) -> Iterator[tuple[Any, int]]:
        sides = self.size(index)[::-1]
        for line in self._lines(index):
            corners = np.asarray(line.polygon, np.float64).reshape(-1, 2) * sides
            yield [corners.ravel().tolist()], int(self.index_of[line.category])

    def _lines(self, index: int) -> list[Line]:
        """Read the label of an image; BadSample if it has boxes."""
        if not (file := self.labels[index]):
            return []
        try:
            with open(file, "rb", opener=regular) as opened:
                lines = read_lines(opened.read(MAX_LABEL_BYTES + 1), file, len(self.index_of), refuse)
        except OSError as error:
            raise BadSample(self.name(index), f"{file} cannot be read: {error.strerror}") from error
        if boxes := [number for number, line in enumerate(lines, 1) if not line.polygon]:
            expected = "expected its outline, class x1 y1 x2 y2 x3 y3 ...; a detection recipe takes boxes"
            raise BadSample(self.name(index), f"object {boxes[0]} of {file} is a box, {expected}")
        return lines


def detect(path: str) -> bool:
    """Return whether PATH is a data.yaml, or a folder with one, or with images/ and labels/*.txt."""
    if is_description(path):
        return kind_described(path) == "yolo" or _is_data(read_yaml(Path(path)))
    try:
        return _find_yaml(Path(path)) is not None or _pairs(Path(path)) is not None
    except BadData:  # a folder that cannot be read
        return False


def layout_at(path: str) -> Splits:
    """Return where the splits lie; BadData or UsageError if that cannot be told."""
    root = Path(path)
    if kind_described(path):
        layout = read_description(path)
        train, val = (place and _with_labels(place) for place in (layout.train, layout.val))
        if (first := train or val) and not layout.classes:
            layout = replace(layout, classes=_listed_classes(first.labels or root))
        if layout.test is None:
            return replace(layout, train=train, val=val)
        test, no_test = _test_of(lambda: _with_labels(layout.test or Place(root)))
        return replace(layout, train=train, val=val, test=test, no_test=no_test)
    if file := root if is_description(path) else _find_yaml(root):
        return _from_yaml(file)
    if layout_found := _pairs(root):
        return layout_found
    raise BadData(f"{path} has no data.yaml of YOLO and no images/ with labels/*.txt beside it; docs/reference/data.md")


def _test_of(find: Callable[[], Place]) -> tuple[Place | None, str]:
    """Return the place of a test split, or why it is none: no training needs it, and many files name one that is not
    there."""
    try:
        return find(), ""
    except BadData as error:
        return None, str(error)


def label_of(image: Path) -> Path:
    """Return the label file of an image that a list names: in labels/ instead of images/, or else beside it."""
    return next((folder for folder in _label_folders(image.parent) if os.path.isdir(folder)), image.parent) / (
        f"{image.stem}.txt"
    )


def _label_folders(images: Path) -> Iterator[Path]:
    """Yield the folder with `labels` instead of the last `images`."""
    parts = list(Path(os.path.abspath(images)).parts)
    for at in range(len(parts) - 1, 0, -1):
        if parts[at] == "images":
            yield Path(*parts[:at], "labels", *parts[at + 1 :])
            return


def _with_labels(place: Place) -> Place:
    """Return a place with the folder of its labels, if it does not say it."""
    if place.labels is not None:
        return place
    if os.path.isdir(place.images / "images") and os.path.isdir(place.images / "labels"):
        return Place(place.images / "images", place.images / "labels")
    expected = list(_label_folders(place.images))
    for folder in (*expected, place.images):
        if os.path.isdir(folder) and _has_labels(folder):
            return Place(place.images, folder)
    wanted = " or ".join(f"{folder}/*.txt" for folder in (*expected, place.images))
    raise BadData(f"{place.images} has no labels; expected {wanted}, one line `class cx cy w h` per object")


def _has_labels(folder: Path | None) -> bool:
    return folder is not None and any(os.path.basename(name) != CLASSES for name in list_files(folder, (".txt",)).files)


def _find_yaml(root: Path) -> Path | None:
    """Return the data.yaml of a folder, or its one YAML file with the same entries."""
    if not os.path.isdir(root):
        return None
    for name in _YAMLS:
        if is_file(root / name):
            try:
                if _is_data(read_yaml(root / name)):
                    return root / name
            except UsageError:  # said when it is opened
                return root / name
    others = [name for name in list_files(root, (".yaml", ".yml"), deep=False).files if name not in _YAMLS]
    found = []
    for name in others[:_MOST_YAMLS]:
        try:
            found += [root / name] if _is_data(read_yaml(root / name)) else []
        except UsageError:
            continue
    return found[0] if len(found) == 1 else None


def _is_data(values: dict[Any, Any]) -> bool:
    return "kind" not in values and "train" in values and ("names" in values or "nc" in values)


def _from_yaml(file: Path) -> Splits:
    values = read_yaml(file)
    if not _is_data(values):
        raise UsageError(f"{file} is not YOLO's data.yaml: expected train, val and names; docs/reference/data.md")
    places = {}
    keys = {split: next((name for name in NAMES[split] if values.get(name)), "") for split in SPLITS}
    for split, key in keys.items():
        if key:
            places[split] = _place(file, key, values[key], values.get("path"))
    if "train" not in places:
        raise BadData(f"{file}: train is empty, expected the folder of the training images")
    test, no_test = None, ""
    if key := next((name for name in TEST if values.get(name)), ""):
        find = partial(_place, file, key, values[key], values.get("path"))
        test, no_test = (places["val"], "") if keys["val"] == key else _test_of(find)
    return Splits("yolo", places["train"], places.get("val"), _class_names(file, values), test, no_test)


def _place(file: Path, key: str, text: Any, base: Any) -> Place:
    if not isinstance(text, str) or "\0" in text:
        raise BadData(
            f"{file}: {key} is {short(text)}, expected one path; list the images of several folders in a .txt file"
        )
    tried = list(dict.fromkeys(_candidates(file, text, base if isinstance(base, str) and "\0" not in base else "")))
    for path in tried:
        if os.path.isdir(path):
            return _with_labels(Place(path))
        if os.path.isfile(path) and path.suffix == ".txt":
            return Place(path.parent, path)
    raise BadData(
        f"{file}: {key} is {text}, found neither as a folder nor as a .txt list of images; tried "
        f"{first_of(tried)}; correct the file"
    )


def _candidates(file: Path, text: str, base: str) -> Iterator[Path]:
    """Yield paths that an entry may mean: from `path` or from the file; then, as both are often those of another
    machine and an export of Roboflow says ../train/images of what lies beside it, by their last folders."""
    here = file.parent
    for start in (here / base, here):
        yield Path(os.path.normpath(start / text))
    parts = [part for part in f"{base}/{text}".replace("\\", "/").split("/") if part not in ("", ".", "..")]
    for at in range(len(parts) - min(2, len(parts)) + 1):
        yield here.joinpath(*parts[at:])


def _class_names(file: Path, values: dict[Any, Any]) -> tuple[str, ...]:
    names, count = values.get("names"), values.get("nc")
    if isinstance(names, dict):
        if sorted(names, key=str) != sorted(range(len(names)), key=str):
            raise BadData(f"{file}: names are numbered {short(sorted(names, key=str))}, expected 0 to {len(names) - 1}")
        names = [names[number] for number in range(len(names))]
    if names is None:
        if count is not None and (type(count) is not int or not 1 <= count <= MAX_CLASSES):
            raise BadData(f"{file}: nc is {short(count)}, expected the number of classes, 1 to {MAX_CLASSES}")
        return ()
    if not isinstance(names, list) or not all(isinstance(n, str | int | float) and n != "" for n in names) or not names:
        raise BadData(f"{file}: names is {short(names)}, expected a list of names, or `0: name` pairs")
    if bools := [name for name in names if isinstance(name, bool)]:
        raise BadData(f"{file}: the name {bools[0]} was read as true or false; quote it, e.g. 'yes'")
    if any("\ud800" <= letter <= "\udfff" for name in names for letter in str(name)):
        raise BadData(f"{file}: names is {short(names)!a}, which holds half characters; write them out")
    if isinstance(count, int) and count != len(names):
        raise BadData(f"{file}: nc is {count}, but names has {len(names)}; correct one of them")
    return tuple(str(name) for name in names)


def _pairs(root: Path) -> Splits | None:
    """Return the layout of images/ and labels/ in a folder, or in its folders train/ and valid/."""
    test: Place | None = None
    if os.path.isdir(root / "images") and os.path.isdir(root / "labels"):
        splits = split_folders(root / "images")
        if "train" in splits:
            places = {split: Place(path, root / "labels" / path.name) for split, path in splits.items()}
            if path := test_folder(root / "images"):
                test = Place(path, root / "labels" / path.name)
        else:
            places = {"train": Place(root / "images", root / "labels")}
    else:
        whole = {s: f for s, f in split_folders(root).items() if has_subfolders(f, "images", "labels")}
        places = {split: Place(folder / "images", folder / "labels") for split, folder in whole.items()}
        if (folder := test_folder(root)) and has_subfolders(folder, "images", "labels"):
            test = Place(folder / "images", folder / "labels")
    labels = places["train"].labels if "train" in places else None
    if labels is None or not os.path.isdir(labels) or not _has_labels(labels):
        return _beside(root)
    no_test = ""
    if test and test != places.get("val") and not (os.path.isdir(test.labels or "") and _has_labels(test.labels)):
        no_test = f"{test.labels} has no labels of the images in {test.images}"
        test = None
    return Splits("yolo", places["train"], places.get("val"), _listed_classes(root), test, no_test)


def _beside(root: Path) -> Splits | None:
    """Return the layout of labels beside their images, if a classes.txt says that they are labels."""
    if not (classes := _listed_classes(root)):
        return None
    folders = split_folders(root) or {"train": root}
    places = {split: Place(folder, folder) for split, folder in folders.items() if _has_pair(folder)}
    if "train" not in places:
        return None
    folder = test_folder(root)
    test = Place(folder, folder) if folder and _has_pair(folder) else None
    return Splits("yolo", places["train"], places.get("val"), classes, test)


def _has_pair(folder: Path) -> bool:
    images, labels = (list_files(folder, suffixes, deep=False).files for suffixes in (IMAGES, (".txt",)))
    return not {os.path.splitext(name)[0] for name in images}.isdisjoint(os.path.splitext(name)[0] for name in labels)


def _listed_classes(root: Path) -> tuple[str, ...]:
    """Return the names in classes.txt, one per line; () if there is no such file."""
    for folder in (root, root / "labels", root / "labels" / "train", root / "train"):
        if not is_file(folder / CLASSES):
            continue
        try:
            with open(folder / CLASSES, "rb", opener=regular) as file:
                text = file.read(_MAX_CLASSES_BYTES).decode("utf-8-sig", "replace")
        except OSError as error:
            raise BadData(f"{folder / CLASSES} cannot be read: {error.strerror}") from error
        return tuple(name.strip() for name in text.splitlines() if name.strip())
    return ()


class Line(NamedTuple):
    """An object: the number of its class, its left, top, right and bottom edge as shares, and its outline."""

    category: int
    edges: tuple[float, float, float, float]
    polygon: tuple[float, ...] = ()  # x and y of its corners by turns; () of a box


def read_lines(data: bytes, name: str, classes: int, wrong: Wrong) -> list[Line]:
    """Read a label file: a line per object, `class cx cy w h` or a polygon, `class x1 y1 x2 y2 x3 y3 ...`, as shares of
    the image's sides. Lines that are reported to `wrong` are left out. `classes` is how many there are; 0 allows any.
    """
    if len(data) > MAX_LABEL_BYTES:
        wrong("unreadable entry", name, f"has more than the {MAX_LABEL_BYTES} bytes allowed for one label file")
        return []
    lines = []
    for number, line in enumerate(data.decode("utf-8-sig", "replace").splitlines(), 1):
        if not (words := line.split()):
            continue
        try:
            lines.append(_read_line(words, classes))
        except _WrongLine as error:
            wrong(error.kind, f"{name}:{number}", str(error))
    return lines


def in_pixels(lines: list[Line], height: int, width: int) -> np.ndarray:
    """Return x, y, width, height of each line's box in an image of this size, (n, 4) float64."""
    edges = np.asarray([line.edges for line in lines], np.float64).reshape(-1, 4) * (width, height, width, height)
    ends = np.asarray((width, height), np.float64)
    low, high = edges[:, :2], edges[:, 2:]
    low = np.where((low < 0) & (low >= -_OVER), 0, low)
    high = np.where((high > ends) & (high <= ends + _OVER), ends, high)
    extent = high - low
    # A sum that rounding puts over the border would count as outside.
    extent = np.where((high <= ends) & (low + extent > ends), np.nextafter(extent, 0), extent)
    return np.concatenate([low, extent], 1)


class _WrongLine(Exception):
    def __init__(self, text: str, kind: str = "unreadable entry"):
        super().__init__(text)
        self.kind = kind


def _read_line(words: list[str], classes: int) -> Line:
    is_polygon = len(words) >= _LEAST_POLYGON and len(words) % 2 == 1
    if len(words) != _BOX and not is_polygon:
        raise _WrongLine(f"{len(words)} values, expected class cx cy w h, or class and a polygon x1 y1 x2 y2 x3 y3 ...")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise _WrongLine(f"{short(' '.join(words))} is not a line of numbers") from None
    if not all(abs(number) <= _LARGEST for number in numbers):  # a NaN is not either
        raise _WrongLine(f"{short(' '.join(words))}, expected finite numbers", f"box {FAULTS[1]}")
    category, shares = numbers[0], numbers[1:]
    most = (classes or MAX_CLASSES) - 1
    if category != int(category) or not 0 <= category <= most:
        raise _WrongLine(f"class {words[0]}, expected a whole number from 0 to {most}", "unknown category")
    if is_polygon:
        across, down = shares[::2], shares[1::2]
        return Line(int(category), (min(across), min(down), max(across), max(down)), tuple(shares))
    x, y, wide, tall = shares
    return Line(int(category), (x - wide / 2, y - tall / 2, x + wide / 2, y + tall / 2))
