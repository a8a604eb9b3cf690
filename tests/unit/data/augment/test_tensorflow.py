"""The TensorFlow flavour of crop, resize and evaluation against TensorFlow's own results and tables made by hand.

tests/golden/tensorflow_input.json holds those results, written by the script beside it.
"""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from sightline.data.augment.classification import Augmentation, normalize
from sightline.data.augment.tensorflow import TF_MEAN, TF_STD, draw_box, resize_legacy, resized_sides
from sightline.data.draws import generator
from sightline.errors import UsageError

GOLDEN = json.loads((Path(__file__).resolve().parents[3] / "golden" / "tensorflow_input.json").read_text())
TF = {"crop": "tf", "crop_scale": (0.05, 1.0), "crop_ratio": (0.75, 1.33), "interpolation": "legacy"}
DRAWS = 10_000
HALF_A_LEVEL = 0.5 + 1e-4  # pixels are rounded, positions are 32-bit numbers


def image(height: int, width: int) -> np.ndarray:
    """As tests/golden/tensorflow_input.py makes it."""
    y, x, channel = np.mgrid[:height, :width, :3]
    return ((37 * y + 101 * x + 59 * channel + 7 * x * y) % 256).astype(np.uint8)


def whole(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """All of the resized image."""
    size = max(height, width)
    return resize_legacy(pixels, (height, width), (0, 0), size, flip=False)[:height, :width]


def grey(rows: list[list[int]]) -> np.ndarray:
    return np.repeat(np.array(rows, np.uint8)[:, :, None], 3, axis=2)


# The resize


def test_halving_takes_every_second_pixel():
    """No antialiasing: what lies between is never looked at."""
    source = grey([[1, 90, 3, 90], [90, 90, 90, 90], [5, 90, 7, 90], [90, 90, 90, 90]])
    assert np.array_equal(whole(source, 2, 2), grey([[1, 3], [5, 7]]))


def test_enlarging_starts_at_the_first_pixel_and_repeats_the_last():
    """Positions 0, .6, 1.2, 1.8 and 2.4 of 0..2: no half-pixel centres, nothing beyond the last pixel."""
    source = grey([[0, 10, 20], [30, 40, 50], [60, 70, 80]])
    expected = [[row + column for column in (0, 6, 12, 18, 20)] for row in (0, 18, 36, 54, 60)]
    assert np.array_equal(whole(source, 5, 5), grey(expected))


@pytest.mark.parametrize("case", GOLDEN["resizes"], ids=lambda case: f"{case['from']} to {case['to']}")
def test_resize_is_tensorflows(case):
    expected = np.array(case["pixels"])
    actual = whole(image(*case["from"]), *case["to"])
    assert actual.dtype == np.uint8 and actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= HALF_A_LEVEL


def test_resize_of_a_photograph_sized_image_is_tensorflows():
    case = GOLDEN["large"]
    actual = whole(image(*case["from"]), *case["to"])
    assert max(np.abs(actual[y, x] - colour).max() for y, x, *colour in case["points"]) <= HALF_A_LEVEL


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("corner", [(0, 0), (3, 5), (-2, 4), (4, -3), (-6, -5)])
def test_a_window_is_a_part_of_the_whole(corner, flip):
    """Rows and columns outside are black; only what is seen is computed."""
    pixels, size = image(30, 41)[2:28, 3:38], 12  # a crop, so its rows do not lie one after the other
    resized = np.pad(whole(pixels, 16, 18), ((6, 12), (6, 12), (0, 0)))
    top, left = corner[0] + 6, corner[1] + 6
    expected = resized[top : top + size, left : left + size]
    actual = resize_legacy(pixels, (16, 18), corner, size, flip)
    assert np.array_equal(actual, expected[:, ::-1] if flip else expected)
    assert actual.flags.c_contiguous and actual.flags.writeable
    smaller = resize_legacy(pixels, (5, 7), (-4, -2), size, flip)
    framed = np.pad(whole(pixels, 5, 7), ((4, 3), (2, 3), (0, 0)))
    assert np.array_equal(smaller, framed[:, ::-1] if flip else framed)


@pytest.mark.parametrize("size", [(30000, 1), (1, 30000), (1, 1), (2, 3)])
def test_extreme_images_survive(size):
    augment, pixels = Augmentation(**TF), image(*size)
    pixels.setflags(write=False)
    for index in range(5):
        top, left, height, width = draw_box(generator(0, 0, index, "crop"), *size, (0.05, 1.0), (0.75, 1.33))
        assert 0 <= top <= top + height <= size[0] and 0 <= left <= left + width <= size[1] and height and width
    assert augment.apply(augment.draw(0, 0, 0, *size), pixels).shape == (224, 224, 3)
    assert augment.apply(augment.evaluation_params(*size), pixels).shape == (224, 224, 3)


def test_training_crops_resizes_and_flips():
    augment, pixels = Augmentation(**TF, size=20), image(70, 90)
    flips = set()
    for index in range(12):
        params = augment.draw(3, 1, index, 70, 90)
        drawn = draw_box(generator(3, 1, index, "crop"), 70, 90, augment.crop_scale, augment.crop_ratio)
        assert (params.top, params.left, params.height, params.width) == drawn
        box = pixels[params.top : params.top + params.height, params.left : params.left + params.width]
        expected = whole(box, 20, 20)
        assert np.array_equal(augment.apply(params, pixels), expected[:, ::-1] if params.flip else expected)
        flips.add(params.flip)
    assert flips == {False, True}


def test_a_policy_goes_with_the_legacy_resize():
    augment = Augmentation(**TF, policy="randaugment", size=32)
    assert augment.apply(augment.draw(0, 0, 1, 50, 60), image(50, 60)).shape == (32, 32, 3)


# The crop


@cache
def boxes(height: int, width: int, scale=(0.05, 1.0), ratio=(0.75, 1.33), draws: int = DRAWS) -> np.ndarray:
    keys = (generator(0, 0, index, "crop") for index in range(draws))
    return np.array([draw_box(random, height, width, scale, ratio) for random in keys])


def distance(values: np.ndarray, counts: list[int]) -> float:
    """Kolmogorov and Smirnov's, at the edges of the bins."""
    ours = np.bincount(values, minlength=len(counts))
    assert len(ours) == len(counts), "beyond what TensorFlow draws"
    return float(np.abs(np.cumsum(ours) / ours.sum() - np.cumsum(counts) / np.sum(counts)).max())


@pytest.mark.parametrize("case", GOLDEN["crops"][:-1], ids=lambda case: str(case["size"]))
def test_crops_are_distributed_as_tensorflows(case):
    """Against as many draws of sample_distorted_bounding_box itself."""
    height, width = case["size"]
    top, left, tall, wide = boxes(height, width).T
    area = tall * wide / (height * width)
    down, across = top / np.maximum(height - tall, 1), left / np.maximum(width - wide, 1)
    limit = 1.95 * math.sqrt(2 / DRAWS)  # two equal distributions are further apart once in a thousand times
    assert distance(tall // 5, case["height"]) < limit
    assert distance(wide // 5, case["width"]) < limit
    for values, counts in ((area, case["area"]), (down, case["top"]), (across, case["left"])):
        assert distance(np.minimum((values * 50).astype(int), 49), counts) < limit


def test_crops_keep_to_their_limits():
    height, width = 375, 500
    top, left, tall, wide = boxes(height, width).T
    assert (tall * wide >= 0.1 * height * width).all() and (tall * wide <= height * width).all()
    # A width is rounded to a pixel, which is at most this much of a ratio.
    assert (np.abs(wide / tall - (0.75 + 1.33) / 2) <= (1.33 - 0.75) / 2 + 0.5 / tall).all()
    # The last place is never drawn where there is any other; it is an oddity of the original.
    assert (top[tall < height] <= (height - tall)[tall < height] - 1).all()
    assert (left[wide < width] <= (width - wide)[wide < width] - 1).all()


def test_height_is_uniform_and_area_is_not():
    """Square crops of a square: every height from sqrt(.1) to 1 equally often."""
    from scipy import stats

    _, _, tall, wide = boxes(400, 400, scale=(0.1, 1.0), ratio=(1.0, 1.0)).T
    assert np.array_equal(tall, wide) and tall.min() == 127 and tall.max() == 400
    counts = np.bincount(tall)[127:]
    assert stats.chisquare(counts).pvalue > 0.01
    assert stats.kstest((tall / 400) ** 2, stats.uniform(0.1, 0.9).cdf).statistic > 0.1


def test_a_height_whose_area_is_just_outside_moves_by_one_row():
    """Squares of 40 to 80 pixels: 6 is drawn and too small, 9 is drawn and too large, so 7 and 8 come equally often."""
    heights = boxes(20, 20, scale=(0.1, 0.2), ratio=(1.0, 1.0), draws=1000)[:, 2]
    assert set(heights) == {7, 8} and 420 < (heights == 7).sum() < 580


def test_the_whole_image_where_no_crop_is_large_enough():
    """The largest crop of a 40x600 strip is 40x53, less than a tenth of it."""
    theirs = GOLDEN["crops"][-1]
    assert theirs["size"] == [40, 600] and theirs["area"][-1] == theirs["width"][-1] == DRAWS
    assert set(map(tuple, boxes(40, 600, draws=200).tolist())) == {(0, 0, 40, 600)}


def test_a_crop_that_could_never_be_drawn_is_refused():
    with pytest.raises(UsageError, match=r"crop=tf keeps no crop below a tenth .* data.crop_scale=\(0.05, 0.09\)"):
        Augmentation(crop="tf", crop_scale=(0.05, 0.09))
    Augmentation(crop_scale=(0.05, 0.09))


def test_the_other_crop_and_all_other_draws_stay():
    plain, tf = (
        Augmentation(policy="randaugment", random_erase=1.0),
        Augmentation(policy="randaugment", random_erase=1.0, **TF),
    )
    for index in range(20):
        ours, theirs = plain.draw(0, 0, index, 50, 70), tf.draw(0, 0, index, 50, 70)
        assert (ours.flip, ours.policy, ours.erase) == (theirs.flip, theirs.policy, theirs.erase)


# Evaluation


def test_sides_are_tensorflows():
    for height, width, *expected in GOLDEN["sides"]:
        assert list(resized_sides(height, width, 256)) == expected, (height, width)
        params = Augmentation(crop="tf").evaluation_params(height, width)
        assert [params.resized_height, params.resized_width] == expected, (height, width)


def test_some_short_sides_lose_a_pixel():
    """The table above must hold such a case, and only this flavour has it."""
    assert [41, 60, 255, 374] in GOLDEN["sides"]
    assert Augmentation().evaluation_params(41, 60).resized_height == 256


def test_evaluation_pixels_are_tensorflows():
    height, width, short, size = GOLDEN["evaluation"]["geometry"]
    augment = Augmentation(**TF, eval_resize=short, eval_size=size)
    square = augment.apply(augment.evaluation_params(height, width), image(height, width))
    assert np.abs(square[[0, -1]] - np.array(GOLDEN["evaluation"]["first_and_last_row"])).max() <= HALF_A_LEVEL


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "legacy"])
@pytest.mark.parametrize(("crop", "first"), [("area", 4), ("tf", 3)])
def test_the_middle_of_a_gradient(crop, first, interpolation):
    """63 - 56 pixels to cut: torchvision begins at 4 (3.5 to the even number), TensorFlow at 3."""
    y, x = np.mgrid[:63, :63]
    pixels = np.stack([y, x, y + x], axis=2).astype(np.uint8)
    augment = Augmentation(crop=crop, interpolation=interpolation, eval_resize=63, eval_size=56)
    square = augment.apply(augment.evaluation_params(63, 63), pixels)
    assert np.array_equal(square, pixels[first : first + 56, first : first + 56])


def test_stretching_does_not_keep_the_shape():
    """Twice as wide as high: every second column, then the middle."""
    y, x = np.mgrid[:64, :128]
    pixels = np.stack([y, x, y], axis=2).astype(np.uint8)
    augment = Augmentation(eval_geometry="stretch", interpolation="legacy", eval_resize=64, eval_size=56)
    params = augment.evaluation_params(64, 128)
    assert (params.resized_height, params.resized_width, params.window_top, params.window_left) == (64, 64, 4, 4)
    assert np.array_equal(augment.apply(params, pixels), pixels[4:60, 8:120:2])
    kept = Augmentation(interpolation="legacy", eval_resize=64, eval_size=56).evaluation_params(64, 128)
    assert (kept.resized_width, kept.window_left) == (128, 36)
    still = Augmentation(eval_geometry="stretch", augment="off", size=28, eval_resize=64, eval_size=56)
    assert still.draw(0, 0, 0, 64, 128).resized_width == 32


# Numbers


def test_mean_only_normalisation_is_a_subtraction():
    """Every grey level of every channel, to the last bit of 32: TensorFlow's float(x) - mean."""
    levels = torch.arange(256, dtype=torch.uint8)[None, :, None, None].expand(1, 256, 1, 3)
    values = normalize(levels, TF_MEAN, TF_STD, torch.float32)[0, :, :, 0].numpy()  # (3, 256)
    for row, mean in zip(values, (123.68, 116.78, 103.94), strict=True):
        assert np.array_equal(row, np.arange(256, dtype=np.float32) - np.float32(mean))
