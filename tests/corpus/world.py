"""What the commands of the corpus are given: data drawn small, runs trained for two steps, files of every kind.

Folders are named as they stand in the corpus: `{pets}` is `world/pets`.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "golden"
# Small enough that a training takes a fraction of a second; the numbers are flags as a user would type them.
QUICK = "--train.precision fp32 --workers 0 --run.report off"
TINY = {
    "demo_classification": f"--model.width 4 --data.size 24 --train.max-steps 2 {QUICK}",
    "demo_detection": f"--model.width 4 --data.size 64 --train.max-steps 1 {QUICK}",
    "demo_segmentation": f"--model.width 2 --batch-size 4 --train.max-steps 1 {QUICK}",
}


def make(world: Path) -> None:
    """Draw everything once; the same bytes every time."""
    rng = np.random.default_rng(0)

    def image(path: Path, size: tuple[int, int] = (32, 24)) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)

    for name, number in (("cat", 5), ("dog", 5)):
        for i in range(number):
            image(world / "pets" / name / f"{i}.png")
    for name in ("ant", "bee", "fly"):
        for split, number in (("train", 6), ("val", 2), ("test", 4)):
            for i in range(number):
                image(world / "splits" / split / name / f"{i}.png")
    for i in range(40):
        image(world / "many" / ("left" if i % 2 else "right") / f"{i:02}.png")
    for i in range(8):
        image(world / "table" / "images" / f"{i}.png")
        image(world / "genres" / "images" / f"{i}.png")
    _write_csv(world / "table" / "labels.csv", [("file", "label"), *((f"{i}.png", "xy"[i % 2]) for i in range(8))])
    genres = [("file", "label"), *((f"{i}.png", ("comedy", "drama", "comedy;drama")[i % 3]) for i in range(8))]
    _write_csv(world / "genres" / "labels.csv", genres)
    _draw_boxes(world, image)
    _draw_masks(world, rng)
    (world / "empty").mkdir()
    (world / "notes").mkdir()
    (world / "notes" / "read.txt").write_text("nothing to learn from\n")
    image(world / "photo.png", (40, 30))
    image(world / "flat" / "1.png")
    image(world / "flat" / "2.png")
    shutil.copytree(world / "pets", world / "broken")
    (world / "broken" / "cat" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    shutil.copytree(HERE / "own", world / "own")
    (world / "own" / "broken.py").write_text("def recipe(:\n")
    (world / "own" / "without.py").write_text("NUMBER = 1\n")
    (world / "own" / "raises.py").write_text('def recipe():\n    raise ValueError("not today")\n')
    shutil.copytree(GOLDEN / "checkpoint_format1" / "run", world / "format1")
    shutil.copy(GOLDEN / "checkpoint_format1" / "tiny.py", world / "tiny.py")
    shutil.copytree(HERE / "stored", world / "stored")  # runs of commit e5fe2df, whose data were in /data
    _write_configs(world)


def _write_csv(path: Path, rows: list[tuple[str, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows(rows)


def _draw_boxes(world: Path, image) -> None:
    """The same images and boxes as COCO, YOLO and VOC files."""
    for split, numbers in (("train", range(6)), ("val", range(6, 9))):
        files = [{"id": i, "file_name": f"{i}.png", "width": 80, "height": 60} for i in numbers]
        for i in numbers:
            image(world / "coco" / split / f"{i}.png", (80, 60))
            for other in (world / "yolo" / "images" / split, world / "voc" / "JPEGImages"):
                other.mkdir(parents=True, exist_ok=True)
                shutil.copy(world / "coco" / split / f"{i}.png", other)
        boxes = [
            {"id": i, "image_id": i, "category_id": 1 + i % 2, "bbox": [10, 8, 40, 30], "area": 1200, "iscrowd": 0}
            for i in numbers
        ]
        categories = [{"id": 1, "name": "mug"}, {"id": 2, "name": "pen"}]
        document = {"images": files, "annotations": boxes, "categories": categories}
        (world / "coco" / f"{split}.json").write_text(json.dumps(document))
        labels = world / "yolo" / "labels" / split
        labels.mkdir(parents=True)
        for i in numbers:
            (labels / f"{i}.txt").write_text(f"{i % 2} 0.375 0.3833333 0.5 0.5\n")
            (world / "voc" / "Annotations").mkdir(exist_ok=True)
            (world / "voc" / "Annotations" / f"{i}.xml").write_text(
                f"<annotation><filename>{i}.png</filename><size><width>80</width><height>60</height><depth>3</depth>"
                f"</size><object><name>{('mug', 'pen')[i % 2]}</name><bndbox><xmin>11</xmin><ymin>9</ymin>"
                "<xmax>50</xmax><ymax>38</ymax></bndbox></object></annotation>"
            )
    (world / "yolo" / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [mug, pen]\n")


def _draw_masks(world: Path, rng: np.random.Generator) -> None:
    for i in range(12):
        mask = np.zeros((32, 32), np.uint8)
        mask[8 : 16 + i % 4, 10:22] = 1
        pixels = (mask * 120 + rng.integers(0, 60, mask.shape)).astype(np.uint8)
        for name, values in (("images", pixels), ("masks", mask)):
            path = world / "masks" / name / f"case{i:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(path)


def _write_configs(world: Path) -> None:
    configs = {
        "mine": f"recipe: demo_classification\ndata:\n  path: {world}/pets\ntrain:\n  epochs: 3\n  global_batch: 4\n",
        "typo": f"recipe: demo_classification\ndata:\n  path: {world}/pets\ntrain:\n  epoch: 3\n",
        "wrong_type": "recipe: demo_classification\ntrain:\n  epochs: many\n",
        "no_recipe": "train:\n  epochs: 3\n",
        "unknown_recipe": "recipe: resnet5\n",
        "not_yaml": "recipe: [demo_classification\n",
        "list": "- recipe\n- demo_classification\n",
        "with_run": f"recipe: demo_classification\ndata: {{path: {world}/pets}}\nrun: {{log_every_steps: 1}}\n",
        "folders": f"kind: folder\ntrain: {world}/splits/train\nval: {world}/splits/test\n",
        "other_recipe": "recipe: resnet50\noptimizer: {kind: adamw, lr: 0.001}\n",
    }
    for name, text in configs.items():
        (world / f"{name}.yaml").write_text(text)


def train(world: Path, sightline) -> None:
    """Prepare the masks and train the runs that later commands look at."""
    sightline(f"prepare decathlon --source {world}/masks --out {world}/prepared")
    for recipe, data, name in (
        ("demo_classification", "splits", "run"),
        ("demo_classification", "pets", "drawn"),
        ("demo_classification", "genres", "labels"),
        ("demo_detection", "coco", "boxes"),
        ("demo_segmentation", "prepared", "slices"),
    ):
        sightline(f"train {recipe} --data {world}/{data} --out {world}/runs/{name} {TINY[recipe]}")
    sightline(f"export {world}/runs/run --format onnx --out {world}/run.onnx")
