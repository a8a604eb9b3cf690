"""`sightline check` for images with boxes: folders with annotations in files, or COCO's TFRecord shards.

Lists what a run leaves out by rule (boxes without an area or outside of their image) and what it refuses.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sightline.data.check.box_files import KINDS, is_published, of_source, read_files, read_json
from sightline.data.check.images import Look, Report, add_twins, how_chosen, how_read, same_bytes, spread
from sightline.data.decode import MAX_BYTES, decode_rgb, read_header
from sightline.data.formats.coco import (
    FAULTS,
    MAX_CATEGORY,
    MAX_ID,
    MAX_SIDE,
    MIN_ID,
    Image,
    Instances,
    faults,
)
from sightline.data.formats.records import MAX_RECORD_BYTES, parse_example, read_frame, scan_frames
from sightline.data.sources import DEFAULT_OPTIONS, BoxSource, SourceOptions, coco_tfrecord, kind_of_boxes, open_boxes
from sightline.data.sources.box_images import list_files
from sightline.data.sources.coco import find, places
from sightline.data.sources.layouts import IMAGES, NoTestSplit
from sightline.errors import BadData, BadSample, first_of
from sightline.files.regular import regular
from sightline.files.typed_json import short
from sightline.parts import Split
from sightline.terminal.progress import Progress

_SPLITS: tuple[Split, ...] = ("train", "val")
# Problems that a run refuses too when it opens the data.
_REFUSED = (
    *("cannot be opened", "unreadable entry", "duplicate id", "unknown image", "unknown category", "box not a number"),
    *("missing file", "categories differ", "two images of one label", "class without training"),
)
_EDGES = ("xmin", "ymin", "xmax", "ymax")


class SeenImage(NamedTuple):
    """An image: its size the right way up, a digest of its bytes, and why it cannot be read."""

    height: int
    width: int
    digest: bytes
    bad: str


class SeenRecord(NamedTuple):
    """A record: what it says of its image, (category, class name, crowd) of each box, and (kind, text) of problems."""

    image: Image
    boxes: list[tuple[int, str, bool]]
    problems: list[tuple[str, str]]
    seen: SeenImage


@dataclass
class SeenSplit:
    """One split, whichever form it has."""

    categories: dict[int, str]
    names: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    seen: list[SeenImage] = field(default_factory=list)
    boxes: list[list[tuple[int, bool]]] = field(default_factory=list)  # (category, crowd) of each image's boxes
    has_all_categories: bool = True  # records alone show those that have boxes
    extra: int = 0  # images beside these that are in no split, where that is not a problem
    read: dict[str, str] = field(default_factory=dict)  # facts of how it was chosen and read


def check_boxes(
    path: str,
    kind: str,
    classes: int,
    decode: bool,
    processes: int,
    progress: Progress,
    opens: Callable[[Split], object] | None = None,
    options: SourceOptions = DEFAULT_OPTIONS,
) -> Report:
    """Check all splits below `path`, read as `kind` says, e.g. auto or coco; `classes` is what the recipe declares, or
    0; `opens` opens a split as a run would."""
    report = Report()
    if kind == "synthetic" or path.startswith("synthetic:"):
        return report  # there are no files to check
    kind = kind_of_boxes(kind, path)
    look = Look(decode, processes, progress)
    every: dict[Split, SeenSplit] = {}
    if kind == "coco_tfrecord" or (kind == "coco" and is_published(path)):
        check_split = _check_shards if kind == "coco_tfrecord" else _check_folder
        splits = (*_SPLITS, "test") if _has_test(Path(path), kind) else _SPLITS
        for split in splits:
            if found := check_split(Path(path), split, report, look):
                every[split] = found
    elif kind in KINDS:
        every = _check_files_at(path, kind, report, look, options)
    else:
        every = _check_sources(path, kind, report, look, options)
    for split, found in every.items():
        _describe(split, found, report)
    _check_together(every, classes, path, report)
    for split in every:
        _check_opens(path, split, report, opens or partial(open_boxes, kind, path, options=options))
    return report


def _has_test(root: Path, kind: str) -> bool:
    """Return whether shards, or json files with COCO's own names, have a test split."""
    if kind == "coco_tfrecord":
        return bool(coco_tfrecord.shard_names(root, "test"))
    return find(root, "test") is not None


