"""Crops, flips and colours of detection: invariants over many draws, TensorFlow's and torchvision's own results.

tests/golden/tensorflow_detection.json holds TensorFlow's, written by the script beside it.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.ops import box_iou
from torchvision.transforms import v2

from sightline.data.augment.detection import (
    MIN_IOUS,
    WHOLE,
    Augmentation,
    Params,
    draw_crop,
    jitter_mlperf,
    jitter_tf,
    move_boxes,
)
from sightline.data.augment.tensorflow import crop_and_resize, resize_legacy
from sightline.data.draws import generator
from sightline.errors import UsageError

pytestmark = pytest.mark.usefixtures("torchvision_in_bytes")

GOLDEN = json.loads((Path(__file__).resolve().parents[3] / "golden" / "tensorflow_detection.json").read_text())
HALF_A_LEVEL = 0.5 + 1e-3  # pixels are rounded once, positions are 32-bit numbers, and the fixture has four digits
DRAWS = 10_000
BOXES = np.array([[0.1, 0.1, 0.5, 0.5], [0.4, 0.3, 0.95, 0.9], [0.2, 0.3, 0.45, 0.6]])
SMALL = np.array([[0.7, 0.1, 0.75, 0.16]])


def image(height: int, width: int) -> np.ndarray:
    """As tests/golden/tensorflow_detection.py makes it."""
    y, x, channel = np.mgrid[:height, :width, :3]
    return ((37 * y + 101 * x + 59 * channel + 7 * x * y) % 256).astype(np.uint8)


# The crop


class Tosses:
    """A generator that remembers which overlap was drawn last."""

    def __init__(self, wrapped: np.random.Generator):
        self.wrapped = wrapped
        self.last = -1

    def integers(self, *args):
        self.last = int(self.wrapped.integers(*args))
        return self.last

    def __getattr__(self, name: str):
        return getattr(self.wrapped, name)


@pytest.mark.parametrize("kind", ["tf", "mlperf"])
@pytest.mark.parametrize(
    ("boxes", "draws"),
    [(BOXES, 1000), pytest.param(BOXES, DRAWS, marks=pytest.mark.slow), (SMALL, 500)],
    ids=["three", "three often", "small"],
)
def test_every_crop_keeps_its_promises(kind: str, boxes: np.ndarray, draws: int):
    """Many draws: aspect, overlap with every box, a centre inside, boxes in 0..1, more than a seventh uncropped."""
    whole, crops, leasts = 0, [], []
    for number in range(draws):
        random = Tosses(generator(1, 0, number, "box crop"))
        crop = draw_crop(random, boxes, kind, 50)
        top, left, bottom, right = crop
        assert 0 <= top < bottom <= 1 and 0 <= left < right <= 1
        moved, kept = move_boxes(Params(crop, flip=bool(number % 2), is_training=True), boxes)
        assert len(moved) == kept.sum() >= 1
        assert moved.min() >= 0 and moved.max() <= 1 and (moved[:, 2:] > moved[:, :2]).all()
        if crop == WHOLE:
            whole += 1
            continue
        tall, wide = bottom - top, right - left
        assert min(tall, wide) >= 0.3 - 1e-12 and 0.5 < wide / tall < 2
        least = MIN_IOUS[random.last]
        if kind == "mlperf" and random.last == 0:
            least = -math.inf
        crops.append(crop)
        leasts.append(least)
        middle = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = (middle > (top, left)).all(1) & (middle < (bottom, right)).all(1)
        assert np.array_equal(inside, kept)
    overlaps = box_iou(torch.tensor(crops, dtype=torch.float64), torch.from_numpy(boxes))
    assert (overlaps > torch.tensor(leasts, dtype=torch.float64)[:, None]).all()
    assert whole / draws > 1 / 7
    # A box of 0.3 % of the image meets no overlap but the smallest, so most tosses are in vain.
    assert (whole / draws > 0.45) == (boxes is SMALL)


def test_candidates_share_one_overlap_and_the_last_one_counts():
    """tf takes the last that fits of 50, mlperf the first: with the numbers of one generator they differ."""
    key = next(n for n in range(99) if generator(3, 0, n, "box crop").integers(7) == 1)  # an overlap of 0.1
    crops = {kind: draw_crop(generator(3, 0, key, "box crop"), BOXES, kind, 50) for kind in ("tf", "mlperf")}
    random = generator(3, 0, key, "box crop")
    while True:  # the rule again, one candidate after the other
        toss = int(random.integers(7))
        sides, places = random.uniform(0.3, 1, (50, 2)), random.random((50, 2))
        fitting = []
        for (tall, wide), (down, across) in zip(sides, places, strict=True):
            crop = (down * (1 - tall), across * (1 - wide), down * (1 - tall) + tall, across * (1 - wide) + wide)
            overlaps = box_iou(torch.tensor([crop], dtype=torch.float64), torch.from_numpy(BOXES))
            middle = (BOXES[:, :2] + BOXES[:, 2:]) / 2
            holds = ((middle > crop[:2]) & (middle < crop[2:])).all(1).any()
            if wide / tall < 2 and tall / wide < 2 and (overlaps > MIN_IOUS[toss]).all() and holds:
                fitting.append(crop)
        if fitting:
            break
    assert len(fitting) > 1
    assert crops["tf"] == pytest.approx(fitting[-1], abs=1e-15)
    assert crops["mlperf"] == pytest.approx(fitting[0], abs=1e-15)


def test_overlap_0_is_more_than_none_in_tf_and_anything_in_mlperf():
    """Two boxes in opposite corners: a crop of tf touches both, one of mlperf need not."""
    far = np.array([[0.0, 0.0, 0.05, 0.05], [0.95, 0.95, 1.0, 1.0]])
    misses = {"tf": 0, "mlperf": 0}
    for kind in misses:
        for number in range(400):
            crop = draw_crop(generator(5, 0, number, "box crop"), far, kind, 50)
            misses[kind] += bool((box_iou(torch.tensor([crop], dtype=torch.float64), torch.from_numpy(far)) == 0).any())
    assert misses["tf"] == 0 < misses["mlperf"]


def test_fewer_tries_crop_less():
    shares = [
        sum(draw_crop(generator(0, 0, n, "box crop"), BOXES, "mlperf", tries) == WHOLE for n in range(1000))
        for tries in (1, 50)
    ]
    assert shares[0] > shares[1] + 100


def test_boxes_are_cut_and_moved_by_hand():
    """A crop of the right half, upper three quarters; the first box leaves, the second is cut, the third is inside."""
    boxes = np.array([[0.1, 0.1, 0.3, 0.6], [0.25, 0.4, 0.85, 0.8], [0.3, 0.6, 0.6, 0.9]])
    moved, kept = move_boxes(Params((0.0, 0.5, 0.75, 1.0), is_training=True), boxes)
    assert kept.tolist() == [False, True, True]
    np.testing.assert_allclose(moved, [[1 / 3, 0, 1, 0.6], [0.4, 0.2, 0.8, 0.8]], atol=1e-12)
    flipped, _ = move_boxes(Params((0.0, 0.5, 0.75, 1.0), flip=True, is_training=True), boxes)
    np.testing.assert_allclose(flipped, [[1 / 3, 0.4, 1, 1], [0.4, 0.2, 0.8, 0.8]], atol=1e-12)


def test_flipping_twice_changes_nothing():
    boxes = np.random.default_rng(0).uniform((0, 0, 0.5, 0.5), (0.5, 0.5, 1, 1), (50, 4))
    once, _ = move_boxes(Params(flip=True), boxes)
    twice, _ = move_boxes(Params(flip=True), once)
    np.testing.assert_allclose(twice, boxes, rtol=0, atol=1e-15)
    assert not np.allclose(once, boxes)
    pixels = image(20, 30)
    for augment in (Augmentation(size=16), Augmentation(size=16, resize="antialias")):
        for params in (Params(is_training=True), Params()):
            straight = augment.apply(params, pixels, 20)
            mirrored = augment.apply(dataclasses.replace(params, flip=True), pixels, 20)
            assert np.array_equal(mirrored[:, ::-1], straight) and not np.array_equal(mirrored, straight)


def test_boxes_follow_the_pixels():
    """A white rectangle on black, through a hundred draws: where the boxes end up, the image is white."""
    pixels = np.zeros((120, 160, 3), np.uint8)
    pixels[30:90, 40:120] = 255
    boxes = np.array([[30 / 120, 40 / 160, 90 / 120, 120 / 160]])
    for resize in ("tf", "antialias"):
        augment = Augmentation(size=100, resize=resize)
        for number in range(100):
            params = augment.draw(0, 0, number, boxes)
            square = augment.apply(params, pixels, 120)
            (box,), _ = move_boxes(params, boxes)
            mask = square[:, :, 0] > 127
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            seen = np.array([rows[0], columns[0], rows[-1] + 1, columns[-1] + 1]) / 100
            np.testing.assert_allclose(seen, box, atol=0.035)


# The resize


@pytest.mark.parametrize("case", GOLDEN["crops"], ids=lambda case: f"{case['from']} to {case['size']}")
def test_crop_and_resize_is_tensorflows(case):
    pixels = image(*case["from"])
    found = crop_and_resize(pixels, tuple(case["box"]), len(pixels), case["size"], flip=False)
    assert np.abs(found - np.array(case["pixels"])).max() <= HALF_A_LEVEL


def test_a_large_crop_is_tensorflows_and_needs_no_rows_below():
    case = GOLDEN["large"]
    pixels = image(*case["from"])
    augment = Augmentation(size=case["size"])
    params = Params(tuple(case["box"]), is_training=True)
    found = augment.apply(params, pixels, len(pixels))
    for y, x, *expected in case["points"]:
        assert np.abs(found[y, x] - np.array(expected)).max() <= HALF_A_LEVEL
    for resize in ("tf", "antialias"):
        augment = Augmentation(size=60, resize=resize)
        for number in range(200):
            params = augment.draw(0, 0, number, BOXES)
            above = pixels[: params.rows(427)]
            assert np.array_equal(augment.apply(params, above, 427), augment.apply(params, pixels, 427))


def test_evaluation_is_the_legacy_resize_and_training_is_corner_aligned():
    pixels = image(40, 60)
    augment = Augmentation(size=32)
    assert np.array_equal(augment.apply(Params(), pixels, 40), resize_legacy(pixels, (32, 32), (0, 0), 32, False))
    trained = augment.apply(Params(is_training=True), pixels, 40)
    assert np.array_equal(trained[[0, 0, -1, -1], [0, -1, 0, -1]], pixels[[0, 0, -1, -1], [0, -1, 0, -1]])


def test_antialiased_resize_is_torchvisions_on_whole_pixels():
    """MLPerf's reference cuts at int(edge * side) and resizes antialiased."""
    pixels = image(90, 70)
    augment = Augmentation(size=32, resize="antialias")
    crop = (0.11, 0.23, 0.78, 0.91)
    expected = torch.from_numpy(pixels)[int(0.11 * 90) : int(0.78 * 90), int(0.23 * 70) : int(0.91 * 70)].permute(
        2, 0, 1
    )
    expected = v2.functional.resize(expected, [32, 32], antialias=True).permute(1, 2, 0).numpy()
    assert np.array_equal(augment.apply(Params(crop, is_training=True), pixels, 90), expected)
    assert augment.apply(Params((0.5, 0.5, 0.501, 0.501)), image(2, 2), 2).shape == (32, 32, 3)


