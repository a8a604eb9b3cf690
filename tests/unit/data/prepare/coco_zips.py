"""Tiny zips with the structure of COCO 2017's three: images by split, and the annotations of both."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

CATEGORIES = {1: "person", 3: "car", 90: "toothbrush"}


def jpeg(seed: int, size: tuple[int, int]) -> bytes:
    coarse = np.random.default_rng(seed).bytes(6 * 4 * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (6, 4), coarse).resize(size).save(out, "JPEG", quality=90)
    return out.getvalue()


def content(split: str, count: int) -> tuple[dict, dict[str, bytes]]:
    """(json, images). Of every ten images: no annotation, only a zero-size box, only a box over the edge, a crowd,
    a box that ends exactly at the edge, and others with one to three boxes beside bad ones."""
    images, annotations, encoded = [], [], {}
    base = 1000 if split == "train" else 5000
    for number in range(count):
        width, height = 32 + number % 3, 24
        image_id = base + 7 * ((number * 11) % count)  # neither sorted nor without gaps
        file = f"{image_id:012d}.jpg"
        encoded[file] = jpeg(image_id, (width, height))
        images.append({"id": image_id, "file_name": file, "height": height, "width": width, "license": 1})
        good = [1.5, 2.25, 10.0, 7.5]
        boxes = {
            0: [],
            1: [[3, 3, 0, 5]],
            2: [[20.0, 3.0, float(width), 5.0]],
            3: [good],
            4: [[2, 4, width - 2, 20]],
        }.get(number % 10, [good] * (number % 3 + 1) + [[0.0, 0.0, 5.0, -1.0]])
        for at, box in enumerate(boxes):
            crowd = int(number % 10 == 3)
            annotations.append(
                {
                    "id": 100 * image_id + at,
                    "image_id": image_id,
                    "category_id": sorted(CATEGORIES)[(number + at) % 3],
                    "bbox": box,
                    "area": 50 if number % 2 else 33.25,
                    "iscrowd": crowd,
                    "segmentation": [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
                }
            )
    categories = [{"id": number, "name": name, "supercategory": "x"} for number, name in CATEGORIES.items()]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}, encoded


def write_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as packed:
        for folder in sorted({name.partition("/")[0] for name in files}):
            packed.writestr(f"{folder}/", b"")
        for name, data in files.items():
            packed.writestr(name, data)


def make_zips(folder: Path, train: int = 40, val: int = 20) -> Path:
    """The three files as they are published: images stored, annotations deflated, among them some of no use here."""
    folder.mkdir(parents=True, exist_ok=True)
    jsons = {"annotations/captions_train2017.json": b"{}"}
    for split, count in (("train", train), ("val", val)):
        described, images = content(split, count)
        write_zip(folder / f"{split}2017.zip", {f"{split}2017/{name}": data for name, data in images.items()})
        jsons[f"annotations/instances_{split}2017.json"] = json.dumps(described).encode()
    write_zip(folder / "annotations_trainval2017.zip", jsons, zipfile.ZIP_DEFLATED)
    return folder