def _check_opens(path: str, split: Split, report: Report, opens: Callable[[Split], object]) -> None:
    """Report the error that a run would stop with, where nothing above has found its reason."""
    if any(problem.split == split and problem.kind in _REFUSED for problem in report.problems):
        return
    try:
        opens(split)
    except BadData as error:
        report.add("cannot be opened", split, path, str(error))


def _look_at(data: bytes, image: Image, decode: bool) -> SeenImage:
    digest = hashlib.blake2b(data, digest_size=16).digest()
    try:
        header = read_header(data, image.file)
        if (header.height, header.width) == (image.height, image.width):
            header = replace(header, orientation=1)  # annotated as it is stored: so it is trained on, too
        height, width, _ = decode_rgb(data, image.file, header).shape if decode else header.shape
    except BadSample as error:
        return SeenImage(0, 0, digest, error.reason)
    return SeenImage(height, width, digest, "")


# Folders with annotations in files.


def _find_json(root: Path, split: Split) -> tuple[Path, Path] | None:
    return next((pair for pair in places(root, split) if pair[0].is_file() or pair[1].is_dir()), None)


def _check_folder(root: Path, split: Split, report: Report, look: Look) -> SeenSplit | None:
    """Check a split under COCO's own names."""
    file, folder = _find_json(root, split) or places(root, split)[0]
    instances = read_json(file, split, report)
    if instances is None:
        return None
    if not folder.is_dir():
        report.add("cannot be opened", split, str(folder), "there is no such folder; expected the images in it")
        return None
    _check_extra(instances.images, folder, split, report)
    return _check_instances(instances, folder, split, report, look)


def _check_files_at(path: str, kind: str, report: Report, look: Look, options: SourceOptions) -> dict[Split, SeenSplit]:
    """Check data that may lie anywhere."""
    try:
        layout, read = read_files(path, kind, report, options, with_test=True)
    except BadData as error:
        report.add("cannot be opened", "train", path, str(error))
        return {}
    named = {os.path.normpath(layout.place(s).images / image.file) for s in read for image in read[s].images}
    every: dict[Split, SeenSplit] = {}
    for split, instances in read.items():
        folder = layout.place(split).images
        every[split] = _check_instances(instances, folder, split, report, look)
        there = list_files(folder, IMAGES).files
        every[split].read = how_chosen(split, layout.is_drawn, layout.other_val)
        every[split].extra = sum(os.path.normpath(folder / name) not in named for name in there)
    _check_training(read, ("test",) if layout.is_drawn else ("val", "test"), report)
    return every


def _check_training(read: Mapping[Split, Instances], others: tuple[Split, ...], report: Report) -> None:
    """Report classes that other splits have boxes of, but not train."""
    for split in others:
        if "train" in read and split in read:
            train, other = (Counter(read[each].labels.tolist()) for each in ("train", split))
            for number, name in read[split].categories.items():
                if other[number] and not train[number]:
                    text = f"{other[number]} boxes in {split}, none in train"
                    report.add("class without training", split, name, text)


def _check_sources(path: str, kind: str, report: Report, look: Look, options: SourceOptions) -> dict[Split, SeenSplit]:
    """Check the splits of a source that is not one of ours, by what it returns."""
    sources: dict[Split, BoxSource] = {}
    splits: tuple[Split, ...] = (*_SPLITS, "test")
    for split in splits:
        try:
            source = open_boxes(kind, path, split, replace(options, skips_missing=True))
        except NoTestSplit:
            continue
        except BadData as error:
            report.add("cannot be opened", split, path, str(error))
            continue
        if split != "test" or source.is_own_test(sources.get("val")):
            sources[split] = source
    read = {split: of_source(source, split, report) for split, source in sources.items()}
    every: dict[Split, SeenSplit] = {}
    for split, instances in read.items():
        names = [image.file for image in instances.images]
        every[split] = found = SeenSplit(instances.categories, names, instances.images)
        found.read = how_read(split, sources[split])
        found.seen = look.at(_look_at_samples, (sources[split], instances.images), len(names), split)
        found.boxes = _check_each_box(instances, names, split, report)
    _check_training(read, ("val", "test"), report)
    return every


