"""Scores of masks over real ranks, which hold different numbers of images."""

import json
from pathlib import Path

import pytest
import warm

from sightline import api, cli

HERE = ["--run.device=cpu", "--run.workers=0"]


def evaluate(run: Path) -> None:
    """The command, on one of two ranks."""
    assert cli.main(["evaluate", str(run), *HERE]) == 0


def test_two_ranks_count_the_pixels_of_thirteen_images_as_one_does(tmp_path: Path):
    flags = """--model.arch=resnet18 --model.width=4 --data.path=synthetic:classes=4,samples=104,size=40 --data.size=32
        --train.epochs=1 --train.global-batch=8 --train.precision=fp32 --train.min-epoch-steps=0 --train.head-epochs=0
        --run.workers=0 --run.report=off --run.device=cpu --run.progress=off""".split()
    api.train(*api.load("segmentation", [*flags, f"--run.out={tmp_path}"]))
    alone = api.evaluate(str(tmp_path), HERE)
    assert alone.values["samples"] == 13 and 0 < alone.values["miou"] < 1
    said = warm.run(__file__, tmp_path, 2, function="evaluate")
    [file] = tmp_path.glob("scores-ckpt-*.json")
    found = json.loads(file.read_text())
    assert found["tables"] == alone.tables and found["values"] == pytest.approx(alone.values, rel=1e-9)
    assert [row["index"] for row in found["worst"]] == [row["index"] for row in alone.worst]
    assert said.count("  pixel_accuracy ") == 1
