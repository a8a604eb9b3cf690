"""`sightline show` as a user types it: the sheet holds what training sees, and labels where the objects are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from sightline import config
from sightline.config import Run
from sightline.data.loading.loader import BadSamples, Loader
from sightline.drawing.findings import GROUND, colour_of
from sightline.drawing.slices import outline_colour
from sightline.engine.orders import train_order_of
from sightline.hardware import devices
from sightline.hardware.world import World
from sightline.recipe import store

NAME = "demo_classification"
SMALL = ["--data.size=50", "--data.eval-size=50", "--run.device=cpu"]  # a tile has 200 pixels: four for each of these


def tiles(sheet: Path) -> list[list[np.ndarray]]:
    """Cut a sheet of square samples into rows of tiles: where its first column of pixels is nowhere the ground."""
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    inside = (pixels[:, 8:208] != GROUND).any(2).all(1)
    starts = [y for y in range(1, len(inside)) if inside[y] and not inside[y - 1]]
    rows = []
    for top in starts:
        row = [pixels[top : top + 200, left : left + 200] for left in range(8, pixels.shape[1] - 200, 208)]
        rows.append([tile for tile in row if (tile != GROUND).any(2).mean() > 0.9])
    return rows


def first_batch(*flags: str) -> dict[str, torch.Tensor]:
    """The first training batch as the loop of the training gets it."""
    recipe, _ = config.load(NAME, [*SMALL, *flags])
    cpu = devices.select("cpu")
    bound = recipe.data.open("train", recipe.train.seed).bind(cpu, recipe.train.global_batch)
    order = train_order_of(recipe.train, bound, World())
    loader = Loader({"train": (bound, order)}, Run(workers=0), cpu, World(), BadSamples("fail", 0, print), lambda: None)
    loader.seek("train", 0, 1)
    batch = bound.finish(loader.next("train"), torch.float32)
    loader.close()
    return batch


@pytest.mark.parametrize("flags", [[], ["--train.seed=7", "--data.sampling=balanced"], ["--data.mixup=0.5"]], ids=str)
def test_tiles_are_the_first_training_batch(sightline, shapes: Path, tmp_path: Path, flags: list[str]):
    flags = [f"--data.path={shapes}", "--train.global-batch=18", *flags]
    said = sightline("show", NAME, *SMALL, *flags, "--out", tmp_path / "seen.png")
    assert said.code == 0, said
    first, *rest = tiles(tmp_path / "seen.png")
    assert [len(first), *map(len, rest)] == [6, 6, 6, 6]
    batch = first_batch(*flags)["image"]
    recipe = config.load(NAME, flags)[0]
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (recipe.data.mean, recipe.data.std))
    for tile, image in zip([tile for row in rest for tile in row], batch, strict=True):
        expected = ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
        assert np.abs(tile[::4, ::4].astype(int) - expected).max() <= 1
    assert len({tile.tobytes() for tile in first}) > 1  # one image, different draws


def test_the_line_and_the_place_of_the_sheet(sightline, shapes: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = sightline("show", NAME, "--data", shapes, *SMALL)
    assert said.code == 0 and said.out == (
        "data: 10 classes, 80 + 40 images; batch 32 and rate 0.1, as the recipe's 64 leaves one step in an epoch\n"
        "wrote samples.png: 18 training images of 50 x 50; the first row is one image augmented 6 times; label "
        "smoothing 0.1; seed 0\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["samples.png"]
    flags = ["--data", shapes, *SMALL, "--data.mixup=1", "--data.augment=on", "--task.label-smoothing=0"]
    said = sightline("show", NAME, *flags)
    assert "images are mixed (mixup, cutmix), with the share of each label behind its name; seed 0" in said.out
    said = sightline("show", NAME, *flags, "--data.augment=off")
    assert said.out.endswith("samples.png: 18 training images of 50 x 50; seed 0\n")  # nothing is random or mixed


@pytest.mark.parametrize("name", ["sheet.png", "sheet.webp"])
def test_a_sheet_is_replaced_and_another_file_is_not(sightline, shapes: Path, tmp_path: Path, name: str):
    command = ["show", NAME, "--data", shapes, *SMALL, "--out", tmp_path / name]
    for _ in range(2):
        assert sightline(*command).code == 0
    with Image.open(tmp_path / name) as sheet:
        sheet.save(tmp_path / f"mine-{name}")  # as large as a sheet
    for other in ((tmp_path / f"mine-{name}").read_bytes(), b"no image"):
        (tmp_path / name).write_bytes(other)
        said = sightline(*command)
        assert said.code == 2 and f"{name} exists and is not a sheet of `sightline show`" in said.err, said
        assert (tmp_path / name).read_bytes() == other


def objects(root: Path, count: int = 20) -> Path:
    """Write images of one red rectangle each on dark noise, with its box."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        images, boxes = [], []
        (root / split).mkdir(parents=True)
        for number in range(1, count + 1):
            pixels = random.integers(40, 90, (90, 120, 3), dtype=np.uint8)
            wide, tall = random.integers(20, 50, 2).tolist()
            x, y = random.integers(0, 120 - wide), random.integers(0, 90 - tall)
            pixels[y : y + tall, x : x + wide] = (255, 0, 0)
            Image.fromarray(pixels).save(root / split / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "height": 90, "width": 120})
            box = {"bbox": [int(x), int(y), wide, tall], "area": wide * tall, "iscrowd": 0}
            boxes.append({"id": number, "image_id": number, "category_id": 1, **box})
        categories = [{"id": 1, "name": "red"}]
        document = {"images": images, "annotations": boxes, "categories": categories}
        (root / f"{split}.json").write_text(json.dumps(document))
    return root


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return columns[0], rows[0], columns[-1], rows[-1]


