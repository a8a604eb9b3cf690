"""Images with boxes of any layout as `prepare coco` takes them: the files of both splits, and json files written for
them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sightline.data.check.box_files import read_files
from sightline.data.check.images import Report
from sightline.data.formats.coco import Instances
from sightline.data.prepare.coco.files import FolderFiles
from sightline.data.prepare.coco.writing import CocoDownload
from sightline.data.sources import kind_of_boxes
from sightline.errors import BadData, UsageError
from sightline.files.archive import clean_name
from sightline.parts import Split

_READ = ("coco", "voc", "yolo")


def own_data(path: str) -> CocoDownload:
    """Read the annotations of both splits; BadData if anything is wrong with them, or an image is missing."""
    kind = kind_of_boxes("auto", path)
    if kind not in _READ:
        raise UsageError(
            f"{path} holds {kind} data, which stay as they are; give COCO's zips, or json, YOLO or VOC files"
        )
    report = Report()
    layout, read = read_files(path, kind, report)
    if report.problems:
        first = report.problems[0]
        raise BadData(
            f"{first.where}: {first.text}; {len(report.problems)} problems in all, which `sightline check` lists: fix "
            "them and start again"
        )
    if len(read) < 2:
        raise BadData(f"{path} has no {'val' if 'train' in read else 'train'} split; both are needed")
    files: dict[Split, ListedFiles] = {s: ListedFiles(layout.place(s).images, found) for s, found in read.items()}
    instances = {split: _counted_from_one(found) for split, found in read.items()}
    texts = {f"instances_{split}2017.json": _as_json(found) for split, found in instances.items()}
    digests = {s: hashlib.sha256(text).hexdigest() for s, text in zip(instances, texts.values(), strict=True)}
    return CocoDownload(WrittenFiles(texts), files, instances, digests)


class ListedFiles(FolderFiles):
    """The images that annotations name, below a folder."""

    def __init__(self, path: Path, instances: Instances):
        self.path = path
        self.sizes = {}
        for image in instances.images:
            name = clean_name(image.file, str(path))
            try:
                self.sizes[name] = os.stat(path / name).st_size
            except OSError as error:
                raise BadData(
                    f"{path / name} is missing: {error.strerror}; `sightline check` lists all such images"
                ) from error
        rows = sorted(self.sizes.items())
        self.fingerprint = hashlib.sha256(repr(rows).encode()).hexdigest()


class WrittenFiles:
    """Files that lie in memory."""

    def __init__(self, texts: dict[str, bytes]):
        self._texts = texts
        self.sizes = {name: len(text) for name, text in texts.items()}
        self.fingerprint = hashlib.sha256(b"".join(texts.values())).hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self._texts[name]

    def place(self, name: str) -> str:
        return name


def _counted_from_one(found: Instances) -> Instances:
    """Number classes from 1 on: in records of TensorFlow's, 0 is the background."""
    first = 0 if 0 not in found.categories else 1
    categories = {number + first: name for number, name in found.categories.items()}
    return replace(found, categories=categories, labels=found.labels + first)


def _as_json(found: Instances) -> bytes:
    images = [{"id": i.id, "file_name": i.file, "height": i.height, "width": i.width} for i in found.images]
    columns = (found.ids, found.rows, found.labels, found.boxes, found.area, found.crowd)
    annotations = [
        {
            "id": number,
            "image_id": found.images[row].id,
            "category_id": label,
            "bbox": box,
            "area": area,
            "iscrowd": int(crowd),
        }
        for number, row, label, box, area, crowd in zip(*(column.tolist() for column in columns), strict=True)
    ]
    categories = [{"id": number, "name": name} for number, name in found.categories.items()]
    return json.dumps({"images": images, "annotations": annotations, "categories": categories}).encode()