# Colours


@pytest.mark.parametrize("case", GOLDEN["jitters"], ids=lambda case: str(case["numbers"]))
def test_colours_are_tensorflows(case):
    """Grey, black, white, pure colours and values beyond 0..1 among them; the fixture has five digits."""
    colours = torch.tensor(GOLDEN["colours"], dtype=torch.uint8)[None]
    found = jitter_tf(colours.float() / 255, torch.tensor([case["numbers"]]))
    torch.testing.assert_close(found[0], torch.tensor(case["pixels"]), rtol=0, atol=1e-5)


def test_a_plain_image_turns_as_the_formulas_say():
    """A constant image has no contrast. (.6, .4, .2): S is 2/3 of .6, half of it is 1/3; a sixth of the circle on,
    red falls as green rises."""
    constant = torch.tensor([0.6, 0.4, 0.2]).expand(1, 8, 8, 3)

    def jittered(*numbers: float) -> list[float]:
        return jitter_tf(constant, torch.tensor([numbers]))[0, 3, 3].tolist()

    assert jittered(0.1, 1.5, 1.0, 0.0) == pytest.approx([0.7, 0.5, 0.3], abs=1e-6)
    assert jittered(0.6, 1.0, 1.0, 0.0) == pytest.approx([1.2, 1.0, 0.8], abs=1e-6)  # nothing is clipped
    # But S is held in 0..1 on its way through HSV, which a negative channel exceeds.
    assert jittered(-0.3, 1.0, 1.0, 0.0) == pytest.approx([0.3, 0.15, 0.0], abs=1e-6)
    assert jittered(0.0, 1.0, 0.5, 0.0) == pytest.approx([0.6, 0.5, 0.4], abs=1e-6)
    assert jittered(0.0, 1.0, 1.5, 0.0) == pytest.approx([0.6, 0.3, 0.0], abs=1e-6)
    assert jittered(0.0, 1.0, 1.0, 1 / 6) == pytest.approx([0.4, 0.6, 0.2], abs=1e-6)
    two = torch.stack([torch.full((4, 4, 3), 0.25), torch.full((4, 4, 3), 0.75)], 1).reshape(1, 8, 4, 3)
    contrasted = jitter_tf(two, torch.tensor([[0.0, 1.5, 1.0, 0.0]]))
    assert sorted(set(contrasted.flatten().tolist())) == pytest.approx([0.125, 0.875])


