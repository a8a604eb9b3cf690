"""Boxes in Pascal VOC's xml files: PATH/Annotations/*.xml with PATH/JPEGImages/*.jpg, split by PATH/ImageSets/Main; or
xml files beside the images or in a folder of their own, also below train/ and valid/.

Files count pixels from 1, as VOC does, and name the last pixel: x is xmin - 1, the width xmax - xmin + 1. If any xmin
or ymin of a dataset is below 1, its files count from 0 and name edges: x is xmin, the width xmax - xmin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.parsers import expat

import numpy as np

from sightline.data.formats.coco import FAULTS, MAX_SIDE, Image, Instances, Wrong, refuse
from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, kept_or_read, of_instances
from sightline.data.sources.box_images import BoxImages, kind_described, list_files, open_split, sides_of
from sightline.data.sources.layouts import (
    IMAGES,
    NAMES,
    SPLITS,
    TEST,
    Place,
    Splits,
    is_folder,
    read_description,
    split_folders,
    subfolders,
    test_folder,
    with_labels_beside,
)
from sightline.errors import BadData, first_of
from sightline.files.regular import is_file, regular
from sightline.files.typed_json import short
from sightline.parts import Split

_XML_FOLDERS = ("Annotations", "annotations", "xmls", "xml", "labels", "")
_IMAGE_FOLDERS = ("JPEGImages", "images", "imgs", "img", "")
_LISTS = Path("ImageSets", "Main")
_YEAR = re.compile(r"VOC\d+")
_LOOKED_AT = 1000  # entries of a folder in which one ends in .xml
_MAX_LIST_BYTES = 2**28
_MAX_FIRST_BYTES = 2**16
MAX_XML_BYTES = 4 * 2**20  # of one image: 10,000 objects
_LARGEST = 1e9  # pixels
_MAX_TEXT = 1000  # letters of a name
_EDGES = ("xmin", "ymin", "xmax", "ymax")


def detect(path: str) -> bool:
    """Return whether PATH is a description of such data, or a folder with xml files in one of the places above."""
    return kind_described(path) == "voc" or _find(Path(path)) is not None


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the xml files of both splits, because they count pixels and classes alike, and list the images of one."""
    layout = layout_at(path)
    test = layout.place("test") if split == "test" else None
    read = {each: _read(place) for each in SPLITS if (place := getattr(layout, each))}
    here = _read(test) if test else read.get("train" if layout.is_drawn else split)
    if here is None:
        raise BadData(f"{path} has no {split} split of xml files; docs/reference/data.md shows the layouts")
    classes = read.get("train", here).classes
    if unknown := sorted(set(here.classes) - set(classes)):
        raise BadData(
            f"{layout.place(split).labels} has objects of classes that train lacks: {first_of(unknown)}; add "
            "training images of them, or remove these objects"
        )
    boxes = here.boxes.reshape(-1, 4) + _shift([found.boxes.reshape(-1, 4) for found in read.values()])
    counted = replace(here.renumbered(classes), boxes=boxes.ravel(), area=boxes[:, 2] * boxes[:, 3])
    return open_split("voc", layout, split, counted, options)


def counted_alike(read: Mapping[Split, Instances]) -> dict[Split, Instances]:
    """Return the splits of a dataset with pixels and classes counted alike: pixels as train and val count them."""
    shift = _shift([found.boxes for split, found in read.items() if split != "test"])
    classes = dict(enumerate(sorted({name for found in read.values() for name in found.categories.values()}), 1))
    numbers = {name: number for number, name in classes.items()}
    counted = {}
    for split, found in read.items():
        boxes = found.boxes + shift
        labels = np.asarray([numbers[found.categories[label]] for label in found.labels.tolist()], np.int64)
        counted[split] = replace(
            found,
            categories=classes,
            labels=labels,
            boxes=boxes,
            area=boxes[:, 2] * boxes[:, 3],
        )
    return counted


def _shift(boxes: Sequence[np.ndarray]) -> np.ndarray:
    """Return what to add to x, y, width, height of these data, which were read as edges that count from 0."""
    from_zero = any(bool(((each[:, :2] >= 0) & (each[:, :2] < 1)).any()) for each in boxes)
    return np.zeros(4) if from_zero else np.asarray([-1.0, -1.0, 1.0, 1.0])


