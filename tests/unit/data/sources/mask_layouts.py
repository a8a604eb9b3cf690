"""One set of images with masks, written in every layout that a source of masks reads.

Independent of the readers: Pillow and plain text. Masks are dictionaries of rectangles, so that outlines can say them.
"""

import csv
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

CLASSES = ("background", "cat", "dog", "house")
COLOURS = ((0, 0, 0), (64, 128, 64), (192, 0, 128), (0, 128, 192))


class Entry(NamedTuple):
    """An image: its name, pixels, and (class, left, top, right, bottom) of its objects, those below others first."""

    stem: str
    pixels: np.ndarray
    objects: list[tuple[int, int, int, int, int]]

    @property
    def mask(self) -> np.ndarray:
        found = np.zeros(self.pixels.shape[:2], np.uint8)
        for number, left, top, right, bottom in self.objects:
            found[top:bottom, left:right] = number
        return found


Data = dict[str, list[Entry]]


def drawn(train: int = 6, val: int = 3, test: int = 2) -> Data:
    rng = np.random.default_rng(7)
    found: Data = {}
    for split, count in (("train", train), ("val", val), ("test", test)):
        found[split] = []
        for number in range(count):
            height, width = (int(side) for side in rng.integers(20, 40, 2))
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            objects = [
                (label, left := int(rng.integers(0, 10)), top := int(rng.integers(0, 10)), left + 9, top + 7 + label)
                for label in (1, 2, 3)
            ]
            found[split].append(Entry(f"{split}_{number}", pixels, objects))
    return found


