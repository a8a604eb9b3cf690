"""The two forms of `prepare coco`: folders with json files, and TFRecord shards as TensorFlow's originals have them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sightline.data.decode import MAX_BYTES, read_header
from sightline.data.formats.coco import Instances
from sightline.data.formats.records import encode_example, frame
from sightline.data.prepare.coco.files import Files
from sightline.data.writing.pieces import Written
from sightline.errors import BadSample
from sightline.files.whole import written_whole
from sightline.parts import Split

_FILES_PER_PIECE = 250  # of the folder form: a second of work or so, which is all a kill costs
_JSON_FILES = ("instances_train2017.json", "instances_val2017.json")


@dataclass(frozen=True)
class CocoDownload:
    """The files in --source, and the annotations that were read."""

    annotations: Files
    images: Mapping[Split, Files]
    instances: Mapping[Split, Instances]
    digests: Mapping[Split, str]  # of the json files


class _Coco:
    """The part that both forms share: json files are copied as they are, images are counted."""

    annotations_folder: str

    def __init__(self, out: Path, found: CocoDownload):
        self._out = out
        self.annotations = found.annotations
        self.images = dict(found.images)
        self.inputs = {split: [found.digests[split], files.fingerprint] for split, files in found.images.items()}
        self.counts = {"train": 0, "train with boxes": 0, "val": 0, "boxes left out": 0}
        for split, instances in found.instances.items():
            is_usable = instances.faults() == 0
            self.counts[split] = len(instances.images)
            self.counts["boxes left out"] += int((~is_usable).sum())
            if split == "train":
                self.counts["train with boxes"] = len(np.unique(instances.rows[is_usable]))

    @property
    def out(self) -> Path:
        return self._out

    def check(self) -> None:
        """Do nothing: names and numbers were checked while they were read."""

    def copy_annotations(self, number: int) -> Written:
        """Copy one of the json files to where readers of this form look for it."""
        name = _JSON_FILES[number]
        return Written([_copy(self.annotations, name, self.out, f"{self.annotations_folder}/{name}")], {})

    def annotation_bytes(self) -> int:
        return sum(self.annotations.sizes[name] for name in _JSON_FILES)


class CocoFolders(_Coco):
    """train2017/, val2017/ and annotations/: the images that the json files list, byte by byte."""

    annotations_folder = "annotations"

    def __init__(self, out: Path, found: CocoDownload):
        super().__init__(out, found)
        # Once each, where two entries share a file.
        self.names = {
            split: list(dict.fromkeys(i.file for i in each.images)) for split, each in found.instances.items()
        }

    def decided(self) -> dict[str, Any]:
        return {"form": "folder", "shards": None, "inputs": self.inputs}

    def pieces(self) -> dict[str, list[int]]:
        found = {"annotations": [1] * len(_JSON_FILES)}
        for split, names in self.names.items():
            found[split] = [len(names[at : at + _FILES_PER_PIECE]) for at in range(0, len(names), _FILES_PER_PIECE)]
        return found

    def room(self) -> int:
        images = sum(self.images[split].sizes[name] + 4096 for split, names in self.names.items() for name in names)
        return images + self.annotation_bytes()

    def write(self, part: str, number: int) -> Written:
        if part == "annotations":
            return self.copy_annotations(number)
        split: Split = "train" if part == "train" else "val"
        some = self.names[split][number * _FILES_PER_PIECE : (number + 1) * _FILES_PER_PIECE]
        return Written([_copy(self.images[split], name, self.out, f"{split}2017/{name}") for name in some], {})

    def finish(self, written: list[Written]) -> dict[str, int]:
        os.sync()  # 123,000 files in one go
        return self.counts


class _Table(NamedTuple):
    """The images of a split that get a record, and their boxes one after the other: small, to go to every process."""

    ids: np.ndarray
    sides: np.ndarray  # (images, 2): height, width
    files: list[str]
    ends: np.ndarray  # of each image's boxes
    boxes: np.ndarray  # (boxes, 5): x, y, width, height, area
    categories: np.ndarray
    crowd: np.ndarray


class CocoRecords(_Coco):
    """TFRecord shards. Images go round the shards in the order of the json file, counting those that get a record:
    of training only images with a box."""

    annotations_folder = "raw-data/annotations"

    def __init__(self, out: Path, found: CocoDownload, shards: Mapping[Split, int]):
        super().__init__(out, found)
        self.shards = dict(shards)
        self.categories = {number: name.encode() for number, name in found.instances["train"].categories.items()}
        self.tables = {split: _table(each, split == "train") for split, each in found.instances.items()}

    def decided(self) -> dict[str, Any]:
        return {"form": "tfrecord", "shards": self.shards, "inputs": self.inputs}

    def pieces(self) -> dict[str, list[int]]:
        found = {"annotations": [1] * len(_JSON_FILES)}
        for split, table in self.tables.items():
            shards = self.shards[split]
            found[split] = [len(range(number, len(table.ids), shards)) for number in range(shards)]
        return found

    def room(self) -> int:
        """Count 700 bytes of a record beside its image, and 50 for each box with its class name."""
        total = self.annotation_bytes()
        for split, table in self.tables.items():
            sizes = self.images[split].sizes
            total += sum(sizes[name] + 1024 for name in table.files) + 100 * len(table.boxes)
        return total

    def write(self, part: str, number: int) -> Written:
        if part == "annotations":
            return self.copy_annotations(number)
        split: Split = "train" if part == "train" else "val"
        path = f"{split}-{number:05d}-of-{self.shards[split]:05d}.tfrecord"
        with written_whole(self.out, path, durable=True) as out:
            for row in range(number, len(self.tables[split].ids), self.shards[split]):
                out.write(frame(self._example(split, row)))
            size = out.tell()
        return Written([(path, size)], {})

    def finish(self, written: list[Written]) -> dict[str, int]:
        return self.counts

    def _example(self, split: Split, row: int) -> bytes:
        """Encode the original's features, to the letter; width and height are the json file's, to which the boxes
        belong."""
        table, files = self.tables[split], self.images[split]
        file = table.files[row]
        data = _image(files, file)
        height, width = map(int, table.sides[row])
        some = slice(int(table.ends[row - 1]) if row else 0, int(table.ends[row]))
        x, y, wide, tall, area = table.boxes[some].T
        labels = table.categories[some].tolist()
        return encode_example(
            {
                "image/height": height,
                "image/width": width,
                "image/filename": file.encode(),
                "image/source_id": b"%d" % table.ids[row],
                "image/key/sha256": hashlib.sha256(data).hexdigest().encode(),
                "image/encoded": data,
                "image/format": read_header(data, files.place(file)).format.lower().encode(),
                "image/object/bbox/xmin": (x / width).tolist(),
                "image/object/bbox/xmax": ((x + wide) / width).tolist(),
                "image/object/bbox/ymin": (y / height).tolist(),
                "image/object/bbox/ymax": ((y + tall) / height).tolist(),
                "image/object/class/text": [self.categories[label] for label in labels],
                "image/object/class/label": labels,
                "image/object/is_crowd": table.crowd[some].tolist(),
                "image/object/area": area.tolist(),
            }
        )


def _table(found: Instances, only_with_boxes: bool) -> _Table:
    kept = np.flatnonzero(found.faults() == 0)
    counts = np.bincount(found.rows[kept], minlength=len(found.images))
    chosen = np.flatnonzero(counts) if only_with_boxes else np.arange(len(found.images))
    images = [found.images[row] for row in chosen.tolist()]
    order = kept[np.argsort(found.rows[kept], kind="stable")]
    return _Table(
        np.asarray([image.id for image in images], np.int64),
        np.asarray([(image.height, image.width) for image in images], np.int64).reshape(-1, 2),
        [image.file for image in images],
        np.cumsum(counts[chosen], dtype=np.int64),
        np.column_stack([found.boxes, found.area])[order],
        found.labels[order],
        found.crowd[order].astype(np.int64),
    )


def _image(files: Files, name: str) -> bytes:
    if files.sizes[name] > MAX_BYTES:
        raise BadSample(files.place(name), f"{files.sizes[name]} bytes, more than the {MAX_BYTES} allowed; shrink it")
    return b"".join(files.chunks(name))


def _copy(files: Files, name: str, out: Path, path: str) -> tuple[str, int]:
    with written_whole(out, path) as target:
        for chunk in _of_size(files, name):
            target.write(chunk)
        return path, target.tell()


def _of_size(files: Files, name: str) -> Iterator[bytes]:
    """Yield the parts of a file, which must not have grown or shrunk since it was listed."""
    size = 0
    for chunk in files.chunks(name):
        size += len(chunk)
        yield chunk
    if size != files.sizes[name]:
        raise BadSample(files.place(name), f"{size} bytes, {files.sizes[name]} when it was listed; it has changed")
