"""A validation loss after a few steps: batch-norm statistics explain it, and one line says so."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sightline import api
from sightline.train.warnings import young_statistics

SMALL = ["--model.width=16", "--data.size=32", "--train.global-batch=16", "--train.precision=fp32", "--run.workers=0"]
SHORT = ["--train.epochs=1", "--run.report=off", "--run.device=cpu", "--run.progress=plain"]
LINE = "the validation loss is this high because batch-norm statistics lag behind the weights; it means little"


def test_a_high_loss_after_a_few_steps_is_that_of_the_statistics(sightline, shapes: Path, tmp_path: Path):
    """The same weights with statistics taken again over the training images have an ordinary loss."""
    flags = ["--data.path", shapes, "--run.out", tmp_path / "run", "--lr=0.05", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.code == 0 and said.out.count(LINE) == 1, said
    assert "it means little before about 40 steps, and this is step 5 (docs/reference/runs.md)" in said.out
    told = json.loads((tmp_path / "run" / "scores-best.json").read_text())["values"]["loss"]
    model = api.model(tmp_path / "run", device="cpu")
    images = {
        split: [(model.preprocess(file), model.classes.index(file.parent.name)) for file in sorted(files)]
        for split in ("train", "val")
        if (files := [file for file in (shapes / split).rglob("*.*") if file.parent.name in model.classes])
    }
    batches = {split: torch.stack([image for image, _ in pairs]) for split, pairs in images.items()}
    labels = torch.tensor([label for _, label in images["val"]])

    @torch.no_grad()
    def loss() -> float:
        return F.cross_entropy(model.network.eval()(batches["val"]), labels).item()

    assert loss() == pytest.approx(told, rel=1e-2)
    for layer in model.network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.network.train()(batches["train"])
    assert told > 3 * loss()


def test_an_ordinary_loss_is_not_explained(sightline, shapes: Path, tmp_path: Path):
    flags = ["--data.path", shapes, "--run.out", tmp_path / "run", "--lr=0.001", *SMALL, *SHORT]
    said = sightline("train", "demo_classification", *flags)
    assert said.code == 0 and LINE not in said.out, said


@pytest.mark.parametrize(
    ("layer", "step", "validated", "explains"),
    [
        (nn.BatchNorm2d(2), 39, 3.1, True),
        (nn.BatchNorm2d(2), 40, 3.1, False),  # 2 % of the first statistics are left
        (nn.BatchNorm2d(2, momentum=0.01), 399, 3.1, True),
        (nn.BatchNorm2d(2, momentum=0.01), 400, 3.1, False),
        (nn.BatchNorm2d(2), 39, 2.9, False),
        (nn.BatchNorm2d(2), 39, float("nan"), False),
        (nn.BatchNorm2d(2, momentum=None), 1, 100.0, False),  # a plain mean
        (nn.BatchNorm2d(2, track_running_stats=False), 1, 100.0, False),
        (nn.InstanceNorm2d(2), 1, 100.0, False),
    ],
)
def test_only_young_statistics_explain_a_loss_three_times_as_high(layer, step: int, validated: float, explains: bool):
    assert bool(young_statistics(nn.Sequential(layer), step, 1.0, validated)) == explains
