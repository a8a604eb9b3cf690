"""Segmentation of images as a user types it: train, evaluate, predict, export, for any channels, bits and values."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline import api

HERE = ["--run.device=cpu", "--run.workers=0", "--train.precision=fp32", "--run.progress=plain"]
SCRATCH = ["--weights=none", "--model.arch=resnet18", "--model.width=16"]
SHORT = [*SCRATCH, "--data.size=32", "--train.max-steps=2", "--train.global-batch=4", "--run.report=off", *HERE]
COLOURS = np.array([(0, 0, 0), (255, 0, 0), (0, 0, 255)], np.uint8)


def draw(folder: Path, count: int = 10, channels: int = 3, bits: int = 8, values: tuple[int, ...] = (0, 255)) -> Path:
    """Draw discs on noise, a brightness for each value of the masks; images have any size."""
    for sub in ("images", "masks"):
        (folder / sub).mkdir(parents=True)
    for number in range(count):
        random = np.random.default_rng(number)
        height, width = random.integers(56, 90, 2)
        pixels, mask = random.integers(0, 110, (height, width, channels)), np.zeros((height, width), int)
        y, x = np.mgrid[:height, :width]
        for _ in range(random.integers(1, 4)):
            kind, radius = random.integers(1, len(values)), random.integers(8, 18)
            inside = (y - random.integers(height)) ** 2 + (x - random.integers(width)) ** 2 < radius**2
            mask[inside], pixels[inside] = kind, pixels[inside] // 2 + 60 + 100 * kind // (len(values) - 1)
        stored = (pixels.clip(0, 255) * (20 if bits == 16 else 1)).astype(np.uint16 if bits == 16 else np.uint8)
        Image.fromarray(stored[..., 0] if channels == 1 else stored).save(folder / "images" / f"{number:02}.png")
        Image.fromarray(np.array(values, np.uint8)[mask]).save(folder / "masks" / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def discs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("discs") / "data", 30)


def test_drawn_discs_are_learnt_and_masks_come_back_as_they_came(sightline, discs: Path, tmp_path: Path):
    """The whole path; two seconds, most of them in training."""
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = ["--model.width=8", "--data.size=64", "--train.global-batch=8", "--optimizer.lr=0.02"]
    steps = ["--train.epochs=2", "--train.min-epoch-steps=25"]
    said = sightline("train", "segmentation", "--data", discs, "--out", run, *SCRATCH, *sizes, *steps, *HERE)
    assert said.code == 0, said
    assert "data: 2 classes, 24 + 6 images; values 0, 255 renumbered; no val split, so 6 images validate" in said.out
    assert not {"volume", "case", "slice", "fold"} & set(said.out.replace(",", " ").split()), said
    assert not {"were not drawn", "could not be written"} & set(said.out.splitlines())
    scores = json.loads((run / "scores-best.json").read_text())
    assert scores["values"]["miou"] > 0.8 and scores["values"]["samples"] == 6
    assert [row["class"] for row in scores["tables"]["classes"]] == ["0", "255"]
    page = (run / "report.html").read_text()
    assert "mean IoU" in page and "pixels of train" in page and "training images of 64 x 64" in page

    said = sightline("evaluate", run, *HERE)
    assert said.code == 0 and f"miou {scores['values']['miou']:.4f}" in said.out and "  iou " in said.out, said
    assert f"  worst: {discs}/images/" in said.out and "  IoU 0." in said.out

    said = sightline("predict", run, *sorted(discs.glob("images/0*.png")), "--out", out, *HERE)
    assert said.code == 0 and "10 of 10 files predicted" in said.out, said
    rows = list(csv.DictReader((out / "predictions.csv").open()))
    shared = union = 0
    for row in rows:
        found = np.asarray(Image.open(out / row["mask"]))
        truth = np.asarray(Image.open(discs / "masks" / Path(row["file"]).name))
        assert found.shape == truth.shape and set(np.unique(found).tolist()) <= {0, 255}
        assert int(row["255 pixels"]) == (found == 255).sum()
        shared, union = shared + ((found & truth) == 255).sum(), union + ((found | truth) == 255).sum()
    assert shared / union > 0.7
    drawn = Image.open(out / "00.png")
    assert drawn.size[0] >= 360 and len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 1000


@pytest.mark.parametrize(
    ("channels", "bits", "values"),
    [(4, 8, (1, 3, 7)), (1, 16, (0, 1, 255)), pytest.param(1, 8, (0, 255), marks=pytest.mark.slow)],
)
def test_any_channels_bits_and_values_go_all_the_way(
    sightline, tmp_path: Path, channels: int, bits: int, values: tuple[int, ...]
):
    data, run, out = draw(tmp_path / "data", 10, channels, bits, values), tmp_path / "run", tmp_path / "out"
    assert sightline("check", "segmentation", "--data", data).code == 0
    said = sightline("train", "segmentation", "--data", data, "--out", run, *SHORT)
    assert said.code == 0, said
    said = sightline("evaluate", run, *HERE)
    assert said.code == 0 and "on 2 samples" in said.out, said
    said = sightline("evaluate", run, "--data.split=all", "--run.out", tmp_path / "all", *HERE)
    assert said.code == 0 and "on 10 samples" in said.out, said
    said = sightline("predict", run, data / "images" / "00.png", "--out", out, *HERE)
    assert said.code == 0, said
    [row] = json.loads((out / "predictions.json").read_text())["files"]
    counted = [value for value in values if value != 255 or set(values) == {0, 255}]
    assert [each["id"] for each in row["found"]] == counted
    mask = np.asarray(Image.open(out / "00_mask.png"))
    assert mask.shape == Image.open(data / "images" / "00.png").size[::-1]
    assert set(np.unique(mask).tolist()) <= set(counted)
    drawn = np.asarray(Image.open(out / "00.png").convert("L"))[40:-100, 100:-100]
    assert drawn.max() > 150, "16 bits of which few are used are drawn too"
    pixels = np.asarray(Image.open(data / "images" / "00.png"))
    [found] = api.predict(str(run), [pixels], flags={"run.device": "cpu"})
    assert np.array_equal(np.array(counted)[found.mask], mask) and "data:image/jpeg" in found._repr_html_()
    other = draw(tmp_path / "other", 2, 3 if channels == 1 else 1)
    said = sightline("predict", run, other / "images" / "00.png", "--out", tmp_path / "none", *HERE)
    wrong = channels in (1, 4)  # a network for colours takes grey images too
    assert (said.code != 0) == wrong and (f"the network expects {channels}" in said.out + said.err) == wrong, said


def test_coloured_masks_come_back_in_their_colours(sightline, tmp_path: Path):
    data = draw(tmp_path / "data", 10, values=(0, 1, 2))
    for path in (data / "masks").iterdir():
        Image.fromarray(COLOURS[np.asarray(Image.open(path))]).save(path)
    said = sightline("train", "segmentation", "--data", data, "--out", tmp_path / "run", *SHORT)
    assert said.code == 0, said
    said = sightline("predict", tmp_path / "run", data / "images" / "00.png", "--out", tmp_path / "out", *HERE)
    assert said.code == 0, said
    mask = Image.open(tmp_path / "out" / "00_mask.png")
    assert mask.mode == "RGB" and {colour for _, colour in mask.getcolors()} <= set(map(tuple, COLOURS.tolist()))


# Torch takes two seconds to write a ResNet with a decoder; tests/recipes/test_export.py does.
ONE_LAYER = '''
"""segmentation with one convolution."""
from dataclasses import dataclass, replace

from torch import nn

from sightline.parts import ModelConfig
from sightline.recipes import demo_segmentation, segmentation


@dataclass(frozen=True)
class NetConfig(ModelConfig):
    def build(self, spec):
        net = nn.Conv2d(spec.channels, len(spec.classes), 5, padding=2)
        net.patch, net.any_size = spec.size, True
        return net


def recipe():
    return replace(segmentation.recipe(), name="one_layer", model=NetConfig(), plan=None)
'''


def test_an_exported_network_finds_what_the_run_finds_in_windows(sightline, discs: Path, tmp_path: Path):
    pytest.importorskip("onnxscript", reason="needs the extra export: onnx, onnxscript, onnxruntime")
    run, image, recipe = tmp_path / "run", discs / "images" / "00.png", tmp_path / "one_layer.py"
    recipe.write_text(ONE_LAYER)
    short = [flag for flag in SHORT if flag not in SCRATCH]
    assert sightline("train", recipe, "--data", discs, "--out", run, *short).code == 0
    said = sightline("export", run, "--recipe", recipe)
    assert said.code == 0 and "inputs of the val split: largest relative difference of logits" in said.out, said
    masks = []
    for network, flags in ((run, ["--task.whole-pixels=0"]), (run / "model.onnx", [])):
        out = tmp_path / network.name
        words = ["predict", network, image, "--out", out, "--recipe", recipe]
        said = sightline(*words, "--train.precision=fp32", "--run.device=cpu", *flags)
        assert said.code == 0, said
        masks.append(np.asarray(Image.open(out / "00_mask.png")))
    assert (masks[0] == masks[1]).mean() > 0.999 and 0.1 < (masks[0] > 0).mean() < 0.9


def test_two_images_are_enough_and_any_size_is_predicted(sightline, tmp_path: Path):
    data, run, out = draw(tmp_path / "two", 2), tmp_path / "run", tmp_path / "out"
    mask = data / "masks" / "00.png"
    Image.fromarray(np.zeros_like(np.array(Image.open(mask)))).save(mask)  # without an object
    said = sightline("train", "segmentation", "--data", data, "--out", run, *SHORT)
    assert said.code == 0 and "data: 2 classes, 1 + 1 images" in said.out, said
    (tmp_path / "any").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (150, 210, 3), dtype=np.uint8)
    for name, part in (("large", noise), ("tiny", noise[:20, :9])):
        Image.fromarray(part).save(tmp_path / "any" / f"{name}.png")
    windows = ["--task.whole-pixels=5000", "--no-draw"]
    said = sightline("predict", run, tmp_path / "any", "--out", out, *windows, *HERE)
    assert said.code == 0 and "2 of 2 files predicted" in said.out, said
    found = {path.name: np.array(Image.open(path)) for path in out.glob("*_mask.png")}
    assert {name: each.shape for name, each in found.items()} == {
        "large_mask.png": (150, 210),
        "tiny_mask.png": (20, 9),
    }
    assert all(set(np.unique(each)) <= {0, 255} for each in found.values())


def test_too_little_to_train_on_is_said(sightline, tmp_path: Path):
    said = sightline("train", "segmentation", "--data", draw(tmp_path / "one", 1), *SHORT)
    assert said.code == 3 and "has 1 images; at least 2 are needed" in said.err, said
    empty = draw(tmp_path / "empty", 4, values=(0, 0))
    said = sightline("train", "segmentation", "--data", empty, *SHORT)
    assert said.code == 3 and "the masks hold 0 alone, 2 classes are needed" in said.err, said
    assert "skip" not in said.err  # would not help


def test_pairs_beside_each_other_and_an_image_that_cannot_be_read(sightline, discs: Path, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    for path in sorted((discs / "images").iterdir())[:10]:
        shutil.copy(path, data / path.name)
        shutil.copy(discs / "masks" / path.name, data / f"{path.stem}_mask.png")
    (data / "03.png").write_bytes((data / "03.png").read_bytes()[:-200])
    said = sightline("train", "segmentation", "--data", data, "--out", tmp_path / "run", *SHORT)
    assert said.code == 3 and "03.png" in said.err, said
    flags = ["--data.on-bad-sample=skip", "--train.epochs=1", "--train.max-steps=0"]
    said = sightline("train", "segmentation", "--data", data, "--out", tmp_path / "run", *SHORT, *flags)
    assert said.code == 0, said


def test_volumes_are_refused_with_what_reads_them(sightline, tmp_path: Path):
    nibabel = pytest.importorskip("nibabel")
    for sub in ("imagesTr", "labelsTr"):
        (tmp_path / sub).mkdir()
        nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), tmp_path / sub / "a.nii.gz")
    said = sightline("train", "segmentation", "--data", tmp_path, *SHORT)
    for words in ("sightline prepare decathlon", "sightline train unet2d", "sightline train finetune_segmentation"):
        assert words in said.err, said
    said = sightline("train", "segmentation", "--data", tmp_path / "imagesTr", *SHORT)
    assert "volumes in files of NIfTI" in said.err and "prepare decathlon" in said.err, said


def test_a_recipe_for_volumes_names_the_one_for_images(sightline, discs: Path):
    said = sightline("train", "unet2d", "--data", discs, "--run.device=cpu")
    assert said.code == 2 and f"`sightline train segmentation --data.path {discs}` needs no preparation" in said.err