def layout_at(path: str) -> Splits:
    """Return where the splits lie; BadData if there are none."""
    if kind_described(path):
        return with_labels_beside(read_description(path))
    layout_found = _find(Path(path))
    if layout_found is None:
        raise BadData(
            f"{path} has no xml files of Pascal VOC; expected Annotations/*.xml with JPEGImages/, or both in train/ "
            "and valid/"
        )
    return layout_found


def _find(path: Path) -> Splits | None:
    devkits = [kit / name for kit in (path, path / "VOCdevkit") for name in subfolders(kit) if _YEAR.fullmatch(name)]
    for root in (path, *devkits[:1]) if len(devkits) == 1 else (path,):
        if (place := _place(root)) is None:
            continue
        lists = _split_lists(root / _LISTS)
        if lists and place.labels == root / "Annotations":
            listed = {split: Place(place.images, file) for split, file in lists.items()}
            return _with_test_list(Splits("voc", listed.get("train"), listed.get("val")), place, root / _LISTS)
        folders = split_folders(place.labels or root)
        inner = {split: Place(_same(place.images, f), f) for split, f in folders.items() if _has_xml(f)}
        if "train" not in inner:
            return Splits("voc", place, None)
        folder = test_folder(place.labels or root)
        test = Place(_same(place.images, folder), folder) if folder and _has_xml(folder) else None
        return Splits("voc", inner.get("train"), inner.get("val"), test=test)
    places = {split: found for split, folder in split_folders(path).items() if (found := _place(folder))}
    folder = test_folder(path)
    return (
        Splits("voc", places.get("train"), places.get("val"), test=_place(folder) if folder else None)
        if places
        else None
    )


def _with_test_list(layout: Splits, place: Place, lists: Path) -> Splits:
    """Add the split of a list called test, if any of its images has an annotation: those of a contest have none."""
    file = next((lists / f"{name}.txt" for name in TEST if is_file(lists / f"{name}.txt")), None)
    if file is None or place.labels is None:
        return layout
    test = Place(place.images, file)
    if test != layout.val and not any((place.labels / f"{name}.xml").is_file() for name in _first_names(file)):
        return replace(layout, no_test=f"none of the images that {file} names has an annotation")
    return replace(layout, test=test)


def _first_names(file: Path) -> list[str]:
    """Return the names in the first lines of a list; none if it cannot be read, which reading all of it reports."""
    try:
        with open(file, "rb", opener=regular) as opened:
            lines = opened.read(_MAX_FIRST_BYTES).decode("utf-8-sig", "surrogateescape").splitlines()
    except OSError:
        return []
    return [name for line in lines if line.strip() for name in dict.fromkeys((line.strip(), line.split()[0]))]


def _same(images: Path, folder: Path) -> Path:
    """Return the folder of images that is called like a folder of xml files, or the one above."""
    return images / folder.name if os.path.isdir(images / folder.name) else images


def _place(root: Path) -> Place | None:
    """Return the folder of the xml files of a folder with that of their images."""
    for name in _XML_FOLDERS:
        folder = root / name
        if _has_xml(folder) or (name and any(map(_has_xml, split_folders(folder).values()))):
            images = (root / each for each in _IMAGE_FOLDERS)
            return Place(next(each for each in images if os.path.isdir(each)), folder)
    return None


def _has_xml(folder: Path) -> bool:
    """Return whether one of the first entries of a folder is an xml file."""
    try:
        entries = [entry for entry, _ in zip(os.scandir(folder), range(_LOOKED_AT), strict=False)]
    except OSError:
        return False
    return any(e.name.lower().endswith(".xml") and not e.name.startswith(".") and not is_folder(e) for e in entries)


def _split_lists(folder: Path) -> dict[Split, Path]:
    """Return the lists of ImageSets/Main by their splits; trainval alone is all of the data."""
    found: dict[Split, Path] = {}
    for split in SPLITS:
        files = [folder / f"{name}.txt" for name in NAMES[split]]
        if file := next((file for file in files if is_file(file)), None):
            found[split] = file
    if "train" not in found and is_file(folder / "trainval.txt"):
        found["train"] = folder / "trainval.txt"
    return found


def _read(place: Place) -> Annotations:
    """Read the xml files of a place, or what an earlier run kept if no file has changed."""
    files = XmlFiles.at(place)
    return kept_or_read(
        files.folder,
        f"voc-{files.name}",
        index_files.digest("voc", 1, files.key),
        files.changed_ns,
        lambda: of_instances(read_instances(files, refuse)),
    )


