"""Crops, flips, evaluation geometry, normalisation, erasing and mixing against torchvision's v2 transforms."""

import dataclasses
import itertools
import math
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

import sightline.data.augment.classification as classification
from sightline.data.augment.classification import CUT_KEYS, Augmentation, Params, erase, mix, normalize
from sightline.data.draws import generator
from sightline.errors import UsageError

pytestmark = pytest.mark.usefixtures("torchvision_in_bytes")

SIZES = [(375, 500), (500, 333), (224, 224), (60, 600), (1, 1), (3, 2)]


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def box_of(params):
    return params.top, params.left, params.height, params.width


# Drawing


def test_draw_is_a_pure_function_of_its_key():
    augment = Augmentation()
    first = augment.draw(7, 2, 11, 375, 500)
    assert first == augment.draw(7, 2, 11, 375, 500) == Augmentation().draw(7, 2, 11, 375, 500)
    others = [augment.draw(*key, 375, 500) for key in ((8, 2, 11), (7, 3, 11), (7, 2, 12))]
    assert len({box_of(params) for params in (first, *others)}) == 4


def test_operations_do_not_shift_each_other():
    plain, never, mixed = Augmentation(), Augmentation(flip=0.0), Augmentation(mixup=0.2)
    for index in range(20):
        assert box_of(plain.draw(0, 0, index, 50, 70)) == box_of(never.draw(0, 0, index, 50, 70))
        assert plain.draw(0, 0, index, 50, 70) == mixed.draw(0, 0, index, 50, 70)


def test_flip_statistics():
    for probability in (0.0, 0.25, 0.5, 1.0):
        flips = [Augmentation(flip=probability).draw(3, 0, index, 8, 8).flip for index in range(1500)]
        assert abs(np.mean(flips) - probability) < 4 * math.sqrt(probability * (1 - probability) / 1500) + 1e-9
    drawn = [Augmentation().draw(3, 0, index, 80, 80) for index in range(1500)]
    assert abs(np.corrcoef([each.flip for each in drawn], [each.width for each in drawn])[0, 1]) < 0.1


class ReplayedTorch:
    """Stands in for `torch` inside torchvision's classes and hands them the very numbers that we draw."""

    def __init__(self, random):
        self.random = random

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, _):
        return types.SimpleNamespace(
            uniform_=lambda low, high: torch.tensor(self.random.uniform(float(low), float(high)), dtype=torch.float64)
        )

    def randint(self, *bounds, size):
        return torch.tensor(int(self.random.integers(*bounds)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop_scale": (0.9, 1.0), "crop_ratio": (0.3, 3.0)},
        {"crop_scale": (0.5, 0.5), "crop_ratio": (2.0, 2.0)},
    ],
)
def test_crop_equals_torchvision_fed_with_the_same_numbers(monkeypatch, options):
    augment = Augmentation(**options)
    reference = v2.RandomResizedCrop(224, scale=augment.crop_scale, ratio=augment.crop_ratio)
    # The bounds as 64-bit numbers; torchvision keeps their logarithm in 32 bits.
    reference._log_ratio = torch.log(torch.tensor(augment.crop_ratio, dtype=torch.float64))
    for (height, width), index in itertools.product([*SIZES[:4], (1, 30), (300, 2)], range(60)):
        monkeypatch.setattr(v2._geometry, "torch", ReplayedTorch(generator(1, 2, index, "crop")))
        monkeypatch.setattr(v2._geometry, "query_size", lambda _, size=(height, width): size)
        expected = reference.make_params([])
        params = augment.draw(1, 2, index, height, width)
        assert box_of(params) == tuple(expected[key] for key in ("top", "left", "height", "width"))


@pytest.mark.parametrize("resize", [32, 40])
@pytest.mark.parametrize("padding", [0, 4])
def test_shift_equals_torchvisions_random_crop_fed_with_the_same_numbers(monkeypatch, resize, padding):
    augment = Augmentation(crop="shift", crop_padding=padding, size=32, eval_size=32, eval_resize=resize)
    for (height, width), index in itertools.product([(32, 32), (48, 40), (20, 90)], range(40)):
        pixels = noise(height, width, index)
        params = augment.draw(1, 2, index, height, width)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        resized = v2.Resize(resize, InterpolationMode.BILINEAR, antialias=True)(image)
        monkeypatch.setattr(v2._geometry, "torch", ReplayedTorch(generator(1, 2, index, "crop")))
        expected = v2.RandomCrop(32, padding=padding or None)(resized)
        monkeypatch.undo()
        expected = functional.horizontal_flip(expected) if params.flip else expected
        assert np.array_equal(augment.apply(params, pixels), expected.permute(1, 2, 0).numpy())