def _check_instances(instances: Instances, folder: Path, split: Split, report: Report, look: Look) -> SeenSplit:
    """Check the images and boxes that the files of a split name."""
    _check_files(instances.images, folder, split, report)
    rows = [row for row, image in enumerate(instances.images) if os.path.isfile(folder / image.file)]
    there = [instances.images[row] for row in rows]
    found = SeenSplit(instances.categories, [f"{folder.name}/{image.file}" for image in there], there)
    found.seen = look.at(_look_at_files, (folder, there), len(there), split)
    names = [f"{folder.name}/{image.file}" for image in instances.images]
    boxes = _check_each_box(instances, names, split, report)
    found.boxes = [boxes[row] for row in rows]
    return found


def _check_each_box(
    instances: Instances, names: list[str], split: Split, report: Report
) -> list[list[tuple[int, bool]]]:
    """Report boxes that a run leaves out; return (category, crowd) of each image's boxes."""
    per_box = instances.faults()
    for box in np.flatnonzero(per_box).tolist():
        row = instances.rows[box]
        image = instances.images[row]
        sides = ", ".join(f"{number:g}" for number in instances.boxes[box])
        text = f"annotation {instances.ids[box]}: {sides} in {image.width}x{image.height}"
        report.add(f"box {FAULTS[per_box[box]]}", split, names[row], text)
    boxes: list[list[tuple[int, bool]]] = [[] for _ in instances.images]
    for row, label, crowd in zip(
        *(each.tolist() for each in (instances.rows, instances.labels, instances.crowd)), strict=True
    ):
        boxes[row].append((label, crowd))
    return boxes


def _check_files(images: list[Image], folder: Path, split: Split, report: Report) -> None:
    first: dict[str, int] = {}
    for image in images:
        if image.file in first:
            text = f"is image {first[image.file]} and image {image.id}"
            report.add("same file twice", split, f"{folder.name}/{image.file}", text)
        elif not os.path.isfile(folder / image.file):
            text = "a label without an image" if image.file.endswith(".txt") else f"image {image.id} is not there"
            report.add("missing file", split, f"{folder.name}/{image.file}", text)
        first.setdefault(image.file, image.id)


def _check_extra(images: list[Image], folder: Path, split: Split, report: Report) -> None:
    named = {image.file for image in images}
    for name in sorted(os.listdir(folder)):
        if name.lower().endswith(IMAGES) and not name.startswith(".") and name not in named:
            report.add("extra file", split, f"{folder.name}/{name}", "no entry of the json file names it")


def _look_at_files(shared: tuple[tuple[Path, list[Image]], bool], job: tuple[int, int]) -> list[SeenImage]:
    (folder, images), decode = shared
    return [_look_at_file(folder, image, decode) for image in images[slice(*job)]]


def _look_at_file(folder: Path, image: Image, decode: bool) -> SeenImage:
    path = folder / image.file
    try:
        if path.stat().st_size > MAX_BYTES:
            return SeenImage(0, 0, b"", f"{path.stat().st_size} bytes, more than the {MAX_BYTES} allowed for one image")
        with open(path, "rb", opener=regular) as opened:
            data = opened.read()
    except OSError as error:
        return SeenImage(0, 0, b"", error.strerror or type(error).__name__)
    return _look_at(data, image, decode)


def _look_at_samples(shared: tuple[tuple[BoxSource, list[Image]], bool], job: tuple[int, int]) -> list[SeenImage]:
    (source, images), decode = shared
    return [_look_at_sample(source, index, images[index], decode) for index in range(*job)]


def _look_at_sample(source: BoxSource, index: int, image: Image, decode: bool) -> SeenImage:
    try:
        data = source.image(index)
    except BadSample as error:
        return SeenImage(0, 0, b"", error.reason)
    if isinstance(data, bytes):
        return _look_at(data, image, decode)
    return SeenImage(data.shape[0], data.shape[1], hashlib.blake2b(data.tobytes(), digest_size=16).digest(), "")


# TFRecord shards.


