"""Promises of the U-Net recipe beyond those of all recipes: it learns four volumes by heart, to a named Dice."""

from pathlib import Path

import numpy as np
import pytest

from sightline.data.segmentation import SegmentationData
from sightline.data.sources.decathlon import folds

RECIPE = "unet2d"
VOLUMES = 4


@pytest.fixture
def same_held_out(blobs, tmp_path: Path) -> Path:
    """Four volumes, each of which lies on both sides of the first of two folds."""
    numbers = [0] * 2 * VOLUMES
    held_out = folds(len(numbers), 2)[0].tolist()
    trained = [place for place in range(len(numbers)) if place not in held_out]
    for number, (one, other) in enumerate(zip(trained, held_out, strict=True)):
        numbers[one] = numbers[other] = number
    folder = blobs(tmp_path / "volumes", numbers)
    sides = [SegmentationData(path=str(folder), task="own", folds=2).source(split) for split in ("train", "val")]
    for number in range(VOLUMES):
        assert np.array_equal(*(side.image(number) for side in sides))
        assert np.array_equal(*(side.label(number) for side in sides))
    return folder


@pytest.mark.slow
def test_it_learns_four_volumes_by_heart(same_held_out: Path, tmp_path: Path, train):
    """Augmented, with both coarser outputs, through the whole of train()."""
    flags = [f"--data.path={same_held_out}", "--data.folds=2", "--optimizer.lr=0.02", "--model.width=6"]
    flags += ["--train.epochs=20", "--train.eval-every-epochs=20", "--run.checkpoint-every-epochs=20"]
    before = train(RECIPE, tmp_path / "before", *flags, "--train.max-steps=1")
    assert before.scores.values["volumes"] == VOLUMES and before.scores.values["dice"] < 0.4
    after = train(RECIPE, tmp_path / "after", *flags)
    assert after.scores.values["dice"] > 0.8
    assert [row["dice"] > 0.8 for row in after.scores.tables["classes"]] == [True, True]
    losses = [line["loss"] for line in after.events("train")]
    assert sum(losses[-10:]) < sum(losses[:10]) / 2