def test_shift_keeps_the_view_of_evaluation_at_other_sizes_and_reaches_every_place():
    augment = Augmentation(crop="shift", crop_padding=2, size=16, eval_size=32, eval_resize=36)
    drawn = [augment.draw(0, 0, index, 40, 40) for index in range(400)]
    assert {(each.resized_height, each.resized_width) for each in drawn} == {(18, 18)}
    assert {each.window_top for each in drawn} == {each.window_left for each in drawn} == set(range(-2, 5))


@pytest.mark.parametrize("size", [(375, 500), (60, 300)])
def test_crop_distribution_matches_torchvision(size):
    height, width = size
    image = torch.empty(3, height, width, device="meta")
    reference = v2.RandomResizedCrop(224)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [reference.make_params([image]) for _ in range(1500)]
    theirs = np.array([[each[key] for key in ("top", "left", "height", "width")] for each in theirs])
    ours = np.array([box_of(Augmentation().draw(0, 0, index, height, width)) for index in range(1500)])
    scale = np.array([height, width, height, width])
    shares = np.linspace(0.05, 0.95, 10)
    gaps = np.abs(np.quantile(ours / scale, shares, axis=0) - np.quantile(theirs / scale, shares, axis=0))
    assert gaps.max() < 0.06
    assert np.abs((ours / scale).mean(axis=0) - (theirs / scale).mean(axis=0)).max() < 0.03


@pytest.mark.parametrize("size", [(1, 1), (30000, 1), (1, 30000), (2, 3)])
def test_boxes_stay_inside_extreme_images(size):
    for augment in (Augmentation(), Augmentation(crop_ratio=(3.0, 4.0)), Augmentation(crop_ratio=(0.1, 0.2))):
        for index in range(30):
            top, left, height, width = box_of(augment.draw(0, 0, index, *size))
            assert top >= 0 and left >= 0 and height >= 1 and width >= 1
            assert top + height <= size[0] and left + width <= size[1]


def test_batch_draws():
    assert Augmentation().draw_batch(0, 0, 0) == {}
    assert Augmentation(mixup=0.2, augment="off").draw_batch(0, 0, 0) == {}
    drawn = Augmentation(mixup=0.2).draw_batch(0, 1, 5)["mix"]
    assert drawn.dtype == np.float32 and drawn.shape == ()
    assert drawn == Augmentation(mixup=0.2).draw_batch(0, 1, 5)["mix"]
    assert (
        len({float(Augmentation(mixup=0.2).draw_batch(*key)["mix"]) for key in ((0, 1, 5), (0, 1, 6), (0, 2, 5))}) == 3
    )
    for alpha in (0.2, 2.0):
        shares = np.array([Augmentation(mixup=alpha).draw_batch(0, 0, step)["mix"] for step in range(1500)])
        assert shares.min() >= 0 and shares.max() <= 1
        assert abs(shares.mean() - 0.5) < 0.04
        assert abs(shares.var() - 1 / (4 * (2 * alpha + 1))) < 0.01  # the variance of Beta(alpha, alpha)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 224])
def test_erased_box_equals_torchvision_fed_with_the_same_numbers(monkeypatch, size):
    augment = Augmentation(random_erase=1.0, size=size)
    reference = v2.RandomErasing(p=1.0)
    reference._log_ratio = torch.log(torch.tensor(reference.ratio, dtype=torch.float64))
    for index in range(60):
        random = generator(1, 2, index, "erase")
        assert random.random() < 1
        monkeypatch.setattr(v2._augment, "torch", ReplayedTorch(random))
        expected = reference.make_params([torch.empty(3, size, size, device="meta")])
        top, left, height, width = (int(expected[key]) for key in ("i", "j", "h", "w"))
        box = augment.draw(1, 2, index, 90, 70).erase
        assert box == ((0, 0, 0, 0) if expected["v"] is None else (top, left, top + height, left + width))
        assert 0 <= box[0] <= box[2] <= size and 0 <= box[1] <= box[3] <= size


