"""What training draws stays what it was: a run that is resumed by a later version must see the same crops.

The digests were written by the commit that added them, of draws for forty samples each, rounded to nine digits.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sightline.data.augment import classification, detection, masks, segmentation
from sightline.parts import IGNORED

PLACES = [(seed, epoch, index) for seed in (0, 2**40 + 1) for epoch in (0, 7) for index in range(10)]
SIDES = ((40, 30), (300, 217), (1, 9), (64, 64), (500, 20))
RANDOM = np.random.default_rng(5)
MASK = np.where(RANDOM.random((50, 37)) < 0.2, 255, RANDOM.integers(0, 3, (50, 37))).astype(np.uint8)
LABEL = (RANDOM.random((11, 24, 17)) < 0.02).astype(np.uint8)
BOXES = np.sort(RANDOM.random((4, 2, 2)), axis=1).reshape(4, 4).astype(np.float32)
assert IGNORED == 255


def plain(value: Any) -> Any:
    """Return numbers, rounded, in lists."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, dict):
        return [[name, plain(each)] for name, each in sorted(value.items())]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return round(value, 9) + 0.0 if isinstance(value, float) else value


def of_images(**fields: Any) -> Callable[[int, int, int], Any]:
    made = classification.Augmentation(**{"size": 32, "eval_size": 32, "eval_resize": 36, **fields})

    def draw(seed: int, epoch: int, index: int) -> Any:
        numbers = [vars(made.draw(seed, epoch, index, *sides)) for sides in SIDES]
        return [numbers, made.draw_mix(seed, epoch, index), made.draw_batch(seed, epoch, index)]

    return draw


def of_boxes(**fields: Any) -> Callable[[int, int, int], Any]:
    made = detection.Augmentation(**fields)
    return lambda seed, epoch, index: [vars(made.draw(seed, epoch, index, boxes)) for boxes in (BOXES, BOXES[:0])]


def of_masks(**fields: Any) -> Callable[[int, int, int], Any]:
    made = masks.Augmentation(**{"size": 24, **fields})
    parts = (MASK, MASK[:20, :9], np.full_like(MASK, IGNORED))
    return lambda seed, epoch, index: [vars(made.draw(seed, epoch, index, mask)) for mask in parts]


def of_volumes(dim: int, **fields: Any) -> Callable[[int, int, int], Any]:
    made = segmentation.Augmentation(**fields)
    crop = (8, 16, 16) if dim == 3 else (1, 16, 32)
    parts = (LABEL, np.zeros_like(LABEL))
    return lambda seed, epoch, index: [vars(made.draw(seed, epoch, index, label, crop, dim)) for label in parts]


CASES: dict[str, tuple[Callable[[int, int, int], Any], str]] = {
    "images": (of_images(random_erase=0.5), "b5d6089139186f90"),
    "images as TensorFlow": (of_images(crop="tf", crop_scale=(0.05, 1.0)), "cebe8296fd6dceb2"),
    "images unchanged": (of_images(augment="off"), "469b62f65d066984"),
    "images autoaugment": (of_images(policy="autoaugment"), "42ede36feef26d2d"),
    "images randaugment": (of_images(policy="randaugment", policy_magnitude=11), "c8c6c864a3caed57"),
    "images trivialaugment": (of_images(policy="trivialaugment"), "20b768cc2b038047"),
    "images augmix": (of_images(policy="augmix", augmix_severity=5), "43d5b3dff109d576"),
    "images mixed by batch": (of_images(mixup=0.4, cutmix=1.0, mixup_partner="random"), "6a971e499802b238"),
    "images mixed by sample": (of_images(mixup=0.2, mixup_per="sample"), "ccc1d11954655773"),
    "images cut": (of_images(cutmix=0.5), "1e216245de8c815c"),
    "boxes as TensorFlow": (of_boxes(), "4d85b345017c05c8"),
    "boxes as MLPerf": (of_boxes(crop="mlperf", crop_tries=1, jitter="mlperf"), "04b0a5923633e2a9"),
    "boxes uncut": (of_boxes(crop="off", jitter="off"), "9d87ce6ae9c86382"),
    "boxes unchanged": (of_boxes(augment="off"), "3a3da18b4eb8a03c"),
    "masks": (of_masks(flip_rows=0.3, oversampling=0.5), "f02466d31afc9d9e"),
    "masks unchanged": (of_masks(augment="off"), "17229216639ca323"),
    "volumes": (of_volumes(3), "c0c3aa74646196fc"),
    "slices": (of_volumes(2), "e066b8b550127b15"),
    "volumes unchanged": (of_volumes(3, augment="off"), "fa6d2e7374104f63"),
}


def digest(draw: Callable[[int, int, int], Any]) -> str:
    return hashlib.sha256(repr([plain(draw(*place)) for place in PLACES]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", CASES)
def test_draws_are_those_of_earlier_versions(name: str):
    draw, expected = CASES[name]
    assert digest(draw) == expected
