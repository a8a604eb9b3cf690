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
    _spoil_classes(world, image)
    _spoil_boxes(world)
    _spoil_masks(world)
    shutil.copytree(HERE / "scripts", world / "scripts")
    (world / "lines.txt").write_text(
        "# of a page\nexport PT_HPU_LAZY_MODE=0\nexport HCCL_OVER_TCP=1 DATA=/d\n\n"
        "train.py --data-path $DATA --nonsense 3\n"
        "$PYTHON train.py \\\n  --data-path /d --epochs 3\ntorchrun --nproc-per-node 2 train.py --data-path <path>\n"
    )


def _spoil_classes(world: Path, image) -> None:
    """Folders of classes with all that `check` looks for."""
    odd = shutil.copytree(world / "splits", world / "odd")
    for i in range(5):  # the same bytes again, in one split and in others
        shutil.copy(odd / "train" / "ant" / "0.png", odd / "train" / "ant" / f"again{i}.png")
    shutil.copy(odd / "train" / "bee" / "1.png", odd / "val" / "bee" / "seen.png")
    shutil.copy(odd / "train" / "fly" / "2.png", odd / "test" / "fly" / "seen.png")
    shutil.copy(odd / "val" / "fly" / "1.png", odd / "test" / "fly" / "valued.png")
    (odd / "train" / "fly" / "3.png").write_bytes(b"")
    (odd / "train" / "fly" / "4.png").write_bytes((odd / "train" / "fly" / "5.png").read_bytes()[:200])
    (odd / "train" / "fly" / "notes.txt").write_text("of the flies\n")
    (odd / "train" / "wasp").mkdir()
    image(odd / "val" / "moth" / "0.png")
    image(odd / "test" / "gnat" / "0.png", (9, 50))
    twins = shutil.copytree(world / "pets", world / "twins")
    for i in range(3):
        shutil.copy(twins / "cat" / f"{i}.png", twins / "dog" / f"cat{i}.png")  # of both classes
        shutil.copy(twins / "cat" / f"{i}.png", twins / "cat" / f"copy{i}.png")
    (twins / "dog" / "1.png").write_bytes(b"GIF89a, they said")
    for split, names in (("train", ("ant", "bee")), ("val", ("ant", "cow"))):
        for name in names:
            image(world / "classes_apart" / split / name / "0.png")
    shutil.copytree(world / "table", world / "lost")
    (world / "lost" / "images" / "3.png").unlink()
    image(world / "lost" / "images" / "nobody.png")


def _spoil_boxes(world: Path) -> None:
    """The three forms of boxes with all that `check` looks for."""
    coco = shutil.copytree(world / "coco", world / "odd_coco")
    document = json.loads((coco / "train.json").read_text())
    images, boxes = document["images"], document["annotations"]
    images[0]["width"] = 81
    images += [dict(images[1], id=50), {"id": 51, "file_name": "gone.png", "width": 8, "height": 8}]
    for i, (key, value) in enumerate((("category_id", 7), ("bbox", [70, 50, 40, 30]), ("bbox", [9, 9, 0, 5]))):
        boxes[i + 1][key] = value
    boxes += [dict(boxes[4], id=99), dict(boxes[4], id=98, image_id=777), dict(boxes[5], id=97, iscrowd=1)]
    (coco / "train.json").write_text(json.dumps(document))
    shutil.copy(coco / "train" / "4.png", coco / "train" / "extra.png")
    shutil.copy(coco / "train" / "5.png", coco / "val" / "7.png")
    (coco / "val" / "8.png").write_bytes(b"no image")
    yolo = shutil.copytree(world / "yolo", world / "odd_yolo")
    labels = yolo / "labels" / "train"
    (labels / "0.txt").write_text("0 0.375 0.3833333 0.5 0.5\n" * 2)
    (labels / "1.txt").write_text("5 0.375 0.3833333 0.5 0.5\n1 1.4 0.5 0.5 0.5\n")
    (labels / "2.txt").write_text("1 0.5 0.5 0.5\nmug 0.5 0.5 0.5 0.5\n")
    (labels / "3.txt").write_text("")
    (labels / "4.txt").unlink()
    (labels / "nobody.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (yolo / "images" / "val" / "6.png").write_bytes(b"no image")
    voc = shutil.copytree(world / "voc", world / "odd_voc")
    for name, old, new in (
        ("0", "80", "90"),
        ("1", "pen", "cup"),
        ("2", "<xmax>50", "<xmax>5"),
        ("3", "</object>", ""),
    ):
        path = voc / "Annotations" / f"{name}.xml"
        path.write_text(path.read_text().replace(old, new))
    (voc / "JPEGImages" / "4.png").unlink()
    (voc / "Annotations" / "5.xml").unlink()


def _spoil_masks(world: Path) -> None:
    """Images and masks with all that `check` looks for."""
    odd = shutil.copytree(world / "masks", world / "odd_masks")
    (odd / "masks" / "case00.png").unlink()
    (odd / "images" / "case01.png").unlink()
    Image.new("L", (16, 16)).save(odd / "masks" / "case02.png")
    Image.new("L", (32, 32), 3).save(odd / "masks" / "case03.png")
    (odd / "masks" / "case04.png").write_bytes(b"no image")
    shutil.copy(odd / "images" / "case05.png", odd / "images" / "case06.png")


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
    sightline(f"prepare decathlon --source {world}/masks --out {world}/prepared --jobs 1")
    for recipe, data, name in (
        ("demo_classification", "splits", "run"),
        ("demo_classification", "pets", "drawn"),
        ("demo_classification", "genres", "labels"),
        ("demo_detection", "coco", "boxes"),
        ("demo_segmentation", "prepared", "slices"),
    ):
        sightline(f"train {recipe} --data {world}/{data} --out {world}/runs/{name} {TINY[recipe]}")
    sightline(f"export {world}/runs/run --format onnx --out {world}/run.onnx")