def test_a_drawn_box_encloses_its_object(sightline, tmp_path: Path):
    flags = ["--data.size=100", "--data.jitter=off", "--train.global-batch=8", "--run.device=cpu"]
    data = objects(tmp_path / "data")
    said = sightline("show", "demo_detection", "--data.path", data, *flags, "--out", tmp_path / "seen.png")
    assert said.code == 0, said
    rows = tiles(tmp_path / "seen.png")
    assert sum(map(len, rows)) == 22  # six draws, and two batches of eight
    for tile in (tile for row in rows for tile in row):
        red = extent((tile[..., 0] > 200) & (tile[..., 1] < 60) & (tile[..., 2] < 60))
        box = extent((tile == colour_of(1)).all(2))
        assert box[0] <= red[0] and box[1] <= red[1] and red[2] <= box[2] and red[3] <= box[3]
        assert max(abs(a - b) for a, b in zip(red, box, strict=True)) <= 6


def test_a_drawn_mask_lies_on_its_object(sightline, tmp_path: Path):
    random = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (tmp_path / "raw" / folder).mkdir(parents=True)
    for number in range(12):
        across, down = np.meshgrid(np.arange(64), np.arange(64))
        x, y, radius = random.integers(20, 44), random.integers(20, 44), random.integers(8, 16)
        mask = ((across - x) ** 2 + (down - y) ** 2 < radius**2).astype(np.uint8)
        pixels = random.integers(20, 60, (64, 64, 3), dtype=np.uint8)
        pixels[mask > 0, 2] = 250
        Image.fromarray(pixels).save(tmp_path / "raw/images" / f"{number}.png")
        Image.fromarray(mask * 255).save(tmp_path / "raw/masks" / f"{number}.png")
    prepared = sightline("prepare", "decathlon", "--source", tmp_path / "raw", "--out", tmp_path / "data", "--jobs=1")
    assert prepared.code == 0, prepared
    flags = ["--data.folds=3", "--train.global-batch=4", "--data.noise=0", "--data.blur=0", "--run.device=cpu"]
    out = tmp_path / "seen.jpg"
    said = sightline("show", "demo_segmentation", "--data.path", tmp_path / "data", *flags, "--out", out)
    assert said.code == 0 and out.read_bytes()[:2] == b"\xff\xd8", said
    said = sightline("show", "demo_segmentation", "--data.path", tmp_path / "data", *flags, "--out", tmp_path / "a.png")
    for tile in (tile for row in tiles(tmp_path / "a.png") for tile in row):
        line = extent(np.abs(tile.astype(int) - outline_colour(1)).max(2) < 40)
        blue = extent((tile[..., 2].astype(int) - tile[..., 0] > 110) & (tile[..., 2] > 170))
        assert line[0] - 3 <= blue[0] and line[1] - 3 <= blue[1] and blue[2] <= line[2] + 3 and blue[3] <= line[3] + 3
        assert max(abs(a - b) for a, b in zip(line, blue, strict=True)) <= 12  # three voxels of the network


def test_patches_of_volumes_are_drawn(sightline, tmp_path: Path):
    flags = ["--data.path=synthetic:samples=8", "--data.task=04", "--run.device=cpu", "--out", tmp_path / "deep.png"]
    for recipe, what in (("unet3d", "8 training patches of 40 x 56 x 40"), ("unet2d", "6 training slices of 40 x 56")):
        said = sightline("show", recipe, *flags)
        assert f"{what}; the first row is one volume cropped and augmented 6 times; seed 0" in said.out, said
        assert Image.open(tmp_path / "deep.png").width == 1256


