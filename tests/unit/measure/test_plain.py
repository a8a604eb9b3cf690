"""The plain loops beside whole runs: every phase is marked, every batch is trained on, the checkpoint is real."""

import itertools
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

PHASES = ["import", "listing", "first step", *["training", "evaluation", "checkpoints"] * 2]


def marks_of(options: dict, began: float, phases: list[str]) -> list[dict]:
    """What a loop has marked; all of it between its start and now, one after the other."""
    marks = json.loads(Path(options["marks"]).read_text())
    assert [mark["phase"] for mark in marks] == phases
    times = [began, *(mark["time"] for mark in marks), time.time()]
    assert all(before <= after for before, after in itertools.pairwise(times))
    return marks


def steps_of(checkpoint: dict) -> set[float]:
    """How many steps each weight has taken, as AdamW counts them."""
    return {float(state["step"]) for state in checkpoint["optimizer"]["state"].values()}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")  # where fp16 skips the first step
def test_a_classifier_of_torchvision(tmp_path: Path):
    from sightline.measure import plain_classification

    for split, count in (("train", 5), ("val", 3)):
        for place, name in enumerate(("dark", "bright")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = Image.new("RGB", (40, 48), (200 * place + number,) * 3)
                pixels.save(tmp_path / split / name / f"{number}.png")
    options = {
        "path": str(tmp_path),
        "network": "shufflenet_v2_x0_5",
        "batch": 4,
        "epochs": 2,
        "workers": 0,
        "device": "cpu",
    }
    options |= {"size": 32, "eval_size": 32, "eval_resize": 36, "mean": [0.5] * 3, "std": [0.2] * 3}
    options |= {"crop_scale": [0.5, 1.0], "marks": str(tmp_path / "marks"), "checkpoint": str(tmp_path / "plain.pt")}
    torch.manual_seed(0)
    began = time.time()
    plain_classification.main({**options, "precision": "fp16"})
    marks = marks_of(options, began, PHASES)
    assert [0 <= mark["top1"] <= 1 for mark in marks if mark["phase"] == "evaluation"] == [True, True]
    kept = torch.load(options["checkpoint"], weights_only=True)
    assert kept["model"]["fc.weight"].shape == (2, 1024)
    assert kept["model"]["conv1.1.num_batches_tracked"] == 2 * 2, "ten images are two whole batches of four"
    [group] = kept["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0, abs=1e-9) and group["initial_lr"] == 0.1, (
        "the cosine ends with the last step"
    )
    assert math.isfinite(float(kept["model"]["conv1.0.weight"].sum()))


@pytest.mark.parametrize(("dim", "precision"), [(2, "fp16"), (3, "fp32")])
def test_a_unet_of_monai(tmp_path: Path, dim: int, precision: str):
    pytest.importorskip("monai")
    from sightline.measure import plain_segmentation

    cases = []
    for number in range(3):
        case = {key: str(tmp_path / f"{key}{number}.npy") for key in ("image", "label")}
        label = np.zeros((8 + 2 * number, 16, 12 + 4 * number), np.uint8)  # a batch holds crops, padded where needed
        label[2:6, 4:12, 4:12] = 1
        np.save(case["label"], label)
        np.save(case["image"], (label[None] * 4.0 + number).astype(np.float32))
        cases.append(case)
    network = {"spatial_dims": dim, "in_channels": 1, "out_channels": 2, "kernel_size": [3] * 3, "strides": [1, 2, 2]}
    network |= {"upsample_kernel_size": [2, 2], "filters": [4, 8, 8], "deep_supervision": False, "deep_supr_num": 1}
    options = {"train": cases[:2], "val": cases[2:], "network": network, "dim": dim, "crop": [8, 16, 16], "items": 2}
    options |= {"steps": 3, "eval_every": 2, "epochs": 3, "workers": 0, "device": "cpu", "precision": precision}
    options |= {"marks": str(tmp_path / "marks"), "checkpoint": str(tmp_path / "plain.pt")}
    torch.manual_seed(0)
    began = time.time()
    plain_segmentation.main(options)
    phases = ["import", "listing", "first step", "training", "checkpoints"]
    marks = marks_of(options, began, [*phases, *PHASES[3:6], *PHASES[3:6]])  # the second epoch, and the last one
    assert [0 <= mark["dice"] <= 1 for mark in marks if mark["phase"] == "evaluation"] == [True, True]
    kept = torch.load(options["checkpoint"], weights_only=True)
    [group] = kept["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 1e-4)
    ends = [name.split("skip_layers")[-1] for name in kept["model"]]
    assert sum(name.endswith("transp_conv.conv.bias") for name in ends) >= 2, "ours add to what they enlarge, too"
    assert sum(name.endswith("norm1.weight") for name in ends) >= 5, "and scale what they normalise"
    [steps] = steps_of(kept)
    assert steps == 9 if precision == "fp32" else 0 < steps <= 9, "three an epoch, of two volumes; fp16 skips the first"


def test_slices_are_batches_of_their_own():
    pytest.importorskip("monai")
    from sightline.measure.plain_segmentation import as_slices

    volumes = torch.arange(2 * 3 * 4 * 5 * 6).reshape(2, 3, 4, 5, 6)
    slices = as_slices(volumes)
    assert slices.shape == (8, 3, 5, 6) and torch.equal(slices[6], volumes[1, :, 2])
