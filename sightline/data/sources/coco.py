"""Boxes, and outlines as masks, in COCO's json files: PATH/annotations/instances_train2017.json with
PATH/train2017/*.jpg as COCO is published, or files of any name, which coco_places.py finds with their images.

Images are in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions
from sightline.data.sources.annotations import Annotations, read_annotations
from sightline.data.sources.box_images import BoxImages, open_split
from sightline.data.sources.coco_places import Files
from sightline.data.sources.coco_places import detect as detect
from sightline.data.sources.layouts import Layout
from sightline.data.sources.outlines import CocoMasks, Outlined, read_outlined
from sightline.errors import BadData
from sightline.parts import Split

EXPECTED = "PATH/annotations/instances_{0}2017.json with PATH/{0}2017/*.jpg, or instances_{0}.json with {0}/"


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


def _located(path: str, split: Split, read_file: Read) -> tuple[Layout, Split, Annotations]:
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


def _with_test(layout: Layout, files: Files, test: Annotations, is_wanted: bool) -> Layout:
    """Add the place of the test split; unless it is wanted, its images may be missing."""
    try:
        return replace(layout, test=files.test_place(test.names))
    except BadData:
        if is_wanted:
            raise
        return layout