def _check_shards(root: Path, split: Split, report: Report, look: Look) -> SeenSplit | None:
    shards = coco_tfrecord.shard_names(root, split)
    if not shards:
        report.add("cannot be opened", split, str(root), f"no {split}-00000-of-00032.tfrecord")
        return None
    names, count = [shard[0] for shard in shards], int(shards[0]["count"])
    for number in range(count):
        name = f"{split}-{number:05d}-of-{count:05d}.tfrecord"
        if name not in names:
            report.add("missing file", split, name, f"one of {count} shards is not there")
    places = [place for name in names for place in _frames(root / name, split, report)]
    records: list[SeenRecord] = look.at(_look_at_records, (root, places), len(places), split)
    file = coco_tfrecord.find_json(root, split)
    instances = read_json(file, split, report) if file is not None else None
    known = None if instances is None else instances.categories
    found = SeenSplit(dict(known or {}), has_all_categories=known is not None)
    first: dict[int, str] = {}
    for (name, offset), record in zip(places, records, strict=True):
        where = f"{name} at byte {offset}"
        if not record.seen.bad and record.image.id in first:
            report.add("duplicate id", split, where, f"image {record.image.id} is at {first[record.image.id]} too")
        first.setdefault(record.image.id, where)
        for kind, text in record.problems:
            report.add(kind, split, where, text)
        for category, title, _ in record.boxes:
            if known is not None and category not in known:
                report.add("unknown category", split, where, f"a box of class {category} ({title}), not in {file}")
            elif found.categories.setdefault(category, title) != title:
                text = f"class {category} is {title!r} here and {found.categories[category]!r} elsewhere"
                report.add("unknown category", split, where, text)
        found.names.append(where)
        found.images.append(record.image)
        found.seen.append(record.seen)
        found.boxes.append([(category, crowd) for category, _, crowd in record.boxes])
    return found


def _frames(path: Path, split: Split, report: Report) -> list[tuple[str, int]]:
    """Return (file, offset) of the records of a shard, up to where it is damaged."""
    places: list[tuple[str, int]] = []
    try:
        with open(path, "rb", opener=regular) as file:
            if os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    places.extend((path.name, offset) for offset, _ in scan_frames(mapped, path.name))
    except OSError as error:
        report.add("cannot be opened", split, path.name, error.strerror or type(error).__name__)
    except BadData as error:
        report.add("cannot be opened", split, path.name, str(error))
    return places


def _look_at_records(shared: tuple[tuple[Path, list[tuple[str, int]]], bool], job: tuple[int, int]) -> list[SeenRecord]:
    (root, places), decode = shared
    seen = []
    for name, offset in places[slice(*job)]:
        try:
            with open(root / name, "rb", opener=regular) as file:
                payload = read_frame(file, offset, MAX_RECORD_BYTES, name)
            seen.append(_look_at_record(parse_example(payload), name, decode))
        except (OSError, BadData) as error:
            nothing = Image(0, "", 0, 0)
            seen.append(SeenRecord(nothing, [], [], SeenImage(0, 0, b"", str(getattr(error, "reason", error)))))
    return seen


