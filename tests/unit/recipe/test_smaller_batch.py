"""The batch that a recipe takes for few samples: the largest power of two that leaves two steps in an epoch."""

import json
import os
import runpy
from pathlib import Path

import pytest

from sightline import cli, config
from sightline.data.sources import decathlon
from sightline.hardware import devices

MASKS = runpy.run_path(str(Path(__file__).resolve().parents[1] / "data/prepare/raw_layouts.py"))


def batch_of(recipe: str, path: Path | str, *flags: str) -> str:
    """The batch that the data decide; "" for the recipe's own."""
    decided, _ = config.load(recipe, [f"--data.path={path}", *flags])
    is_smaller = decided.origins.get("train.global_batch", "").startswith("derived")
    return str(decided.train.global_batch) if is_smaller else ""


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        *[(1, ""), (2, "1"), (3, "1"), (4, "2"), (13, "4"), (14, "4"), (15, "4"), (16, "8"), (31, "8"), (32, "16")],
        *[(62, "16"), (63, "16"), (64, "32"), (126, "32"), (127, "32"), (128, "")],
    ],
)
def test_few_images_take_the_largest_batch_that_leaves_two_steps(samples: int, batch: str):
    assert batch_of("demo_classification", f"synthetic:classes=2,samples={samples},size=8") == batch
    if batch:
        assert samples // int(batch) >= 2 > samples // (2 * int(batch))


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images with masks, prepared: 24 of them train."""
    out = tmp_path_factory.mktemp("flat")
    MASKS["pictures"](out / "raw", cases=30)
    where = ["--source", str(out / "raw"), "--out", str(out / "prepared")]
    assert cli.main(["prepare", "decathlon", *where, "--jobs=1"]) == 0
    return out / "prepared"


def with_cases(folder: Path, out: Path, count: int, depth: int = 1, dim: int = 2) -> Path:
    """The plan of a prepared folder with another number of cases and slices; their arrays are not read."""
    plan = json.loads((folder / "plan.json").read_text())
    plan["cases"] = plan["cases"][:count]
    for case in plan["cases"]:
        case["shape"][0] = depth
    plan["dim"] = dim
    if dim == 3:
        plan["spec"]["size"] = [depth, *plan["spec"]["size"]]
        plan["spec"]["spacing"] = [1.0, 1.0, 1.0]
    os.makedirs(out)
    (out / "plan.json").write_text(json.dumps(plan))
    return out


@pytest.mark.parametrize(
    # With 5 folds the first holds out count / 5, rounded up. demo_segmentation has batch 16 of at least 2 volumes.
    ("count", "depth", "batch"),
    [
        (30, 1, "8"),  # 24 to train on, one slice each: 1 step of 16, 3 of 8
        (18, 1, "4"),  # 14: 3 of 4, 1 of 8
        (20, 1, "8"),  # 16: 2 of 8
        (6, 1, "2"),  # 4: a batch has 2 volumes at least
        (5, 2, "4"),  # 4 of two slices: 4 slices are of 2 volumes
        (13, 3, "8"),  # 10 of three: 16 slices are 2 of each of 8 volumes, 8 are 2 of each of 4
        (30, 2, ""),  # 24 of two: 3 steps of 16
        (5, 16, ""),  # 4 of 16: 2 steps of 16
    ],
)
def test_slices_take_a_batch_that_leaves_two_steps(flat: Path, tmp_path: Path, count: int, depth: int, batch: str):
    folder = with_cases(flat, tmp_path / "few", count, depth)
    assert batch_of("demo_segmentation", folder) == batch
    training = count - -(-count // 5)
    taken = int(batch or 16)
    assert training // decathlon.volumes_of(taken, 2, depth) >= 2
    assert not batch or training // decathlon.volumes_of(2 * taken, 2, depth) < 2


def test_volumes_count_one_each_in_3d(flat: Path, tmp_path: Path):
    folder = with_cases(flat, tmp_path / "deep", 15, depth=8, dim=3)
    assert batch_of("demo_segmentation", folder, "--data.dim=3", "--data.nvol=1") == "4"  # 12 to train on


def test_a_batch_of_slices_stays_where_it_was_typed_or_cannot_help(flat: Path, tmp_path: Path):
    assert batch_of("demo_segmentation", flat, "--train.global-batch=16") == ""
    assert batch_of("demo_segmentation", flat, "--train.last-batch=pad") == ""  # 24: one full batch and a padded one
    assert batch_of("demo_segmentation", flat, "--data.nvol=16") == ""  # a smaller batch has no room for them
    assert batch_of("demo_segmentation", flat, "--data.folds=1") == ""


def test_a_padded_batch_that_is_never_full_becomes_smaller(flat: Path, tmp_path: Path):
    assert batch_of("unet2d", flat) == "8"  # 24 train: 3 steps, where one of 64 would repeat each twice
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("train:\n  global_batch: 64\n")
    assert batch_of("unet2d", flat, f"--run.out={run}") == ""
    assert batch_of("resnet50_mlperf", "synthetic:classes=2,samples=2047,size=8") == "512"
    assert batch_of("resnet50_mlperf", "synthetic:classes=2,samples=2048,size=8") == ""  # its own batch, once


@pytest.mark.parametrize("below", ["", "fold-0"])
def test_a_run_that_began_with_one_step_in_an_epoch_keeps_its_batch(flat: Path, tmp_path: Path, below: str):
    (tmp_path / "run" / below).mkdir(parents=True)
    (tmp_path / "run" / below / "config.yaml").write_text("train:\n  global_batch: 16\n")
    assert batch_of("demo_segmentation", flat, f"--run.out={tmp_path / 'run'}") == ""
    assert batch_of("demo_segmentation", flat, f"--run.out={tmp_path / 'other'}") == "8"


def test_images_have_no_slices_to_share_among_volumes(flat: Path):
    data = config.load("demo_segmentation", [f"--data.path={flat}"])[0].data
    bound = data.open("train", 0).bind(devices.select("cpu"), 8)
    assert 8 // bound.samples_per_item == 8 > data.nvol and not any("nvol" in note for note in bound.notes)
