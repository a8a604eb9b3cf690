"""Boxes in COCO's json files: PATH/annotations/instances_train2017.json with PATH/train2017/*.jpg as COCO is published,
or files of any name, which coco_places.py finds with the folders of their images.

Images are in the order of their ids.
"""

from __future__ import annotations

from sightline.data.sources import DEFAULT_OPTIONS, SourceOptions
from sightline.data.sources.annotations import read_annotations
from sightline.data.sources.box_images import BoxImages, open_split
from sightline.data.sources.coco_places import Files
from sightline.data.sources.coco_places import detect as detect
from sightline.errors import BadData
from sightline.parts import Split

EXPECTED = "PATH/annotations/instances_{0}2017.json with PATH/{0}2017/*.jpg, or instances_{0}.json with {0}/"


def open_boxes(path: str, split: Split, options: SourceOptions = DEFAULT_OPTIONS) -> BoxImages:
    """Read the annotations of a split and list its images."""
    files = Files.at(path)
    if split not in files.jsons and (split == "train" or files.is_half_published):
        raise BadData(f"{path} has no {split} split of COCO; expected {EXPECTED.format(split)}")
    needed = [each for each in files.jsons if each in (split, "train") or each not in files.folders]
    read = {each: read_annotations(files.jsons[each], files.index_root(each)) for each in needed}
    annotations = read.get(split) or read["train"]
    if annotations is not read.get("train", annotations):
        annotations.check_classes(read["train"], str(files.jsons[split]), str(files.jsons["train"]))
    layout = files.layout({each: found.names for each, found in read.items()}, split)
    return open_split("coco", layout, split, annotations, options)
