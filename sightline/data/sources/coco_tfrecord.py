"""COCO as the TensorFlow originals prepare it: PATH/train-00000-of-00256.tfrecord, PATH/val-00000-of-00032.tfrecord.

Boxes come from PATH/annotations or PATH/raw-data/annotations where the json of the split lies there: to the last digit,
so batches are those of the json form. Else from the records, which hold 32-bit shares and no boxes left out by rule.
"""

from __future__ import annotations

import math
import mmap
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from sightline.data.formats import records
from sightline.data.formats.coco import MAX_CATEGORY, MAX_ID, MAX_SIDE, MIN_ID
from sightline.data.sources import DEFAULT_OPTIONS, BoxSource, Objects, SourceOptions, index_files
from sightline.data.sources.annotations import Annotations, assembled, read_annotations
from sightline.data.sources.box_images import chosen
from sightline.data.sources.layouts import no_test_split
from sightline.data.sources.shards import INDEX_FILES, OpenFiles, Shard, list_folder, scan_records
from sightline.errors import BadData, BadSample
from sightline.files.regular import is_file
from sightline.parts import Split

_SPLITS: tuple[Split, ...] = ("train", "val")
_SHARD = re.compile(r"(?P<split>train|val)-(?P<number>\d{5})-of-(?P<count>\d{5})\.tfrecord")
_TEST_SHARD = re.compile(_SHARD.pattern.replace("train|val", "test"))
_ANNOTATIONS = ("annotations", "raw-data/annotations")
_SOURCE_ID, _FILENAME, _ENCODED = "image/source_id", "image/filename", "image/encoded"
_SIDES = ("image/height", "image/width")
_EDGES = tuple(f"image/object/bbox/{edge}" for edge in ("xmin", "xmax", "ymin", "ymax"))
_LABEL, _TEXT = "image/object/class/label", "image/object/class/text"
_AREA, _CROWD = "image/object/area", "image/object/is_crowd"
_SCANNED = frozenset((_SOURCE_ID, _FILENAME, *_SIDES, *_EDGES, _LABEL, _TEXT, _AREA, _CROWD))
_READ = frozenset((_SOURCE_ID, _ENCODED))
_COLUMNS = ("shard", "offset", "length")


def detect(path: str) -> bool:
    """Return whether PATH has files named like the shards of a split."""
    return any(_SHARD.fullmatch(name) for name in list_folder(Path(path)))


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> CocoTFRecordSource:
    """Index the shards of a split."""
    root = Path(path)
    shards = _find_shards(root, split)
    scanned, places = _scanned(root, split, shards)
    file = find_json(root, split)
    if file is not None:
        whole = read_annotations(file, root)
        missing = np.setdiff1d(scanned.image_ids, whole.image_ids)
        if len(missing):
            raise BadData(
                f"{shards[0].name} and the other shards hold image {missing[0]}, which {file} does not know "
                f"({len(missing)} such images); the annotations must be those the records were made from"
            )
        absent = np.setdiff1d(whole.image_ids, scanned.image_ids)
        if split != "train" and len(absent):
            raise BadData(
                f"{shards[0].name} and the other shards lack {len(absent)} of the {len(whole)} images of {file}, "
                f"the first one {absent[0]}; every image is evaluated: make the records again"
            )
        annotations = whole.of_images(np.searchsorted(whole.image_ids, scanned.image_ids))
    else:
        annotations = scanned
    annotations = _with_classes(annotations, root)
    kept = chosen(annotations, split, str(file or shards[0].path), "coco_tfrecord", options)
    rows = np.searchsorted(annotations.image_ids, kept.image_ids)
    return CocoTFRecordSource(shards, kept, {name: column[rows] for name, column in places.items()})


class CocoTFRecordSource(BoxSource):
    """Images in records; every read checks the record's checksums and its id against the index."""

    def __init__(self, shards: list[Shard], annotations: Annotations, places: dict[str, np.ndarray]):
        self.shards = shards
        self.annotations = annotations
        self.places = places
        self.classes = annotations.classes
        self.class_ids = tuple(annotations.class_ids.tolist())
        self.most_objects = int(annotations.counts.max(initial=0))
        self.room = places["length"]
        files = [(shard.name, shard.size) for shard in shards]
        self.fingerprint = index_files.digest("coco_tfrecord", 1, annotations.content(), files)
        self.files = [shard.path for shard in shards]
        self._open = OpenFiles(self.shards)

    def __len__(self) -> int:
        return len(self.annotations)

    def name(self, index: int) -> str:
        shard = self.shards[self.places["shard"][index]].name
        return f"{shard}:{self.annotations.names[index] or self.annotations.image_ids[index]}"

    def objects(self, index: int) -> Objects:
        return self.annotations.objects(index)

    def image(self, index: int) -> bytes:
        offset, name = int(self.places["offset"][index]), self.name(index)
        try:
            file = self._open.open(int(self.places["shard"][index]))
            payload = records.read_frame(file.descriptor, offset, records.MAX_RECORD_BYTES, name)
            found = records.peek_example(payload, 0, len(payload), _READ)
        except OSError as error:
            raise BadSample(name, f"cannot be read: {error.strerror}") from error
        except BadSample:
            raise
        except BadData as error:
            raise BadSample(name, f"record at byte {offset}: {error}") from error
        image_id, encoded = found.get(_SOURCE_ID), found.get(_ENCODED)
        if image_id != [str(self.annotations.image_ids[index]).encode()]:
            raise BadSample(
                name,
                f"record at byte {offset} is of another image than when the file was indexed; remove the {INDEX_FILES} "
                f"beside the data and start again",
            )
        if not encoded or len(encoded) != 1 or not isinstance(encoded[0], bytes):
            raise BadSample(name, f"record at byte {offset}: expected one image in {_ENCODED}; make it again")
        return encoded[0]