def test_each_image_has_its_own_numbers():
    images = torch.rand(3, 5, 6, 3, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[0.1, 1.2, 0.7, 0.03], [0.0, 1.0, 1.0, 0.0], [-0.1, 0.6, 1.4, -0.04]])
    together = jitter_tf(images, numbers)
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], jitter_tf(images[row : row + 1], numbers[row : row + 1]))
    torch.testing.assert_close(together[1], images[1], rtol=0, atol=1e-6)


def test_mlperf_colours_are_torchvisions_on_8_bits():
    """All 24 orders; floors flip where sums differ in the last bit, so a level or two, and rarely."""
    functional = v2.functional
    operations = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 20, 30, 3), dtype=torch.uint8, generator=random)
    spread = torch.tensor([0.125, 0.5, 0.5, 0.05])
    numbers = (2 * torch.rand(24, 4, generator=random) - 1) * spread + torch.tensor([1.0, 1.0, 1.0, 0.0])
    orders = torch.cartesian_prod(*[torch.arange(4)] * 4)
    orders = orders[[len(set(order)) == 4 for order in orders.tolist()]]
    found = jitter_mlperf(images.float(), numbers, orders.int())
    assert torch.equal(found, found.clamp(0, 255).round())
    differences = []
    for image, row, order, result in zip(images, numbers, orders.tolist(), found, strict=True):
        expected = image.permute(2, 0, 1)
        for operation in order:
            expected = operations[operation](expected, float(row[operation]))
        differences.append((result.permute(2, 0, 1) - expected.float()).abs())
    assert torch.stack(differences).max() <= 3 and (torch.stack(differences) > 0).float().mean() < 0.02


