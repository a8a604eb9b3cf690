"""Masks as they are written: the numbers or colours of the files of the training, drawings, JSON and CSV."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.errors import UsageError
from sightline.inference.mask_files import MaskPredictions, as_stored
from sightline.inference.reporter import PredictJob
from sightline.parts import DataSpec, PredictOptions

CLASSES = ("ground", "road", "car")


def spec_of(*values: int, coloured: bool = False) -> DataSpec:
    return DataSpec(CLASSES[: len(values)], 3, (16, 16), (0.5,) * 3, (0.2,) * 3, values, coloured=coloured)


def test_masks_keep_the_numbers_of_the_files():
    mask = np.array([[0, 1], [2, 1]], np.uint8)
    grey = as_stored(mask, spec_of(0, 128, 255))
    assert grey.mode == "L" and np.asarray(grey).tolist() == [[0, 128], [255, 128]]
    deep = as_stored(mask, spec_of(0, 128, 4000))
    assert np.asarray(deep).tolist() == [[0, 128], [4000, 128]]
    colours = as_stored(mask, spec_of(0x000000, 0x80FF01, 0x0000FF, coloured=True))
    assert colours.mode == "RGB" and np.asarray(colours)[1].tolist() == [[0, 0, 255], [128, 255, 1]]


def reported(folder: Path, options: PredictOptions, *names: str, coloured: bool = False) -> dict:
    files = {}
    for name in names:
        files[name] = folder / name
        Image.fromarray(np.full((6, 8, 3), 90, np.uint8)).save(files[name])
    values = (0x000000, 0xFF0000) if coloured else (0, 255)
    job = PredictJob(folder / "out", files, spec_of(*values, coloured=coloured), options, lambda _: None)
    reporter = MaskPredictions(job)
    logits = torch.zeros(len(names), 2, 7, 9)
    logits[:, 1, :3, :8] = 2.0
    predictions = {"logits": logits, "classes": logits.argmax(1).to(torch.uint8)}
    reporter.add(list(names), predictions, {"extent": torch.tensor([[6, 8]] * len(names))})
    return reporter.write({"recipe": "segmentation"})


def test_a_file_gets_a_mask_a_drawing_and_a_row(tmp_path: Path):
    document = reported(tmp_path, PredictOptions(probabilities=True), "a.png")
    out = tmp_path / "out"
    mask = np.asarray(Image.open(out / "a_mask.png"))
    assert mask.shape == (6, 8) and set(mask[:3].ravel()) == {255} and set(mask[3:].ravel()) == {0}
    assert Image.open(out / "a.png").size[0] >= 360
    shares = np.load(out / "a.npy")
    assert shares.shape == (2, 6, 8) and shares[1, 0, 0] == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert json.loads((out / "predictions.json").read_text()) == document
    assert (document["classes"], document["values"]) == (["ground", "road"], [0, 255])
    [row] = document["files"]
    assert row["found"] == [
        {"class": "ground", "id": 0, "pixels": 24, "percent": 50.0},
        {"class": "road", "id": 255, "pixels": 24, "percent": 50.0},
    ]
    [line] = csv.DictReader((out / "predictions.csv").open())
    assert line == {
        "file": str(tmp_path / "a.png"),
        "mask": "a_mask.png",
        "ground percent": "50.0",
        "ground pixels": "24",
        "road percent": "50.0",
        "road pixels": "24",
    }


def test_colours_are_written_as_people_write_them(tmp_path: Path):
    document = reported(tmp_path, PredictOptions(draws=False), "a.png", coloured=True)
    assert document["values"] == ["#000000", "#ff0000"]
    assert not (tmp_path / "out" / "a.png").exists()


def test_what_would_be_lost_or_means_nothing_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="both become a_mask.png"):
        reported(tmp_path, PredictOptions(), "a.png", "a.jpg")
    with pytest.raises(UsageError, match="--top 3"):
        reported(tmp_path, PredictOptions(top=3), "a.png")


def test_a_file_that_changed_meanwhile_is_listed(tmp_path: Path):
    Image.fromarray(np.zeros((5, 5, 3), np.uint8)).save(tmp_path / "a.png")
    job = PredictJob(tmp_path / "out", {"a.png": tmp_path / "a.png"}, spec_of(0, 255), PredictOptions(), print)
    reporter = MaskPredictions(job)
    empty = {"logits": torch.zeros(1, 2, 6, 8), "classes": torch.zeros(1, 6, 8, dtype=torch.uint8)}
    reporter.add(["a.png"], empty, {"extent": torch.tensor([[6, 8]])})
    assert "has changed" in reporter.write({})["unreadable"][0]["reason"]


def test_the_screen_names_the_five_classes_with_most_pixels(tmp_path: Path):
    classes = tuple("abcdefg")
    spec = DataSpec(classes, 3, (16, 16), (0.5,) * 3, (0.2,) * 3, tuple(range(7)))
    Image.fromarray(np.zeros((1, 28, 3), np.uint8)).save(tmp_path / "x.png")
    said: list[str] = []
    job = PredictJob(tmp_path / "out", {"x.png": tmp_path / "x.png"}, spec, PredictOptions(draws=False), said.append)
    reporter = MaskPredictions(job)
    mask = torch.repeat_interleave(torch.arange(7), torch.arange(7, 0, -1))[None, None].to(
        torch.uint8
    )  # 7 of a, 6 of b
    reporter.add(["x.png"], {"classes": mask}, {"extent": torch.tensor([[1, 28]])})
    shares = [f"{name} {100 * (7 - place) / 28:.2f} %" for place, name in enumerate("abcde")]
    assert said == ["  ".join(["x.png", "28x1", *shares])]