def test_erasing_has_its_probability_and_shifts_nothing_else():
    plain = Augmentation()
    assert {plain.draw(0, 0, index, 50, 70).erase for index in range(20)} == {(0, 0, 0, 0)} and not plain.erases
    for probability in (0.1, 0.5):
        augment = Augmentation(random_erase=probability)
        drawn = [augment.draw(0, 0, index, 50, 70) for index in range(1500)]
        share = np.mean([params.erase != (0, 0, 0, 0) for params in drawn])
        assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / 1500)
        for index in range(20):
            assert dataclasses.replace(drawn[index], erase=(0, 0, 0, 0)) == plain.draw(0, 0, index, 50, 70)
    off = Augmentation(random_erase=1.0, augment="off")
    assert off.draw(0, 0, 0, 50, 70).erase == (0, 0, 0, 0) and not off.erases
    assert augment.evaluation_params(50, 70).erase == (0, 0, 0, 0)


@pytest.mark.parametrize("size", [1, 2, 33, 224])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_cut_box_equals_torchvision_fed_with_the_same_numbers(monkeypatch, size, alpha):
    augment, reference = Augmentation(cutmix=alpha, size=size), v2.CutMix(num_classes=3)
    for step in range(60):
        random = generator(1, 2, step, "cutmix")
        share = random.beta(alpha, alpha)
        reference._dist = types.SimpleNamespace(sample=lambda _, share=share: share)
        monkeypatch.setattr(v2._augment, "torch", ReplayedTorch(random))
        expected = reference.make_params([torch.empty(2, 3, size, size, device="meta")])
        drawn = augment.draw_batch(1, 2, step)
        top, left, bottom, right = (int(drawn[key]) for key in CUT_KEYS)
        assert (left, top, right, bottom) == expected["box"]
        assert drawn["label_share"] == np.float32(expected["lam_adjusted"]) and drawn["mix"] == 1


def test_cutmix_batches_have_the_same_keys_whatever_was_drawn():
    keys = {"mix", "label_share", *CUT_KEYS}
    cut, both, mixed = Augmentation(cutmix=1.0), Augmentation(mixup=0.2, cutmix=1.0), Augmentation(mixup=0.2)
    kinds = []
    for step in range(600):
        drawn, alone, only_mixed = (each.draw_batch(0, 0, step) for each in (both, cut, mixed))
        assert set(drawn) == set(alone) == keys and set(only_mixed) == {"mix"}
        # Scalars, because the step splits what has a first dimension.
        assert all(value.shape == () for value in drawn.values())
        assert {key: str(value.dtype) for key, value in drawn.items()} == {
            **dict.fromkeys(("mix", "label_share"), "float32"),
            **dict.fromkeys(CUT_KEYS, "int32"),
        }
        is_mixed = drawn != alone
        if is_mixed:
            assert drawn["label_share"] == drawn["mix"] == only_mixed["mix"]
            assert not any(drawn[key] for key in CUT_KEYS)
        kinds.append(is_mixed)
        assert drawn == both.draw_batch(0, 0, step)
    assert abs(np.mean(kinds) - 0.5) < 4 * 0.5 / math.sqrt(600), "a fair coin"
    assert Augmentation(cutmix=1.0, mixup=0.2, augment="off").draw_batch(0, 0, 0) == {}
    assert cut.draw(0, 0, 3, 50, 70) == Augmentation().draw(0, 0, 3, 50, 70)


# Pixels

PILLOW_LEVELS = 2  # the filter is Pillow's, the rounding of its weights is torch's


