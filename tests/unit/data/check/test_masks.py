"""`check` of images with masks: each thing that can be wrong is found, named and nothing else; files and outlines."""

import os
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sightline.data.check.masks import check_masks
from sightline.data.sources import SourceOptions

MADE = runpy.run_path(str(Path(__file__).parents[1] / "sources" / "mask_layouts.py"))
LAYOUTS = MADE["LAYOUTS"]


def check(path: Path, classes: int = 0, decode: bool = True, **options):
    return check_masks(str(path), "auto", SourceOptions(**options), classes, decode, 1, lambda *_: None)


def problems(report) -> set[tuple[str, str, str]]:
    return {(each.kind, each.split, each.where) for each in report.problems}


@pytest.fixture
def data():
    return MADE["drawn"]()


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("layout", ["split_inside", "roboflow", "voc", "coco", "yolo"])
def test_good_data_have_no_problems_and_all_is_counted(data, tmp_path, layout, decode):
    LAYOUTS[layout](data, tmp_path)
    report = check(tmp_path, decode=decode)
    assert report.problems == [] and list(report.facts) == ["train", "val", "test"]
    for split, entries in data.items():
        facts = report.facts[split]
        masks = [entry.mask for entry in entries]
        pixels = sum(mask.size for mask in masks)
        assert (facts["images"], facts["unreadable"], facts["classes"]) == (len(entries), 0, 4)
        assert list(facts["images per class"].values()) == [
            sum(bool((mask == number).any()) for mask in masks) for number in range(4)
        ]
        assert list(facts["pixels per class"].values()) == [
            f"{sum((mask == number).sum() for mask in masks) / pixels:.2%}" for number in range(4)
        ]
        assert facts["pixels ignored"] == "0.00%"
        sides = [mask.shape[0] for mask in masks]
        assert facts["height"] == {"min": min(sides), "median": np.median(sides), "max": max(sides)}


def test_ignored_pixels_are_counted(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    for file in (tmp_path / "masks" / "train").iterdir():
        mask = np.array(Image.open(file))
        mask[:] = 255
        mask[0, :4] = (0, 1, 2, 3)
        Image.fromarray(mask).save(file)
    pixels = sum(entry.mask.size for entry in data["train"])
    assert check(tmp_path).facts["train"]["pixels ignored"] == f"{1 - 24 / pixels:.2%}"


def test_every_problem_is_listed_by_its_file(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    masks = tmp_path / "masks"
    os.remove(masks / "train" / "train_0.png")
    os.remove(masks / "val" / "val_0.png")
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(masks / "train" / "train_1.png")
    (masks / "test" / "test_0.png").write_bytes(b"no image")
    (tmp_path / "images" / "train" / "train_2.jpg").write_bytes(b"no image")
    shutil.copy(masks / "train" / "train_3.png", masks / "train" / "other.png")
    assert problems(check(tmp_path)) == {
        ("image without a mask", "train", "train/train_0.jpg"),
        ("image without a mask", "val", "val/val_0.jpg"),
        ("size differs", "train", "train/train_1.png"),
        ("unreadable", "test", "test/test_0.png"),
        ("unreadable image", "train", "train/train_2.png"),
        ("mask without an image", "train", "other.png"),
    }


def test_masks_of_other_names_are_none(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    for file in (tmp_path / "masks" / "val").iterdir():
        file.rename(file.with_name(f"other_{file.name}"))
    report = check(tmp_path)
    count = len(data["val"])
    [said] = [each for each in report.problems if each.split == "val" and each.kind == "no masks"]
    assert said.where == str(tmp_path / "images" / "val")
    assert said.text == (
        f"none of the {count} images has a mask in {tmp_path / 'masks' / 'val'}; give --data.mask-pattern if the names "
        f"differ otherwise"
    )


def test_images_in_two_splits_and_classes_of_one(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    shutil.copy(tmp_path / "images" / "train" / "train_0.jpg", tmp_path / "images" / "val" / "val_1.jpg")
    mask = np.array(Image.open(tmp_path / "masks" / "train" / "train_0.png"))
    mask[0, 0] = 7
    Image.fromarray(mask).save(tmp_path / "masks" / "val" / "val_1.png")
    report = check(tmp_path, classes=3)
    assert problems(report) == {
        ("same image in train and val", "train", "train/train_0.jpg"),
        ("class without training", "val", "7"),
        ("number of classes", "train", str(tmp_path)),
    }


def test_damage_that_only_decoding_finds(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    file = tmp_path / "images" / "train" / "train_1.jpg"
    Image.fromarray(data["train"][1].pixels).save(file.with_suffix(".png"))
    os.remove(file)
    whole = bytearray(file.with_suffix(".png").read_bytes())
    whole[len(whole) // 2] ^= 255
    file.with_suffix(".png").write_bytes(whole)
    assert check(tmp_path, decode=False).problems == []
    assert problems(check(tmp_path)) == {("unreadable", "train", "train/train_1.png")}


def test_soft_edges_are_a_problem_of_the_whole(data, tmp_path):
    LAYOUTS["split_inside"](data, tmp_path)
    for split in ("train", "val"):
        for file in (tmp_path / "masks" / split).iterdir():
            soft = Image.fromarray(255 * (np.array(Image.open(file)) > 0).astype(np.uint8))
            soft.resize((7, 7)).resize(soft.size, Image.Resampling.BICUBIC).save(file)
    assert {kind for kind, _, _ in problems(check(tmp_path))} == {"soft edges"}


@pytest.mark.parametrize("layout", ["coco", "yolo"])
def test_outlines_that_are_wrong(data, tmp_path, layout):
    LAYOUTS[layout](data, tmp_path)
    if layout == "coco":
        file = tmp_path / "annotations" / "instances_train.json"
        text = file.read_text()
        at = text.index('"segmentation": [[')
        file.write_text(text[:at] + text[at:].replace("[[", "[[true, ", 1))
    else:
        (tmp_path / "train" / "labels" / "train_0.txt").write_text("0 0.5 0.5 0.1 0.1\n")
    report = check(tmp_path)
    assert len(report.problems) == 1 and report.problems[0].split == "train"
    assert "a polygon" in report.problems[0].text or "is a box" in report.problems[0].text