def test_a_run_is_shown_with_its_own_fields_and_split(sightline, shapes: Path, tmp_path: Path):
    run, flags = tmp_path / "run", [f"--data.path={shapes / 'train'}", *SMALL, "--train.seed=5"]
    (run / "checkpoints" / "ckpt-00000001").mkdir(parents=True)
    recipe, where = config.load(NAME, [*flags, "--train.global-batch=16", "--run.device=hpu"])
    (run / "config.yaml").write_text(store.dump(*store.at_absolute_paths(recipe, where)))
    kept = recipe.data.open("train", 5).kept["split.json"]
    names = json.loads(kept)["val"]
    (run / "split.json").write_text(json.dumps({"val": names[:1]}))
    assert sightline("show", run).out.startswith(f"wrote {run / 'samples.png'}: 18 training images of 50 x 50; ")
    drawn = tiles(run / "samples.png")
    typed = [*flags, "--train.global-batch=16", "--data.split", run / "split.json", "--out", tmp_path / "a.png"]
    assert sightline("show", NAME, *typed).code == 0
    again = tiles(tmp_path / "a.png")
    assert all(map(np.array_equal, drawn, again))
    assert sightline("show", NAME, *typed[:-4], "--out", tmp_path / "b.png").code == 0
    assert not np.array_equal(tiles(tmp_path / "b.png")[1], drawn[1])  # another split, another order


def test_wrong_words_get_the_usual_errors(sightline, shapes: Path, tmp_path: Path):
    for words, reason in (
        (["show"], "show: which recipe? Available: "),
        (["show", f"--data.path={shapes}", NAME], "show: which recipe? Available: "),
        (["show", NAME, "--recipe", "own.py"], "--recipe is for runs that were made with your own recipe"),
        (["show", "resnet51"], "unknown recipe 'resnet51'; did you mean 'resnet50'"),
        (
            ["show", tmp_path],
            f"{tmp_path} is not a run folder; give a recipe, or a folder that `sightline train` wrote",
        ),
        (["show", "runs/gone"], "runs/gone does not exist; `sightline runs` lists"),
        (["show", NAME, "--data.path", tmp_path / "gone"], "gone' does not exist; give the folder of your data"),
        (["show", NAME], "no data: give --data.path DIR"),
        (["show", NAME, "--data", shapes, "--out", "a.gif"], "--out a.gif is not a name of an image; give one that"),
        (["show", NAME, "--data", shapes, "--bath-size", 3], "did you mean --train.global-batch?"),
    ):
        said = sightline(*words)
        assert said.code == 2 and reason in said.err, said


def test_an_unreadable_image_is_an_error_or_skipped_as_in_training(sightline, shapes: Path, tmp_path: Path):
    shutil.copytree(shapes, tmp_path / "data")
    for file in (tmp_path / "data" / "train").rglob("*[02468].jpg"):
        file.write_bytes(b"\xff\xd8no image")
    flags = ["--data", tmp_path / "data", *SMALL, "--out", tmp_path / "seen.png"]
    said = sightline("show", NAME, *flags)
    assert said.code == 3 and "--data.on-bad-sample skip runs without them" in said.err
    assert not (tmp_path / "seen.png").exists()
    said = sightline("show", NAME, *flags, "--data.on-bad-sample=skip")
    assert said.code == 0 and "warning: sample skipped: " in said.out and "18 training images" in said.out


def test_batches_that_are_replayed_are_shown_as_they_are(sightline, tmp_path: Path):
    data = ["--data.path=synthetic:classes=3,samples=12,size=60", "--data.size=50", "--data.max-boxes=8"]
    static = ["--out", tmp_path / "static", "--steps=2", "--batch=4", *data]
    assert sightline("prepare", "static", *static).code == 0
    typed = ["show", "demo_detection", *data, "--train.global-batch=4", "--run.device=cpu", "--out"]
    said = sightline(*typed, tmp_path / "a.png", "--data.static", tmp_path / "static")
    assert "8 training images of 50 x 50; seed 0" in said.out, said
    assert "4 training images of 50 x 50; seed 0" in sightline(*typed, tmp_path / "b.png", "--data.fake").out
    (first, last), (repeated,) = tiles(tmp_path / "a.png"), tiles(tmp_path / "b.png")
    assert (len(first), len(last), len(repeated)) == (6, 2, 4)
    written = load_file(tmp_path / "static" / "batch-000000.safetensors")["image"]
    colours = ((written * (0.229, 0.224, 0.225) + (0.485, 0.456, 0.406)) * 255).round().clip(0, 255)
    for tile, expected in zip(first, colours, strict=False):
        assert np.median(np.abs(tile[::4, ::4] - expected)) <= 1  # boxes are drawn over some of it


def test_any_recipe_part_may_lack_a_drawing(tmp_path: Path, shapes: Path):
    from sightline.commands.show_sheet import draw_sheet
    from sightline.errors import UsageError
    from sightline.parts import Task

    class Own(Task):
        headline = "x"
        loss = predict = metric = None

    recipe, run = config.load(NAME, [f"--data.path={shapes}", *SMALL])
    with pytest.raises(UsageError, match="Own has no `seen`"):
        draw_sheet(replace(recipe, task=Own()), run, None, tmp_path / "a.png")