def planes(pixels: np.ndarray) -> torch.Tensor:
    """As torchvision's tensors lie: (3, height, width)."""
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_training_pixels_equal_torchvision(size, interpolation):
    pixels = noise(*size)
    augment = Augmentation(interpolation=interpolation, size=96)
    mode = InterpolationMode(interpolation)  # torchvision 0.26 takes no plain text
    seen_flips = set()
    for index in range(8):
        params = augment.draw(0, 0, index, *size)
        expected = functional.resized_crop(planes(pixels), *box_of(params), [96, 96], mode)
        expected = functional.horizontal_flip(expected) if params.flip else expected
        on_pillow = functional.resized_crop(Image.fromarray(pixels), *box_of(params), [96, 96], mode)
        on_pillow = functional.horizontal_flip(on_pillow) if params.flip else on_pillow
        actual = augment.apply(params, pixels)
        assert actual.dtype == np.uint8 and actual.flags.c_contiguous and actual.flags.writeable
        np.testing.assert_array_equal(actual, expected.permute(1, 2, 0).numpy())
        if interpolation == "bilinear":  # bicubic overshoots, and Pillow cuts that off between its two passes
            np.testing.assert_allclose(actual.astype(int), np.asarray(on_pillow).astype(int), atol=PILLOW_LEVELS)
        seen_flips.add(params.flip)
    assert seen_flips == {False, True}


# 64/72: the crop is larger than the resized image, so a border appears; 33 and 71 hit the odd halves.
@pytest.mark.parametrize(
    ("size", "geometry"),
    [
        *((size, (40, 33)) for size in [*SIZES, (40, 41), (41, 40), (77, 131)]),
        *(((77, 131), geometry) for geometry in [(256, 224), (64, 72), (64, 71), (65, 224)]),
    ],
)
def test_evaluation_pixels_equal_torchvision(size, geometry):
    resize, side = geometry
    pixels = noise(*size)
    augment = Augmentation(eval_resize=resize, eval_size=side)
    reference = v2.Compose([v2.Resize(resize), v2.CenterCrop(side)])
    actual = augment.apply(augment.evaluation_params(*size), pixels)
    np.testing.assert_array_equal(actual, reference(planes(pixels)).permute(1, 2, 0).numpy())
    on_pillow = np.asarray(reference(Image.fromarray(pixels))).astype(int)
    np.testing.assert_allclose(actual.astype(int), on_pillow, atol=PILLOW_LEVELS)


def test_augment_off_is_the_evaluation_geometry_at_training_size():
    pixels = noise(150, 200)
    off = Augmentation(augment="off", size=112)
    params = off.draw(0, 5, 9, 150, 200)
    assert (
        params
        == off.draw(1, 0, 0, 150, 200)
        == Augmentation(eval_resize=128, eval_size=112).evaluation_params(150, 200)
    )
    expected = v2.CenterCrop(112)(v2.Resize(128)(planes(pixels)))
    np.testing.assert_array_equal(off.apply(params, pixels), expected.permute(1, 2, 0).numpy())
    same_size = Augmentation(augment="off")
    assert same_size.draw(0, 0, 0, 150, 200) == same_size.evaluation_params(150, 200)


@pytest.mark.parametrize("size", [(30000, 1), (1, 30000)])
def test_strips_survive(size):
    pixels = noise(*size)
    for augment in (Augmentation(), Augmentation(eval_resize=200)):
        assert augment.apply(augment.draw(0, 0, 0, *size), pixels).shape == (224, 224, 3)
        assert augment.apply(augment.evaluation_params(*size), pixels).shape == (224, 224, 3)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(700, 40), (33, 500), (5, 4), (900, 700)])
@pytest.mark.parametrize("geometry", [(64, 56), (50, 56)])
def test_resizing_only_what_is_seen_changes_nothing(monkeypatch, size, interpolation, geometry):
    pixels = np.asarray(Image.fromarray(noise(9, 9)).resize(size[::-1], Image.Resampling.BICUBIC))
    augment = Augmentation(eval_resize=geometry[0], eval_size=geometry[1], interpolation=interpolation)
    params = augment.evaluation_params(*size)
    whole = augment.apply(params, pixels)
    monkeypatch.setattr(classification, "_MAX_RESIZED_PIXELS", 0)
    assert np.abs(augment.apply(params, pixels).astype(int) - whole).max() <= 1