def find_json(root: Path, split: Split) -> Path | None:
    """Return the json file of a split, if it lies beside the records."""
    files = [root / folder / f"instances_{split}{year}.json" for folder in _ANNOTATIONS for year in ("2017", "")]
    return next((file for file in files if is_file(file)), None)


def _with_classes(annotations: Annotations, root: Path) -> Annotations:
    """Take the classes of the training json, of any json, or else of the records of both splits together."""
    file = find_json(root, "train") or find_json(root, "val")
    if file is not None:
        defining = [(str(file), read_annotations(file, root))]
    else:
        splits = [split for split in _SPLITS if shard_names(root, split)]
        defining = [(split, _scanned(root, split, _find_shards(root, split))[0]) for split in splits]
    known: dict[int, tuple[str, str]] = {}  # id -> name, where it was first seen
    for where, found in defining:
        for number, name in found.named_classes():
            known.setdefault(number, (name, where))
    for number, name in [pair for _, found in [*defining, ("", annotations)] for pair in found.named_classes()]:
        called, where = known.get(number, ("", ""))
        if called != name:
            raise BadData(
                f"{root}: category {number} is called {name!r}, in {where or file} {called or 'it is not there'!r}; "
                f"both splits need the same categories"
            )
    return annotations.of_classes({number: name for number, (name, _) in known.items()})


def shard_names(root: Path, split: Split) -> list[re.Match[str]]:
    """Return the names of the shards of a split, in order; `number` and `count` are groups of each."""
    shard = _TEST_SHARD if split == "test" else _SHARD
    matches = [match for name in list_folder(root) if (match := shard.fullmatch(name))]
    return [match for match in matches if match["split"] == split]


def _find_shards(root: Path, split: Split) -> list[Shard]:
    found = shard_names(root, split)
    if not found and split == "test":
        raise no_test_split("coco_tfrecord")
    if not found:
        raise BadData(f"{root} has no {split} split; expected PATH/{split}-00000-of-00032.tfrecord and others")
    count = int(found[0]["count"])
    for match in found:
        if int(match["count"]) != count or int(match["number"]) >= count:
            raise BadData(
                f"{root / match[0]} is not one of the {count} files that {found[0][0]} belongs to; move it away"
            )
    there = {int(match["number"]) for match in found}
    if len(there) < count:
        first = next(number for number in range(count) if number not in there)
        raise BadData(
            f"{root / f'{split}-{first:05d}-of-{count:05d}.tfrecord'} is missing; {len(there)} of {count} shards are "
            f"there: fetch or make the others"
        )
    return [Shard.at(root, root / match[0]) for match in found]


def _scanned(root: Path, split: Split, shards: list[Shard]) -> tuple[Annotations, dict[str, np.ndarray]]:
    """Return what the records say of themselves and where they lie, from an earlier run while no shard has changed."""
    key = index_files.digest("coco_tfrecord", 1, [(shard.name, shard.size, shard.changed_ns) for shard in shards])
    name = f"coco_tfrecord-{split}"
    kept = index_files.load(root, name, key)
    if kept is not None:
        try:
            places = {column: kept[column] for column in _COLUMNS}
            annotations = Annotations.loaded(kept)
            if all(len(column) == len(annotations) for column in places.values()) and _fit(places, shards):
                return annotations, places
        except (ValueError, KeyError, IndexError):
            kept = None
    is_settled = index_files.is_settled(shard.changed_ns for shard in shards)
    annotations, places = _Scan(shards).run()
    if is_settled:
        index_files.save(root, name, key, {**annotations.arrays(), **places})
    return annotations, places


def _fit(places: dict[str, np.ndarray], shards: list[Shard]) -> bool:
    sizes = np.asarray([shard.size for shard in shards], np.int64)
    shard, offset, length = (places[column] for column in _COLUMNS)
    return bool(np.all((shard >= 0) & (shard < len(shards)) & (offset >= 0) & (length >= 0))) and bool(
        np.all(length <= sizes[shard] - offset)
    )