@pytest.mark.parametrize("jitter", ["tf", "mlperf", "off"])
def test_the_device_half_normalises_in_channels_last(jitter: str):
    augment = Augmentation(size=8, jitter=jitter)
    images = torch.from_numpy(np.stack([image(8, 8), 255 - image(8, 8)]))
    params = [augment.draw(0, 0, n, BOXES) for n in range(2)]
    carried = [augment.carried(each) for each in params]
    assert all({k: (v.shape, str(v.dtype)) for k, v in row.items()} == augment.jitter_keys for row in carried)
    batch = {key: torch.from_numpy(np.stack([row[key] for row in carried])) for key in augment.jitter_keys}
    found = augment.finish(images, batch.get("jitter"), batch.get("jitter_order"), torch.float32)
    values = images.float()
    if jitter == "tf":
        values = jitter_tf(values / 255, batch["jitter"]) * 255
    elif jitter == "mlperf":
        values = jitter_mlperf(values, batch["jitter"], batch["jitter_order"])
    expected = (values / 255 - torch.tensor(augment.mean)) / torch.tensor(augment.std)
    torch.testing.assert_close(found, expected.permute(0, 3, 1, 2), rtol=0, atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    half = augment.finish(images, batch.get("jitter"), batch.get("jitter_order"), torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half, found.to(torch.bfloat16))  # rounded once, at the end


@pytest.mark.parametrize("jitter", ["tf", "mlperf"])
# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_the_device_half_compiles_into_one_graph(backend: str, jitter: str):
    augment = Augmentation(size=8, jitter=jitter)
    images = torch.from_numpy(image(8, 8))[None]
    carried = {k: torch.from_numpy(v)[None] for k, v in augment.carried(augment.draw(0, 0, 1, BOXES)).items()}

    def finish(images, jitter, order):
        return augment.finish(images, jitter, order, torch.float32)

    compiled = torch.compile(finish, fullgraph=True, dynamic=False, backend=backend)
    arguments = (images, carried["jitter"], carried.get("jitter_order"))
    torch.testing.assert_close(compiled(*arguments), finish(*arguments))


# The draws


def test_draws_depend_on_their_key_alone():
    augment = Augmentation()
    assert augment.draw(1, 2, 3, BOXES) == augment.draw(1, 2, 3, BOXES)
    others = [augment.draw(*key, BOXES) for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0))]
    assert all(other.jitter != augment.draw(1, 2, 3, BOXES).jitter for other in others)
    # One operation more or less does not shift the others.
    bare = Augmentation(crop="off", flip=0.0).draw(1, 2, 3, BOXES)
    assert bare.jitter == augment.draw(1, 2, 3, BOXES).jitter and bare.crop == WHOLE and not bare.flip