def test_every_field_changes_something():
    """Each changes the draw, the evaluation, the batch or the pixels; mean and std act on the device.

    Strengths of a policy matter beside that policy.
    """
    pixels = noise(90, 120)

    def observe(augment):
        params, evaluated = augment.draw(0, 0, 3, 90, 120), augment.evaluation_params(90, 120)
        square, numbers = augment.apply(params, pixels), augment.draw_batch(0, 0, 0)
        return params, evaluated, numbers, augment.draw_mix(0, 0, 0), augment.pack(square).tobytes()

    changes = {"augment": "off", "crop_scale": (0.3, 0.4), "crop_ratio": (2.0, 3.0), "flip": 0.0, "mixup": 0.3}
    changes |= {"size": 64, "eval_resize": 300, "eval_size": 200, "interpolation": "bicubic"}
    changes |= {"cutmix": 1.0, "random_erase": 1.0, "policy": "autoaugment"}
    changes |= {"policy_magnitude": 12, "augmix_severity": 10, "crop": "tf", "eval_geometry": "stretch"}
    changes |= {"mixup_per": "sample", "mixup_partner": "random", "image_type": "bf16", "crop_padding": 9}
    assert {field.name for field in dataclasses.fields(Augmentation)} == {*changes, "mean", "std"}
    bases = {"policy_magnitude": {"policy": "randaugment"}, "augmix_severity": {"policy": "augmix"}}
    bases |= {field: {"mixup": 0.3} for field in ("mixup_per", "mixup_partner")} | {"crop_padding": {"crop": "shift"}}
    for field, value in changes.items():
        base = Augmentation(flip=1.0, **bases.get(field, {}))
        assert observe(dataclasses.replace(base, **{field: value})) != observe(base), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("augment", "yes"),
        ("crop_scale", (0.0, 1.0)),
        ("crop_scale", (0.5, 0.4)),
        ("crop_scale", (0.5, 1.5)),
        ("crop_scale", (math.nan, 1.0)),
        ("crop_ratio", (0.0, 1.0)),
        ("crop_ratio", (2.0, 1.0)),
        ("crop_ratio", (1.0, math.inf)),
        ("flip", -0.1),
        ("flip", 1.1),
        ("mixup", -1.0),
        ("mixup", math.nan),
        ("cutmix", -0.1),
        ("cutmix", math.inf),
        ("random_erase", 1.5),
        ("random_erase", math.nan),
        ("policy", "randaug"),
        ("policy_magnitude", -1),
        ("policy_magnitude", 31),
        ("augmix_severity", 0),
        ("augmix_severity", 11),
        ("size", 0),
        ("eval_resize", -1),
        ("eval_size", 0),
        ("interpolation", "nearest"),
        ("crop", "tensorflow"),
        ("eval_geometry", "long_side"),
        ("mixup_per", "pixel"),
        ("mixup_partner", "next"),
        ("image_type", "fp16"),
        ("mean", (0.5, math.nan, 0.5)),
        ("std", (0.2, 0.0, 0.2)),
    ],
)
def test_nonsense_is_refused_with_its_value(field, value):
    with pytest.raises(UsageError, match=f"{field}=") as refusal:
        Augmentation(**{field: value})
    assert str(value) in str(refusal.value)


# Device half


def test_normalize_equals_torchvision():
    augment = Augmentation()
    images = torch.from_numpy(np.stack([noise(6, 9, seed) for seed in range(4)]))
    actual = normalize(images, augment.mean, augment.std, torch.float32)
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(augment.mean, augment.std)])
    torch.testing.assert_close(actual, reference(images.permute(0, 3, 1, 2)), atol=1e-6, rtol=0)
    assert actual.shape == (4, 3, 6, 9) and actual.is_contiguous(memory_format=torch.channels_last)
    half = normalize(images, augment.mean, augment.std, torch.bfloat16)
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(half, actual.bfloat16()), "computed in 32 bits, rounded once"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mix_equals_torchvision(share):
    images = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    actual = mix(images, torch.tensor(share))
    reference = v2.MixUp(num_classes=5)
    params = {"labels": torch.arange(5), "batch_size": 5, "lam": share}
    torch.testing.assert_close(actual, reference.transform(images, params), atol=1e-6, rtol=0)
    torch.testing.assert_close(actual, share * images + (1 - share) * images.roll(1, 0), atol=1e-6, rtol=0)
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert mix(images.bfloat16(), torch.tensor(share)).dtype == torch.bfloat16


