"""Makers of shards for the tests of sources, and a cache folder of their own."""

import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from sightline.data.formats.records import encode_example, frame

NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> Path:
    """No test leaves an index in the user's own cache, nor finds that of another test."""
    home = tmp_path_factory.getbasetemp() / f"cache of test {next(NUMBERS)}"  # made by what writes there
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def write_records() -> Callable[..., Path]:
    """write_records(path, [features, ...]): one TFRecord file."""

    def write(path: Path, examples: Iterable[dict]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(frame(encode_example(features)) for features in examples))
        return path

    return write


@pytest.fixture
def write_tar() -> Callable[..., Path]:
    """write_tar(path, [(name, content), ...]): one tar file; a TarInfo stands for itself."""

    def write(path: Path, members: Iterable[tuple[str | tarfile.TarInfo, bytes]], **options) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", **options) as archive:
            for name, content in members:
                info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return path

    return write


@pytest.fixture
def settle() -> Callable[[Path], None]:
    """settle(root): everything below was last changed long ago, so that an index of it is kept."""

    def set_times(root: Path) -> None:
        for path in [root, *root.rglob("*")]:
            os.utime(path, ns=(10**18, 10**18))

    return set_times


@pytest.fixture(scope="session")
def drawn_boxes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn images with boxes in the form of COCO 2017, 20 + 13; for reading only, copy it to change it."""
    from sightline.data.prepare.shapes import ShapesOptions, prepare

    out = tmp_path_factory.mktemp("drawn")
    prepare(ShapesOptions(out, only=("detection",), train_pictures=20, val_pictures=13), lambda *_: None)
    return out / "detection"


def coco_features(root: Path, split: str) -> list[dict]:
    """The tf.train.Examples that the original's converter makes of a split: boxes left out by rule, crowds kept."""
    content = json.loads((root / "annotations" / f"instances_{split}2017.json").read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    examples = []
    for image in content["images"]:
        tall, wide = image["height"], image["width"]
        kept = []
        for found in (a for a in content["annotations"] if a["image_id"] == image["id"]):
            x, y, w, h = found["bbox"]
            if w > 0 and h > 0 and x + w <= wide and y + h <= tall:
                kept.append((x / wide, (x + w) / wide, y / tall, (y + h) / tall, found))
        if split == "train" and not kept:
            continue
        edges = {
            f"image/object/bbox/{name}": [float(row[i]) for row in kept]
            for i, name in enumerate(("xmin", "xmax", "ymin", "ymax"))
        }
        examples.append(
            {
                **edges,
                "image/height": tall,
                "image/width": wide,
                "image/filename": image["file_name"].encode(),
                "image/source_id": str(image["id"]).encode(),
                "image/encoded": (root / f"{split}2017" / image["file_name"]).read_bytes(),
                "image/format": b"jpeg",
                "image/object/class/label": [row[4]["category_id"] for row in kept],
                "image/object/class/text": [names[row[4]["category_id"]].encode() for row in kept],
                "image/object/is_crowd": [row[4]["iscrowd"] for row in kept],
                "image/object/area": [float(row[4]["area"]) for row in kept],
            }
        )
    return examples


@pytest.fixture
def as_records(write_records) -> Callable[[Path, Path], Path]:
    """as_records(root, out): a data set in COCO's form as records, dealt out over the shards in turn.

    `change` maps features of the first record to other values, or to functions of what they were.
    """

    def convert(root: Path, out: Path, change: dict | None = None) -> Path:
        for split, shards in (("train", 4), ("val", 3)):
            examples = coco_features(root, split)
            for key, value in (change or {}).items():
                examples[0][key] = value(examples[0][key]) if callable(value) else value
            for number in range(shards):
                write_records(out / f"{split}-{number:05d}-of-{shards:05d}.tfrecord", examples[number::shards])
        return out

    return convert