class _Scan:
    """Collects what the records of a split say of themselves."""

    def __init__(self, shards: list[Shard]):
        self.shards = shards
        self.images: dict[int, tuple[int, int, bytes]] = {}
        self.places: dict[int, tuple[int, int, int]] = {}
        self.classes: dict[int, str] = {}
        self.image_of, self.categories, self.crowd = array("q"), array("q"), array("q")
        self.boxes, self.area = array("d"), array("d")

    def run(self) -> tuple[Annotations, dict[str, np.ndarray]]:
        scan_records(self.shards, self._add)
        if not self.images:
            raise BadData(f"{self.shards[0].path.parent}: {len(self.shards)} files and no record; make them again")
        annotations = assembled(
            self.images,
            self.classes,
            np.asarray(self.image_of, np.int64),
            np.asarray(self.boxes, np.float64),
            np.asarray(self.area, np.float64),
            np.asarray(self.crowd, np.int64),
            np.asarray(self.categories, np.int64),
        )
        rows = np.asarray([self.places[number] for number in annotations.image_ids.tolist()], np.int64)
        return annotations, {name: rows[:, column].copy() for column, name in enumerate(_COLUMNS)}

    def _add(self, number: int, shard: Shard, buffer: mmap.mmap, offset: int, length: int) -> None:
        start = offset + records.HEADER_BYTES
        where = f"{shard.name}: record at byte {offset}"
        try:
            found = records.peek_example(buffer, start, start + length, _SCANNED)
        except BadData as error:
            raise BadData(f"{where}: {error}; fetch or make the file again") from error
        identity, names = found.get(_SOURCE_ID) or [b""], found.get(_FILENAME) or [b""]
        text = identity[0] if isinstance(identity[0], bytes) else b""
        if not re.fullmatch(rb"-?\d{1,19}", text) or not MIN_ID <= int(text) <= MAX_ID:
            raise BadData(f"{where}: expected an image id as text in {_SOURCE_ID}, found {identity[0]!r:.80}")
        image_id = int(text)
        if image_id in self.images:
            raise BadData(f"{where}: image {image_id} stands in another record too; make the files again")
        sides = [found.get(key) for key in _SIDES]
        if not all(side and isinstance(side[0], int) and 1 <= side[0] <= MAX_SIDE for side in sides):
            raise BadData(f"{where}: image {image_id} has no size in {' and '.join(_SIDES)}; make the files again")
        height, width = (int(side[0]) for side in sides if side)
        name = names[0] if isinstance(names[0], bytes) else b""
        self.images[image_id] = (height, width, name[:4096])
        self.places[image_id] = (number, offset, length)
        self._add_objects(found, image_id, height, width, where)

    def _add_objects(
        self, found: dict[str, records.Values], image_id: int, height: int, width: int, where: str
    ) -> None:
        edges: list[list[Any]] = [list(found.get(key) or ()) for key in _EDGES]
        labels, texts, areas, crowds = ([*(found.get(key) or ())] for key in (_LABEL, _TEXT, _AREA, _CROWD))
        count = len(labels)
        if {len(column) for column in edges} != {count} or len(texts) not in (0, count):
            raise BadData(f"{where}: image {image_id} has {count} labels, but other numbers of edges or names")
        numbers = np.asarray(edges, object).ravel().tolist() + (areas if len(areas) == count else [])
        if not all(isinstance(label, int) and 0 <= label <= MAX_CATEGORY for label in labels) or not all(
            isinstance(number, float) and math.isfinite(number) for number in numbers
        ):
            raise BadData(f"{where}: image {image_id} has a box or a label that is not a number; make the files again")
        for row, label in enumerate(labels):
            text = texts[row] if texts else b""
            called = text.decode("utf-8", "replace") if isinstance(text, bytes) and text else f"class{label}"
            if self.classes.setdefault(label, called) != called:
                raise BadData(f"{where}: category {label} is called {called!r} and {self.classes[label]!r}")
        xmin, xmax, ymin, ymax = np.asarray(edges, np.float64)
        x, wide = _inside(xmin * width, xmax * width, width)
        y, tall = _inside(ymin * height, ymax * height, height)
        self.image_of.extend([image_id] * count)
        self.categories.extend(labels)
        self.boxes.extend(np.stack([x, y, wide, tall], 1).ravel().tolist())
        self.area.extend(areas if len(areas) == count else (wide * tall).tolist())
        self.crowd.extend([int(each == 1) for each in crowds] if len(crowds) == count else [0] * count)


def _inside(low: np.ndarray, high: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and extent; shares in 32 bits must not push over the edge what touches it."""
    extent = np.minimum(high, length) - low
    over = low + extent > length
    return low, np.where(over, np.nextafter(extent, 0), extent)