@dataclass(frozen=True)
class XmlFiles:
    """The xml files of a place, and the images beside them."""

    folder: Path
    names: list[str]
    images: Path
    by_stem: Mapping[str, list[str]]  # paths of images from their folder
    name: str  # of the list, if there is one
    key: list[object]  # changes with any of the files
    changed_ns: list[int]

    @classmethod
    def at(cls, place: Place) -> XmlFiles:
        """List the files; BadData if a list names others."""
        listed = place.labels if place.labels and os.path.isfile(place.labels) else None
        folder = listed.parents[2] / "Annotations" if listed else place.labels or place.images
        xmls = list_files(folder, (".xml",), deep=False)
        images = list_files(place.images, IMAGES)
        names = list(xmls.files) if listed is None else list(_named(listed, xmls.files))
        by_stem: dict[str, list[str]] = {}
        for name in images.files:
            by_stem.setdefault(os.path.splitext(os.path.basename(name))[0], []).append(name)
        changed = [*xmls.changed_ns(), *images.changed_ns()]
        key: list[object] = [os.path.relpath(place.images, folder), xmls.key(), images.key(), names]
        return cls(folder, names, place.images, by_stem, listed.stem if listed else "all", key, changed)


def _named(file: Path, there: Mapping[str, object]) -> Iterator[str]:
    """Yield the xml files that a list of ImageSets/Main names, sorted."""
    try:
        with open(file, "rb", opener=regular) as opened:
            text = opened.read(_MAX_LIST_BYTES).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise BadData(f"{file} cannot be read: {error.strerror}") from error
    lines = sorted({line.strip() for line in text.splitlines() if line.strip()})
    # A class's own list has 1 or -1 behind the name.
    names = [f"{line}.xml" if f"{line}.xml" in there else f"{line.split()[0]}.xml" for line in lines]
    if missing := [name for name in names if name not in there]:
        raise BadData(
            f"{file} names {len(missing)} of {len(names)} images without an annotation, the first one "
            f"{file.parents[2] / 'Annotations' / missing[0]}; add the files or remove the lines"
        )
    if not names:
        raise BadData(f"{file} names no images, expected one name per line")
    yield from dict.fromkeys(names)


def read_instances(files: XmlFiles, wrong: Wrong) -> Instances:
    """Read all files; what is reported to `wrong` is left out. Boxes are edges that count from 0, as if written so."""
    images: list[Image] = []
    rows: list[int] = []
    names: list[str] = []
    boxes: list[tuple[float, float, float, float]] = []
    crowd: list[bool] = []
    progress = index_files.ScanProgress(str(files.folder), len(files.names), "xml files")
    for number, name in enumerate(files.names):
        progress(number)
        found = _annotation(files.folder / name, wrong)
        if found is None or (file := _image_of(files, name, found, wrong)) is None:
            continue
        sides = (found.height, found.width)
        height, width = sides if all(sides) else sides_of(files.images / file)
        rows += [len(images)] * len(found.boxes)
        images.append(Image(number + 1, file, height, width))
        names += [box.name for box in found.boxes]
        boxes += [(x, y, right - x, bottom - y) for _, (x, y, right, bottom), _ in found.boxes]
        crowd += [box.is_difficult for box in found.boxes]
    numbers = {name: number for number, name in enumerate(sorted(set(names)), 1)}
    sizes = np.asarray(boxes, np.float64).reshape(-1, 4)
    return Instances(
        images,
        {number: name for name, number in numbers.items()},
        np.arange(1, len(names) + 1),
        np.asarray(rows, np.int64),
        np.asarray([numbers[name] for name in names], np.int64),
        sizes,
        np.zeros(len(sizes)),  # until pixels are counted alike
        np.asarray(crowd, bool),
    )


def _annotation(file: Path, wrong: Wrong) -> Annotation | None:
    try:
        with open(file, "rb", opener=regular) as opened:
            return read_annotation(opened.read(MAX_XML_BYTES + 1), str(file), wrong)
    except OSError as error:
        wrong("unreadable entry", str(file), f"cannot be read: {error.strerror}")
    except BadData as error:
        wrong("unreadable entry", str(file), str(error).removeprefix(f"{file} "))
    return None


def _image_of(files: XmlFiles, name: str, found: Annotation, wrong: Wrong) -> str | None:
    """Return the image of an xml file: that of the same name, or else the one it names; it may be missing."""
    stem = os.path.splitext(name)[0]
    named = os.path.basename(found.file.replace("\\", "/"))
    same = files.by_stem.get(stem, [])
    if len(same) > 1:
        same = [image for image in same if os.path.basename(image) == named] or same
    if len(same) > 1:
        text = f"could be of {' and '.join(same[:3])}, and names {named or 'no image'}; rename one of them"
        wrong("two images of one label", str(files.folder / name), text)
        return None
    return same[0] if same else _named_image(files, named) or f"{stem}.jpg"