def _look_at_record(record: dict[str, Any], name: str, decode: bool) -> SeenRecord:
    def one(key: str, kind: type) -> Any:
        values = record.get(f"image/{key}", [])
        if len(values) != 1 or not isinstance(values[0], kind):
            raise BadData(f"image/{key} is {str(values)[:60]}, expected one value")
        return values[0]

    number = one("source_id", bytes)
    if not re.fullmatch(rb"-?\d{1,19}", number) or not MIN_ID <= int(number) <= MAX_ID:
        raise BadData(f"image/source_id is {number[:40]!r}, expected the number of the image")
    height, width = sides = [one(side, int) for side in ("height", "width")]
    if not all(1 <= side <= MAX_SIDE for side in sides):
        raise BadData(f"image/height and image/width are {height} and {width}, expected 1 to {MAX_SIDE}")
    image = Image(int(number), str(one("filename", bytes), "utf-8", "replace"), height, width)
    edges = [record.get(f"image/object/bbox/{edge}", []) for edge in _EDGES]
    labels, texts, crowd, area = (
        record.get(f"image/object/{key}", []) for key in ("class/label", "class/text", "is_crowd", "area")
    )
    lengths = {len(each) for each in (*edges, labels, texts, crowd, area)}
    if len(lengths) != 1 or not all(isinstance(value, float) for values in edges for value in values):
        raise BadData(f"lists of {sorted(lengths)} values for its boxes, expected as many of each")
    if not all(isinstance(label, int) and 0 <= label <= MAX_CATEGORY for label in labels):
        raise BadData(f"labels {short(labels)}, expected whole numbers from 0 to {MAX_CATEGORY}")
    xmin, ymin, xmax, ymax = shares = np.asarray(edges, np.float64)
    problems = []
    for box, fault in enumerate(faults(np.stack([xmin, ymin, xmax - xmin, ymax - ymin], 1), 1, 1).tolist()):
        if fault:
            left, top, right, bottom = shares[:, box]
            problems.append((f"box {FAULTS[fault]}", f"box {box}: {left:g}, {top:g} to {right:g}, {bottom:g}"))
    data = one("encoded", bytes)
    if record.get("image/key/sha256", [b""])[0] not in (b"", hashlib.sha256(data).hexdigest().encode()):
        problems.append(("wrong checksum", "the image does not have the sha256 in the record"))
    titles = [str(text, "utf-8", "replace") if isinstance(text, bytes) else "" for text in texts]
    boxes = [(int(label), title, bool(c)) for label, title, c in zip(labels, titles, crowd, strict=True)]
    return SeenRecord(image, boxes, problems, _look_at(data, image, decode))


# Both forms.


def _describe(split: Split, found: SeenSplit, report: Report) -> None:
    whole = [each for each in found.seen if not each.bad]
    boxes = Counter(category for each in found.boxes for category, _ in each)
    per_class = {name: boxes[number] for number, name in sorted(found.categories.items())}
    report.facts[split] = {
        "images": len(found.seen),
        "unreadable": len(found.seen) - len(whole),
        "without boxes": sum(not each for each in found.boxes),
        "classes": len(found.categories),
        "boxes": sum(boxes.values()),
        "crowds": sum(crowd for each in found.boxes for _, crowd in each),
        "boxes per image": spread([len(each) for each in found.boxes]),
        "classes without any": sum(count == 0 for count in per_class.values()),
        "width": spread([each.width for each in whole]),
        "height": spread([each.height for each in whole]),
        **same_bytes((name, each.digest) for name, each in zip(found.names, found.seen, strict=True)),
        "boxes per class": per_class,
    }
    report.facts[split] |= found.read
    if found.extra:
        report.facts[split]["in no split"] = found.extra
    if not found.seen:
        report.add("no images", split, split, "the split is empty")
    for name, image, seen in zip(found.names, found.images, found.seen, strict=True):
        if seen.bad:
            report.add("unreadable", split, name, seen.bad)
        elif (seen.height, seen.width) != (image.height, image.width):
            text = f"is {seen.width}x{seen.height}, its annotations are for {image.width}x{image.height}"
            report.add("size differs", split, name, text)


def _check_together(every: dict[Split, SeenSplit], classes: int, path: str, report: Report) -> None:
    """Compare val and test with train."""
    if "train" in every and "test" in every:
        _compare(every["train"], every["test"], "test", path, report)
    if not every.keys() >= {*_SPLITS}:
        return
    train, val = every["train"], every["val"]
    if classes and train.has_all_categories and classes != len(train.categories):
        text = f"{len(train.categories)} classes, the recipe declares {classes}"
        report.add("number of classes", "train", path, text)
    _compare(train, val, "val", path, report)


def _compare(train: SeenSplit, other: SeenSplit, split: Split, path: str, report: Report) -> None:
    """Report categories that differ from those of train, and images that are in train too."""
    differing = set(train.categories.items()) ^ set(other.categories.items())
    if not (train.has_all_categories and other.has_all_categories):
        differing = {(n, name) for n, name in differing if n in train.categories and n in other.categories}
    if differing:
        text = f"not those of train: {first_of([f'{n} {name}' for n, name in sorted(differing)])}"
        report.add("categories differ", split, path, text)
    in_train, in_other = ([*zip(found.names, found.seen, strict=True)] for found in (train, other))
    add_twins(in_train, in_other, report, split)
