"""One detection data set, drawn in COCO's form, written in every layout that a source of boxes reads.

Independent of the readers: plain json, a line of NumPy per YOLO label, and XML by string.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    """An image: its name, bytes and sides, and (class, x, y, width, height) of its boxes, in whole pixels."""

    file: str
    data: bytes
    width: int
    height: int
    boxes: list[tuple[str, int, int, int, int]]


Data = dict[str, list[Entry]]


def read(root: Path) -> Data:
    """The drawn data with their boxes widened to whole pixels; names are unique, and train has all classes of val."""
    found: Data = {}
    for split in ("train", "val"):
        content = json.loads((root / "annotations" / f"instances_{split}2017.json").read_text())
        names = {each["id"]: each["name"] for each in content["categories"]}
        found[split] = []
        for image in content["images"]:
            boxes = []
            for each in (a for a in content["annotations"] if a["image_id"] == image["id"]):
                x, y, wide, tall = each["bbox"]
                left, top = math.floor(x), math.floor(y)
                right, bottom = min(image["width"], math.ceil(x + wide)), min(image["height"], math.ceil(y + tall))
                boxes.append((names[each["category_id"]], left, top, right - left, bottom - top))
            data = (root / f"{split}2017" / image["file_name"]).read_bytes()
            found[split].append(Entry(f"{split}{image['file_name']}", data, image["width"], image["height"], boxes))
    known = {box[0] for entry in found["train"] for box in entry.boxes}
    found["val"] = [e._replace(boxes=[box for box in e.boxes if box[0] in known]) for e in found["val"]]
    return found


def classes_of(data: Data) -> list[str]:
    return sorted({box[0] for entries in data.values() for entry in entries for box in entry.boxes})


def images(folder: Path, entries: list[Entry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        (folder / entry.file).write_bytes(entry.data)


def coco_json(file: Path, entries: list[Entry], classes: list[str], below: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    annotations = [
        {"image_id": number, "category_id": classes.index(box[0]) + 1, "bbox": box[1:]}
        for number, entry in enumerate(entries)
        for box in entry.boxes
    ]
    listed = [
        {"id": number, "file_name": below + entry.file, "width": entry.width, "height": entry.height}
        for number, entry in enumerate(entries)
    ]
    content = {
        "categories": [{"id": number, "name": name} for number, name in enumerate(classes, 1)],
        "images": listed,
        "annotations": [each | {"id": number} for number, each in enumerate(annotations)],
    }
    file.write_text(json.dumps(content))


def yolo_labels(folder: Path, entries: list[Entry], classes: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        rows = np.asarray([[classes.index(n), x + w / 2, y + h / 2, w, h] for n, x, y, w, h in entry.boxes])
        shares = rows.reshape(-1, 5) / [1, entry.width, entry.height, entry.width, entry.height]
        np.savetxt((folder / entry.file).with_suffix(".txt"), shares, fmt="%d %.6f %.6f %.6f %.6f")


def voc_xml(folder: Path, entries: list[Entry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        objects = "".join(
            f"<object><name>{name}</name><difficult>0</difficult><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin>"
            f"<xmax>{x + w}</xmax><ymax>{y + h}</ymax></bndbox></object>"
            for name, x, y, w, h in entry.boxes
        )
        size = f"<size><width>{entry.width}</width><height>{entry.height}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{entry.file}</filename>{size}{objects}</annotation>"
        (folder / entry.file).with_suffix(".xml").write_text(text)


def both(data: Data) -> list[Entry]:
    return [*data["train"], *data["val"]]


def coco(data: Data, out: Path) -> None:
    """train.json, val.json, images/"""
    images(out / "images", both(data))
    for split, entries in data.items():
        coco_json(out / f"{split}.json", entries, classes_of(data))


def coco_folders(data: Data, out: Path) -> None:
    """annotations/instances_train.json, images/train/ and the same of validation"""
    for split, name in (("train", "train"), ("val", "validation")):
        images(out / "images" / name, data[split])
        coco_json(out / "annotations" / f"instances_{name}.json", data[split], classes_of(data))


def coco_export(data: Data, out: Path) -> None:
    """train/_annotations.coco.json beside its images, and valid/: an export of Roboflow"""
    for split, name in (("train", "train"), ("val", "valid")):
        images(out / name, data[split])
        coco_json(out / name / "_annotations.coco.json", data[split], classes_of(data))


def coco_nested(data: Data, out: Path) -> None:
    """Names with folders in them: train.json names photos/a.jpg"""
    for split, entries in data.items():
        images(out / "photos", entries)
        coco_json(out / "annotations" / f"{split}.json", entries, classes_of(data), "photos/")


def coco_one(data: Data, out: Path) -> None:
    """annotations.json, photos/"""
    images(out / "photos", both(data))
    coco_json(out / "annotations.json", both(data), classes_of(data))


def yolo(data: Data, out: Path) -> None:
    """data.yaml, images/train/, labels/train/ and the same of val"""
    for split, entries in data.items():
        images(out / "images" / split, entries)
        yolo_labels(out / "labels" / split, entries, classes_of(data))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(classes_of(data)))
    (out / "data.yaml").write_text(f"path: ../datasets/here\ntrain: images/train\nval: images/val\nnames:\n{names}")


def yolo_export(data: Data, out: Path) -> None:
    """data.yaml, train/images/, train/labels/ and valid/: an export of Roboflow"""
    for split, name in (("train", "train"), ("val", "valid")):
        images(out / name / "images", data[split])
        yolo_labels(out / name / "labels", data[split], classes_of(data))
    names = classes_of(data)
    (out / "data.yaml").write_text(
        f"train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: {len(names)}\nnames: {names}\n"
    )


def yolo_lists(data: Data, out: Path) -> None:
    """data.yaml that names lists of images"""
    for split, entries in data.items():
        images(out / "images", entries)
        yolo_labels(out / "labels", entries, classes_of(data))
        (out / f"{split}.txt").write_text("".join(f"./images/{entry.file}\n" for entry in entries))
    (out / "data.yaml").write_text(f"train: train.txt\nval: val.txt\nnames: {classes_of(data)}\n")


def yolo_plain(data: Data, out: Path) -> None:
    """images/, labels/, classes.txt"""
    images(out / "images", both(data))
    yolo_labels(out / "labels", both(data), classes_of(data))
    (out / "classes.txt").write_text("\n".join(classes_of(data)))


def voc(data: Data, out: Path) -> None:
    """Annotations/, JPEGImages/, ImageSets/Main/train.txt and val.txt"""
    images(out / "JPEGImages", both(data))
    voc_xml(out / "Annotations", both(data))
    (out / "ImageSets" / "Main").mkdir(parents=True)
    for split, entries in data.items():
        (out / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(f"{Path(e.file).stem}\n" for e in entries))


def voc_export(data: Data, out: Path) -> None:
    """train/ and valid/ with xml files beside the images: an export of Roboflow"""
    for split, name in (("train", "train"), ("val", "valid")):
        images(out / name, data[split])
        voc_xml(out / name, data[split])


def voc_plain(data: Data, out: Path) -> None:
    """images/, annotations/"""
    images(out / "images", both(data))
    voc_xml(out / "annotations", both(data))


LAYOUTS = {
    function.__name__: function
    for function in (
        *(coco, coco_folders, coco_export, coco_nested, coco_one),
        *(yolo, yolo_export, yolo_lists, yolo_plain, voc, voc_export, voc_plain),
    )
}
DRAWN = ("coco_one", "yolo_plain", "voc_plain")
