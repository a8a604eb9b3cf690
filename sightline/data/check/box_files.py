"""Annotation files of any format, read to their ends with all that is wrong in them noted: for `check`, and for
`prepare coco`, which needs what training leaves out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sightline.data.check.images import Report
from sightline.data.formats.coco import Image, Instances, Wrong, read_instances
from sightline.data.sources import DEFAULT_OPTIONS, BoxSource, SourceOptions, voc, yolo
from sightline.data.sources.box_images import drawn, kind_described
from sightline.data.sources.coco import Files, places
from sightline.data.sources.layouts import SPLITS, Splits
from sightline.errors import BadData
from sightline.files.json_lists import BLOCK
from sightline.files.regular import regular
from sightline.files.typed_json import short
from sightline.parts import Split

_MOST_WRONG = 100_000  # entries of a split that are listed


def is_published(path: str) -> bool:
    """Return whether all that is at a path has COCO's own names, and the images of a split are there."""
    if kind_described(path):
        return False
    files = Files.at(path)
    splits: tuple[Split, ...] = (*SPLITS, "test")
    own = {pair[0] for split in splits for pair in places(files.root, split)}
    return bool(files.folders) and own >= {*files.jsons.values(), *filter(None, [files.test])}


def read_files(
    path: str, kind: str, report: Report, options: SourceOptions = DEFAULT_OPTIONS, with_test: bool = False
) -> tuple[Splits, dict[Split, Instances]]:
    """Return where the splits lie and what their files say, all of it; a split that cannot be read is noted and left
    out. A test split is among them if that is asked for and it does not validate."""
    layout, read = _READERS[kind](path, report, with_test)
    if layout.is_drawn and "train" in read:
        names = [image.file.encode("utf-8", "surrogateescape") for image in read["train"].images]
        is_val = drawn(names, options, path, "val")
        whole = read["train"]
        read |= {split: whole.of_images(np.flatnonzero(is_val == (split == "val"))) for split in SPLITS}
    return layout, read


def _read_coco(path: str, report: Report, with_test: bool) -> tuple[Splits, dict[Split, Instances]]:
    files = Files.at(path)
    read = {split: found for split, file in files.jsons.items() if (found := read_json(file, split, report))}
    names = {split: [image.file for image in found.images] for split, found in read.items()}
    layout = replace(files, jsons={split: files.jsons[split] for split in read}).layout(names)
    test = read_json(files.test, "test", report) if with_test and files.test and not files.test_validates else None
    if test and len(test.labels):  # else its images have no labels
        try:
            layout = replace(layout, test=files.test_place([image.file for image in test.images]))
            read["test"] = test
        except BadData as error:
            report.add("cannot be opened", "test", path, str(error))
    return layout, read


def _read_yolo(path: str, report: Report, with_test: bool) -> tuple[Splits, dict[Split, Instances]]:
    layout = yolo.layout_at(path)

    def read(split: Split) -> Instances:
        wrong = _noting(split, report)
        return yolo.read_instances(yolo.Pairs.at(layout, layout.place(split), wrong), layout.classes, wrong)

    found = _each(layout, path, read, report, with_test)
    most = max((found[split].categories for split in found), key=len, default={})
    return layout, {split: replace(each, categories=most) for split, each in found.items()}


def _read_voc(path: str, report: Report, with_test: bool) -> tuple[Splits, dict[Split, Instances]]:
    layout = voc.layout_at(path)
    found = _each(
        layout,
        path,
        lambda split: voc.read_instances(voc.XmlFiles.at(layout.place(split)), _noting(split, report)),
        report,
        with_test,
    )
    return layout, voc.counted_alike(found)


def _each(
    layout: Splits, path: str, read: Callable[[Split], Instances], report: Report, with_test: bool
) -> dict[Split, Instances]:
    found: dict[Split, Instances] = {}
    for split in SPLITS:
        if getattr(layout, split):
            try:
                found[split] = read(split)
            except BadData as error:
                report.add("cannot be opened", split, path, str(error))
    if with_test and layout.own_test:
        try:
            if len((test := read("test")).labels):  # else its images have no labels
                found["test"] = test
        except BadData as error:
            report.add("cannot be opened", "test", path, str(error))
    return found


def read_json(file: Path, split: Split, report: Report) -> Instances | None:
    """Read a json file of COCO's; None if that is not possible, which is noted."""
    try:
        with open(file, "rb", opener=regular) as handle:
            found = read_instances(iter(lambda: handle.read(BLOCK), b""), file.name, _noting(split, report))
        first: dict[str, int] = {}
        for number, title in found.categories.items():
            if first.setdefault(title, number) != number:
                text = f"categories {first[title]} and {number} are both called {short(title)}"
                report.add("same name twice", split, file.name, text)
        return found
    except OSError as error:
        report.add("cannot be opened", split, str(file), error.strerror or type(error).__name__)
    except BadData as error:
        report.add("cannot be opened", split, str(file), str(error))
    return None


def _noting(split: Split, report: Report) -> Wrong:
    """Return a callback that notes problems; BadData if there are too many."""
    before = len(report.problems)

    def wrong(kind: str, where: str, text: str) -> None:
        report.add(kind, split, where, text)
        if len(report.problems) - before >= _MOST_WRONG:
            raise BadData(f"{where} is problem number {_MOST_WRONG}; the rest was not checked")

    return wrong


_READERS = {"coco": _read_coco, "yolo": _read_yolo, "voc": _read_voc}
KINDS = tuple(_READERS)


def of_source(source: BoxSource, split: Split, report: Report) -> Instances:
    """Return all that a source says, with its classes numbered as its labels are; labels of no class are noted."""
    found = [source.objects(index) for index in range(len(source))]
    rows = np.repeat(np.arange(len(found)), [len(each.labels) for each in found])
    labels = np.concatenate([np.zeros(0, np.int64), *(each.labels for each in found)])
    for at in np.flatnonzero((labels < 1) | (labels > len(source.classes))).tolist():
        text = f"a box has label {labels[at]}, expected 1 to {len(source.classes)}"
        report.add("unknown category", split, source.name(int(rows[at])), text)
    return Instances(
        [Image(each.image_id, source.name(index), each.height, each.width) for index, each in enumerate(found)],
        dict(enumerate(source.classes, 1)),
        np.arange(len(labels)),
        rows,
        labels,
        np.concatenate([np.zeros((0, 4)), *(each.boxes for each in found)]),
        np.concatenate([np.zeros(0), *(each.area for each in found)]),
        np.concatenate([np.zeros(0, bool), *(each.crowd for each in found)]),
    )
