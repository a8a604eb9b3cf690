"""Fingerprints of data stay what they were: a run that another version began resumes, as its data are the same."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sightline.data.sources import SourceOptions, open_boxes, open_masks, open_source

ALL = SourceOptions(split="all")
# Of 8 x 6 pixels: RGB, and a mask of 0, 1 and 2. As bytes, since encoders differ in the lengths of what they write.
PHOTO = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000008000000060802000000716748ac0000000c4944415478da6360188c0000009600018dc8c12100"
    "00000049454e44ae426082"
)
MASK = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000080000000608000000"
    "00db6e8027000000104944415478da63606064628000121800023d001399c2b0300000000049454e44ae426082"
)
OBJECTS = {"bbox": [[1, 2, 3, 4], [2, 2, 4, 3.5]], "category": ["b", "a"], "iscrowd": [0, 1]}


def tar_of(root: Path, *endings: str) -> None:
    contents = {"jpg": PHOTO, "json": json.dumps({"objects": OBJECTS}).encode(), "seg.png": MASK, "cls": b""}
    root.mkdir()
    with tarfile.open(root / "train-0.tar", "w", format=tarfile.USTAR_FORMAT) as made:
        for number in range(3):
            for ending in endings:
                data = contents[ending] or b"%d" % (number % 2)
                info = tarfile.TarInfo(f"{number}.{ending}")
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))


def coco(root: Path) -> None:
    (root / "images").mkdir(parents=True)
    objects = [
        {"id": n, "image_id": n, "category_id": 7, "bbox": [1, 1, n, 2], "segmentation": [[1, 1, 1 + n, 1, 1, 3]]}
        for n in (1, 2, 3)
    ]
    images = [{"id": n, "file_name": f"{n}.png", "width": 8, "height": 6} for n in (1, 2, 3)]
    for each in images:
        (root / "images" / str(each["file_name"])).write_bytes(PHOTO)
    categories = [{"id": 7, "name": "x"}]
    said = {"images": images, "annotations": objects, "categories": categories}
    (root / "train.json").write_text(json.dumps(said))


def files(root: Path, *folders: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for name in "abc":
            (root / folder / f"{name}.png").write_bytes(MASK if folder == "masks" else PHOTO)


def metadata(root: Path) -> None:
    files(root, "images")
    lines = [json.dumps({"file_name": f"images/{name}.png", "objects": OBJECTS, "label": name}) for name in "abc"]
    (root / "metadata.jsonl").write_text("\n".join(lines))


MADE: dict[str, Callable[[Path], None]] = {
    "coco": coco,
    "tar of labels": lambda root: tar_of(root, "jpg", "cls"),
    "tar of objects": lambda root: tar_of(root, "jpg", "json", "seg.png"),
    "folders": lambda root: files(root, "a", "b"),
    "masks": lambda root: files(root, "images", "masks"),
    "metadata": metadata,
}


@pytest.mark.parametrize(
    ("name", "opener", "expected"),
    [
        ("coco", open_boxes, "94513e3a5d04a99f"),
        ("coco", open_masks, "729ac454f9d6e57f"),
        ("tar of labels", open_source, "ad20f625f37c9c57"),
        ("tar of objects", open_boxes, "4c2dd4cd45d47961"),
        ("tar of objects", open_masks, "14bab147f3ed26a6"),
        ("folders", open_source, "64c485e88dd6c994"),
        ("masks", open_masks, "11f66545a0b1ebae"),
        ("metadata", open_boxes, "f400e04a01878389"),
        ("metadata", open_source, "c609b12af78c7f07"),
    ],
)
def test_fingerprints_stay_what_they_were(tmp_path, name, opener, expected):
    MADE[name](tmp_path / "data")
    asked = ("train", SourceOptions()) if name == "tar of labels" else ("val", ALL)  # no part of whose train validates
    assert opener("auto", str(tmp_path / "data"), *asked).fingerprint[:16] == expected