def test_numbers_stay_in_their_ranges():
    for jitter, middle in (("tf", (0, 1, 1, 0)), ("mlperf", (1, 1, 1, 0))):
        augment = Augmentation(jitter=jitter)
        drawn = [augment.draw(0, 0, number, BOXES) for number in range(2000)]
        numbers = np.array([params.jitter for params in drawn]) - middle
        strengths = np.array([0.125, 0.5, 0.5, 0.05])
        assert (np.abs(numbers) <= strengths).all() and (np.abs(numbers).max(0) > 0.99 * strengths).all()
        assert (np.abs(numbers.mean(0)) < 0.05 * strengths).all()
        assert len({params.order for params in drawn}) == 24
        assert 0.46 < np.mean([params.flip for params in drawn]) < 0.54


def test_off_is_off():
    augment = Augmentation(augment="off")
    assert augment.draw(0, 0, 0, BOXES) == Params() and augment.jitter_keys == {}
    assert Augmentation(jitter="off").jitter_keys == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop": "random"},
        {"jitter": "some"},
        {"resize": "cubic"},
        {"augment": "yes"},
        {"size": 0},
        {"crop_tries": 0},
        {"flip": 1.5},
        {"brightness": -0.1},
        {"contrast": float("nan")},
        {"saturation": 2.0},
        {"hue": 0.6},
        {"std": (0.1, 0.0, 0.1)},
        {"mean": (0.1, float("inf"), 0.1)},
    ],
)
def test_fields_that_cannot_work_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Augmentation(**wrong)
