"""Data parts: made and asked for their spec without torch, and their rules, which stand beside the fields."""

from dataclasses import dataclass

import pytest

from sightline.data.classification import ClassificationData
from sightline.data.detection import DetectionData
from sightline.data.segmentation import SegmentationData
from sightline.errors import UsageError

REFUSED = [
    (ClassificationData, {"flip": 1.5}, r"data.flip=1.5 must be in \[0, 1\]; it is a probability"),
    (
        ClassificationData,
        {"mixup": float("nan")},
        "data.mixup=nan must be a finite number, at least 0; it is",
    ),
    (ClassificationData, {"size": 0}, "data.size=0 must be at least 1; it is a length in pixels, e.g. 224"),
    (
        ClassificationData,
        {"crop_scale": (0.9, 0.1)},
        r"data.crop_scale=\(0.9, 0.1\) must be 0 < smallest <= largest <= 1",
    ),
    (ClassificationData, {"crop_scale": (0.0, 1.0)}, r"data.crop_scale=.* must be in \(0, 1\]; smallest first"),
    (ClassificationData, {"crop_ratio": (2.0, 1.0)}, "data.crop_ratio=.* must be 0 < narrowest <= widest"),
    (ClassificationData, {"std": (0.2, 0.0, 0.2)}, "data.std=.* above 0; three positive numbers"),
    (ClassificationData, {"val_fraction": 1.0}, r"data.val_fraction=1.0 must be in \(0, 1\); 0.2 is usual"),
    (ClassificationData, {"policy": "all"}, "data.policy='all' is unknown; use one of none, autoaugment"),
    (ClassificationData, {"first_label": 2}, "data.first_label=2 is unknown; use one of 0, 1"),
    (ClassificationData, {"policy_magnitude": 31}, r"data.policy_magnitude=31 must be in \[0, 30\]; 9 is usual"),
    (DetectionData, {"max_boxes": 0}, "data.max_boxes=0 must be at least 1; 200 is usual"),
    (DetectionData, {"hue": 0.6}, r"data.hue=0.6 must be in \[0, 0.5\]"),
    (DetectionData, {"mean": (0.5, float("inf"), 0.5)}, "data.mean=.* must be a finite number"),
    (DetectionData, {"static": "batches", "fake": True}, "data.static replays batches and data.fake repeats one"),
    (SegmentationData, {"dim": 4}, r"data.dim=4 must be in \[2, 3\]; 2 is slices, 3 is volumes"),
    (SegmentationData, {"fold": 5}, "data.fold=5 of data.folds=5: use 2 folds or more"),
    (SegmentationData, {"nvol": -1}, "data.nvol=-1 must be at least 0; 0 is one per device"),
    (SegmentationData, {"dim": 3, "nvol": 2}, "data.nvol=2 belongs to data.dim=2"),
    (SegmentationData, {"noise_std": (0.2, 0.1)}, "data.noise_std=0.2 0.1 must be two numbers, the smaller one first"),
    (SegmentationData, {"task": "11"}, "data.task='11' is unknown; use one of 01, 02"),
]


@pytest.mark.parametrize(("part", "given", "message"), REFUSED, ids=[f"{next(iter(each[1]))}" for each in REFUSED])
def test_a_rule_says_value_range_and_remedy(part: type, given: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        part(**given)


def test_a_data_part_of_ones_own_keeps_the_rules():
    @dataclass(frozen=True)
    class Photos(ClassificationData):
        photographer: str = ""

    with pytest.raises(UsageError, match="data.flip=2"):
        Photos(flip=2.0)
    assert Photos(photographer="me").augmentation == ClassificationData().augmentation