def _named_image(files: XmlFiles, named: str) -> str:
    """Return the image of this name in any folder, or the name itself if there is none."""
    there = files.by_stem.get(os.path.splitext(named)[0], [])
    return next((image for image in there if os.path.basename(image) == named), named)


class Box(NamedTuple):
    """An object: its class and its edges, as written."""

    name: str
    edges: tuple[float, float, float, float]  # left, top, right, bottom
    is_difficult: bool


@dataclass
class Annotation:
    """One image as its file describes it; a size of 0 is unknown."""

    file: str
    height: int = 0
    width: int = 0
    boxes: list[Box] = field(default_factory=list)


def read_annotation(data: bytes, name: str, wrong: Wrong) -> Annotation:
    """Read a file; objects that are reported to `wrong` are left out. Raises BadData if it is not of this form."""
    if len(data) > MAX_XML_BYTES:
        raise BadData(f"{name} has more than the {MAX_XML_BYTES} bytes allowed for one annotation file")
    reading = _Reading(name)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = reading.refuse
    parser.EntityDeclHandler = reading.refuse
    parser.StartElementHandler = reading.start
    parser.EndElementHandler = reading.end
    parser.CharacterDataHandler = reading.text
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # the latter two: an unknown encoding
        raise BadData(f"{name} is not a whole XML file: {error}; fetch or write it again") from error
    if reading.root != "annotation":
        raise BadData(f"{name} holds <{reading.root[:60]}>, expected <annotation> as Pascal VOC has it")
    found = Annotation(reading.values.get("filename", "").strip())
    found.height, found.width = (_side(reading.values.get(f"size/{side}", "")) for side in ("height", "width"))
    for number, values in enumerate(reading.objects, 1):
        try:
            found.boxes.append(_box(values))
        except _WrongObject as error:
            wrong(error.kind, f"{name}: object {number}", str(error))
    return found


class _WrongObject(Exception):
    def __init__(self, text: str, kind: str = "unreadable entry"):
        super().__init__(text)
        self.kind = kind


class _Reading:
    """The texts of a file by their paths below <annotation>, those of each <object> apart.

    Document types and entities are refused, so that nothing is expanded or fetched; nesting takes no recursion.
    """

    def __init__(self, name: str):
        self.name = name
        self.root = ""
        self.values: dict[str, str] = {}
        self.objects: list[dict[str, str]] = []
        self._path: list[str] = []

    def refuse(self, *_: Any) -> None:
        raise BadData(
            f"{self.name} declares a document type or an entity, which is not read; remove its <!DOCTYPE ...>"
        )

    def start(self, tag: str, _: dict[str, str]) -> None:
        if not self._path:
            self.root = tag
        self._path.append(tag)
        if len(self._path) == 2 and tag == "object":
            self.objects.append({})

    def end(self, _: str) -> None:
        self._path.pop()

    def text(self, text: str) -> None:
        is_object = len(self._path) > 1 and self._path[1] == "object"
        above = 2 if is_object else 1
        if above < len(self._path) <= above + 2:
            values = self.objects[-1] if is_object else self.values
            key = "/".join(self._path[above:])
            values[key] = (values.get(key, "") + text)[:_MAX_TEXT]


def _side(text: str) -> int:
    number = _number(text)
    return int(number) if number is not None and 1 <= number <= MAX_SIDE and number == int(number) else 0


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _box(values: dict[str, str]) -> Box:
    name = " ".join(values.get("name", "").split())
    if not name:
        raise _WrongObject("has no <name>, expected its class")
    numbers = {edge: _number(values.get(f"bndbox/{edge}", "")) for edge in _EDGES}
    for edge, number in numbers.items():
        if number is None:
            text = short(values.get(f"bndbox/{edge}", "").strip())
            raise _WrongObject(f"{short(name)} has {edge} {text}, expected a number of pixels")
        if not abs(number) <= _LARGEST:
            raise _WrongObject(f"{short(name)} has {edge} {number}, expected a finite number", f"box {FAULTS[1]}")
    left, top, right, bottom = (float(number or 0) for number in numbers.values())
    return Box(name, (left, top, right, bottom), values.get("difficult", "").strip() == "1")