def image(folder: Path, entry: Entry, suffix: str = ".png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(entry.pixels).save(folder / f"{entry.stem}{suffix}", quality=95)


def grey(folder: Path, name: str, mask: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask).save(folder / name)


def indexed(folder: Path, name: str, mask: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    written = Image.fromarray(mask, "P") if mask.dtype == np.uint8 else None
    assert written is not None
    written.putpalette([each for colour in COLOURS for each in colour])
    written.save(folder / name)


def coloured(folder: Path, name: str, mask: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(COLOURS, np.uint8)[mask]).save(folder / name)


def split_inside(data: Data, root: Path) -> None:
    """images/train and masks/train"""
    for split, entries in data.items():
        for entry in entries:
            image(root / "images" / split, entry, ".jpg")
            grey(root / "masks" / split, f"{entry.stem}.png", entry.mask)


def split_outside(data: Data, root: Path) -> None:
    """train/image and train/label"""
    for split, entries in data.items():
        for entry in entries:
            image(root / split / "image", entry)
            indexed(root / split / "label", f"{entry.stem}.png", entry.mask)


def named_folders(data: Data, root: Path) -> None:
    """CamVid: train, train_labels with X_L.png in colours, class_dict.csv"""
    for split, entries in data.items():
        for entry in entries:
            image(root / split, entry)
            coloured(root / f"{split}_labels", f"{entry.stem}_L.png", entry.mask)
    rows = [f"{name},{r},{g},{b}" for name, (r, g, b) in zip(CLASSES, COLOURS, strict=True)]
    (root / "class_dict.csv").write_text("\n".join(["name, r, g, b", *rows]))


def roboflow(data: Data, root: Path) -> None:
    """train, valid and test with X.jpg, X_mask.png and _classes.csv"""
    for split, entries in data.items():
        folder = root / {"val": "valid"}.get(split, split)
        for entry in entries:
            image(folder, entry, ".jpg")
            grey(folder, f"{entry.stem}_mask.png", entry.mask)
        with (folder / "_classes.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["Pixel Value", " Class"], *enumerate(f" {name}" for name in CLASSES)])


def voc(data: Data, root: Path) -> None:
    """VOCdevkit/VOC2012 with lists; more images than masks"""
    top = root / "VOCdevkit" / "VOC2012"
    (top / "ImageSets" / "Segmentation").mkdir(parents=True)
    for split, entries in data.items():
        for entry in entries:
            image(top / "JPEGImages", entry, ".jpg")
            indexed(top / "SegmentationClass", f"{entry.stem}.png", entry.mask)
            (top / "Annotations").mkdir(exist_ok=True)
            (top / "Annotations" / f"{entry.stem}.xml").write_text("<annotation></annotation>")
        names = "".join(f"{entry.stem}\n" for entry in reversed(entries))
        (top / "ImageSets" / "Segmentation" / f"{split}.txt").write_text(names)
    image(top / "JPEGImages", data["train"][0]._replace(stem="no_mask"), ".jpg")


def cvat(data: Data, root: Path) -> None:
    """JPEGImages and SegmentationClass in colours, labelmap.txt"""
    for split, entries in data.items():
        for entry in entries:
            image(root / "JPEGImages" / split, entry, ".jpg")
            coloured(root / "SegmentationClass" / split, f"{entry.stem}.png", entry.mask)
    rows = [f"{name}:{r},{g},{b}::" for name, (r, g, b) in zip(CLASSES, COLOURS, strict=True)]
    (root / "labelmap.txt").write_text("\n".join(["# label:color_rgb:parts:actions", *rows]))


def tiff(data: Data, root: Path) -> None:
    """imgs and gt as TIFF, 16 bits"""
    for split, entries in data.items():
        for entry in entries:
            image(root / split / "imgs", entry, ".tif")
            grey(root / split / "gt", f"{entry.stem}.tif", entry.mask.astype(np.uint16))


def described(data: Data, root: Path) -> Path:
    """folders that lie apart"""
    for split, entries in data.items():
        for entry in entries:
            image(root / f"photos_{split}", entry)
            grey(root / "drawn" / split, f"{entry.stem}.png", entry.mask)
    text = "".join(f"{s}: {{images: photos_{s}, labels: drawn/{s}}}\n" for s in data)
    (root / "data.yaml").write_text(f"kind: masks\n{text}")
    return root / "data.yaml"


def polygon(entry: Entry, number: int) -> list[float]:
    """The corners of an object: pycocotools fills such a rectangle to its pixels."""
    _, left, top, right, bottom = entry.objects[number]
    height, width = entry.pixels.shape[:2]
    right, bottom = min(right, width), min(bottom, height)
    return [left, top, right, top, right, bottom, left, bottom]


def coco(data: Data, root: Path) -> None:
    """json files with polygons"""
    (root / "annotations").mkdir(parents=True)
    for split, entries in data.items():
        images, annotations = [], []
        for number, entry in enumerate(entries, 1):
            image(root / split, entry)
            height, width = entry.pixels.shape[:2]
            images.append({"id": number, "file_name": f"{entry.stem}.png", "height": height, "width": width})
            for at, each in enumerate(entry.objects):
                corners = polygon(entry, at)
                box = [*corners[:2], corners[2] - corners[0], corners[5] - corners[1]]
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": number, "category_id": 10 * each[0], "bbox": box}
                    | {"segmentation": [corners], "area": box[2] * box[3], "iscrowd": 0}
                )
        categories = [{"id": 10 * number, "name": name} for number, name in enumerate(CLASSES) if number]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def yolo(data: Data, root: Path) -> None:
    """data.yaml and polygons"""
    for split, entries in data.items():
        for entry in entries:
            image(root / split / "images", entry)
            (root / split / "labels").mkdir(exist_ok=True)
            height, width = entry.pixels.shape[:2]
            shares = [np.asarray(polygon(entry, at)) / np.tile([width, height], 4) for at in range(len(entry.objects))]
            lines = [
                f"{each[0] - 1} " + " ".join(repr(float(share)) for share in some)
                for each, some in zip(entry.objects, shares, strict=True)
            ]
            (root / split / "labels" / f"{entry.stem}.txt").write_text("\n".join(lines))
    splits = "".join(f"{split}: {split}/images\n" for split in data)
    (root / "data.yaml").write_text(f"{splits}names: [cat, dog, house]\nnc: 3\n")


LAYOUTS = {
    each.__name__: each
    for each in (split_inside, split_outside, named_folders, roboflow, voc, cvat, tiff, described, coco, yolo)
}
NAMED = ("named_folders", "roboflow", "cvat", "coco", "yolo")  # layouts that name the classes