@pytest.mark.parametrize("box", [(0, 0, 4, 6), (1, 2, 3, 5), (0, 0, 0, 0), (2, 2, 2, 2), (3, 0, 4, 6)])
def test_cut_equals_torchvision(box):
    images = torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    images = images.contiguous(memory_format=torch.channels_last)
    edges = tuple(torch.tensor(edge, dtype=torch.int32) for edge in box)
    actual = mix(images, torch.tensor(1.0), edges)
    top, left, bottom, right = box
    params = {"labels": torch.arange(5), "batch_size": 5, "box": (left, top, right, bottom), "lam_adjusted": 0.0}
    assert torch.equal(actual, v2.CutMix(num_classes=5).transform(images, params))
    assert actual.is_contiguous(memory_format=torch.channels_last)
    half = mix(images.bfloat16(), torch.tensor(1.0), edges)
    assert half.dtype == torch.bfloat16 and torch.equal(half, actual.bfloat16())


def test_a_mixed_batch_among_cut_ones_has_the_bits_of_mixup():
    nowhere = tuple(torch.tensor(0, dtype=torch.int32) for _ in range(4))
    for dtype in (torch.float32, torch.bfloat16):
        images, share = torch.randn(5, 3, 4, 6).to(dtype), torch.tensor(0.3)
        assert torch.equal(mix(images, share, nowhere), mix(images, share))


def test_erase_equals_torchvision():
    images = torch.randn(4, 3, 5, 7).contiguous(memory_format=torch.channels_last)
    images[0, 0, 0, 0] = math.nan
    boxes = torch.tensor([(0, 0, 5, 7), (1, 2, 3, 6), (0, 0, 0, 0), (4, 6, 5, 7)], dtype=torch.int32)
    expected = [
        functional.erase(image, top, left, bottom - top, right - left, torch.zeros(1, 1, 1))
        for image, (top, left, bottom, right) in zip(images, boxes.tolist(), strict=True)
    ]
    actual = erase(images, boxes)
    assert torch.equal(actual, torch.stack(expected)) and not torch.equal(actual[1], images[1])
    assert actual.is_contiguous(memory_format=torch.channels_last)
    assert erase(images.bfloat16(), boxes).dtype == torch.bfloat16


class OnlyMeta(TorchDispatchMode):
    """Refuses operations that read or make tensors of another device."""

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.device.type == "meta" for tensor in tensors), function
        return result


def test_device_half_is_one_graph():
    """make_fx stands in for the compiler: a branch on a value, or a number fetched from the device, would fail it."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def prepare(images, boxes, share, *edges):
        normal = normalize(images, (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), torch.float32)
        return mix(erase(normal, boxes), share, edges or None)

    images, boxes = torch.from_numpy(noise(8, 8)[None].repeat(3, 0)), torch.randint(9, (3, 4), dtype=torch.int32)
    edges = tuple(torch.tensor(edge, dtype=torch.int32) for edge in (1, 2, 5, 4))
    for numbers in ((boxes, torch.tensor(0.25)), (boxes, torch.tensor(0.25), *edges)):
        traced = make_fx(prepare, tracing_mode="fake")(images, *numbers)
        torch.testing.assert_close(traced(images, *numbers), prepare(images, *numbers))
        elsewhere = [tensor.to("meta") for tensor in (images, *numbers)]
        with OnlyMeta():  # what is copied from the host would be a tensor of another device
            assert prepare(*elsewhere).is_contiguous(memory_format=torch.channels_last)


def test_params_can_be_compared_and_kept():
    params = Augmentation().evaluation_params(10, 20)
    assert Params(**dataclasses.asdict(params)) == params and hash(params) == hash(dataclasses.replace(params))


def test_images_whose_random_numbers_are_equal_keep_their_order():
    """So that every device chooses the same partners; NumPy's stable sort is the reference."""
    ranks = torch.randint(0, 3, (999,), generator=torch.Generator().manual_seed(0))
    found = classification.partner_of("random", 999, ranks, torch.device("cpu"))
    assert np.array_equal(found.numpy(), np.argsort(ranks.numpy(), kind="stable"))
    assert classification.partner_of("reversed", 4, None, torch.device("cpu")).tolist() == [3, 2, 1, 0]
    assert classification.partner_of("previous", 4, None, torch.device("cpu")) is None
