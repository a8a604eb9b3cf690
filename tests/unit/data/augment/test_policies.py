"""Policies against torchvision's v2 classes: every operation's pixels, every table, and every draw replayed."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from sightline.data.augment import policies
from sightline.data.augment.classification import Augmentation, Params
from sightline.data.draws import generator

pytestmark = pytest.mark.usefixtures("torchvision_in_bytes")

NAMES = ["autoaugment", "randaugment", "trivialaugment", "augmix"]
SIDE = 40
SIGNED = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast", "Sharpness")
WITHOUT_MAGNITUDE = ("Identity", "AutoContrast", "Equalize", "Invert")
MODE = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}  # torchvision 0.26 wants these
RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def references(interpolation: str) -> dict[str, v2.Transform]:
    classes = (v2.AutoAugment, v2.RandAugment, v2.TrivialAugmentWide, v2.AugMix)
    return {name: make(interpolation=MODE[interpolation]) for name, make in zip(NAMES, classes, strict=True)}


def bins_of(name: str) -> int:
    return {"autoaugment": 10, "augmix": 10}.get(name, 31)


def images(side: int = SIDE) -> dict[str, Image.Image]:
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (side, side, 3), np.uint8)
    smooth = Image.fromarray(noise[:5, :5]).resize((side, side), Image.Resampling.BICUBIC)
    dull = Image.fromarray((noise // 8 + np.array([10, 100, 200], np.uint8)).astype(np.uint8))
    return {
        "noise": Image.fromarray(noise),
        "smooth": smooth,
        "dull": dull,
        "flat": Image.new("RGB", (side, side), (9, 99, 199)),
    }


def carried_out(operation: str, magnitude: float, image: Image.Image, interpolation: str) -> np.ndarray:
    made = policies.apply(((1.0, ((operation, magnitude),)),), image, RESAMPLING[interpolation])
    assert made.mode == "RGB" and made.size == image.size
    return np.asarray(made)


# Operations


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("operation", [*policies.OPERATIONS, "Invert"])
def test_an_operation_equals_torchvisions_at_every_magnitude(operation: str, interpolation: str):
    reference = references(interpolation)["randaugment"]
    magnitudes = {0.0, -0.0}
    for name in NAMES:
        for at in range(bins_of(name)):
            magnitude = policies.magnitude_at(name, operation, at, SIDE)
            magnitudes |= {magnitude, -magnitude} if operation in SIGNED else {magnitude}
    if operation == "Posterize":
        magnitudes -= {0.0}  # see below
    assert len(magnitudes) == {"Posterize": 8}.get(operation, 1 if operation in WITHOUT_MAGNITUDE else len(magnitudes))
    for kind, image in images().items():
        for magnitude in magnitudes:
            expected = reference._apply_image_or_video_transform(image, operation, magnitude, MODE[interpolation], {})
            made = carried_out(operation, magnitude, image, interpolation)
            assert np.array_equal(made, np.asarray(expected)), (kind, magnitude)


def test_no_bits_are_black():
    """AugMix's strongest, which torchvision carries out on tensors; Pillow's own function refuses it."""
    image = images()["noise"]
    expected = functional.posterize(functional.pil_to_tensor(image), 0)
    assert np.array_equal(carried_out("Posterize", 0.0, image, "bilinear"), expected.permute(1, 2, 0).numpy())
    assert not carried_out("Posterize", 0.0, image, "bilinear").any()


def test_an_operation_leaves_its_image_alone():
    image = images()["noise"]
    before = image.tobytes()
    for operation in (*policies.OPERATIONS, "Invert"):
        carried_out(operation, policies.magnitude_at("randaugment", operation, 9, SIDE), image, "bilinear")
    assert image.tobytes() == before


def test_an_unknown_operation_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="no operation is called Blur"):
        carried_out("Blur", 1.0, images()["noise"], "bilinear")


# Tables


@pytest.mark.parametrize("side", [33, 64, 224, 331])
@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_are_torchvisions(name: str, side: int):
    """But for its float32, which is at most a hundred thousandth of a pixel, a degree or a grey level away."""
    space = references("bilinear")[name]._AUGMENTATION_SPACE
    assert set(space) == {
        "autoaugment": {*policies.OPERATIONS, "Invert"} - {"Identity"},
        "augmix": set(policies.AUGMIX_OPERATIONS),
    }.get(name, set(policies.OPERATIONS))
    for operation, (magnitudes_of, signed) in space.items():
        assert signed == (operation in SIGNED)
        theirs = magnitudes_of(bins_of(name), side, side)
        assert (theirs is None) == (operation in WITHOUT_MAGNITUDE)
        for at in range(bins_of(name)):
            ours = policies.magnitude_at(name, operation, at, side)
            assert ours == pytest.approx(0.0 if theirs is None else float(theirs[at]), abs=1e-5)


def test_autoaugments_table_is_torchvisions():
    theirs = v2.AutoAugment()._policies
    assert [[(o, p, at or 0) for o, p, at in pair] for pair in theirs] == [list(p) for p in policies._AUTOAUGMENT]


# Draws


class ReplayedTorch:
    """Stands in for `torch` inside torchvision's policies and hands them the very numbers that we draw."""

    def __init__(self, random: np.random.Generator):
        self.random = random

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def randint(self, *bounds: int, size=(), low: int = 0, high: int | None = None) -> torch.Tensor:
        high = bounds[0] if high is None else high
        return torch.tensor(int(self.random.integers(low, high)))

    def rand(self, _) -> float:
        return self.random.random()

    def sample_dirichlet(self, alphas: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.random.dirichlet(alphas[0].tolist()), dtype=torch.float32)[None]


def replay(monkeypatch, reference: v2.Transform, random: np.random.Generator, image, do) -> Image.Image:
    """torchvision's own forward with our numbers; `do(operation, magnitude, image)` makes the pixels."""
    if isinstance(reference, v2.AugMix):  # lists its operations in another order; all are equally likely in any
        space = reference._AUGMENTATION_SPACE
        reference._AUGMENTATION_SPACE = {operation: space[operation] for operation in policies.AUGMIX_OPERATIONS}
    replayed = ReplayedTorch(random)
    monkeypatch.setattr(v2._auto_augment, "torch", replayed)
    reference._sample_dirichlet = replayed.sample_dirichlet
    reference._apply_image_or_video_transform = lambda image, operation, magnitude, **_: do(operation, magnitude, image)
    made = reference(image)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize("name", NAMES)
def test_draws_equal_torchvision_fed_with_the_same_numbers(monkeypatch, name: str):
    image = images()["noise"]
    seen: Counter[str] = Counter()
    for index, (magnitude, severity) in itertools.product(range(60), [(9, 3), (0, 1), (30, 10)]):
        reference = references("bilinear")[name]
        reference.magnitude, reference.severity = magnitude, severity
        theirs: list[tuple[str, float]] = []

        def note(operation: str, strength: float, image, theirs=theirs):
            theirs.append((operation, strength))
            return image

        replay(monkeypatch, reference, generator(1, 2, index, "policy"), image, note)
        drawn = policies.draw(name, generator(1, 2, index, "policy"), SIDE, magnitude, severity)
        ours = [step for _, chain in drawn for step in chain]
        assert [operation for operation, _ in ours] == [operation for operation, _ in theirs]
        assert [strength for _, strength in ours] == pytest.approx([strength for _, strength in theirs], abs=1e-5)
        seen.update(operation for operation, _ in ours)
    assert len(seen) >= {"autoaugment": 9}.get(name, 13)


def test_augmix_mixes_as_torchvision(monkeypatch):
    """The weights come from 64 bits here and from 32 there, so a value that is cut off may differ by one."""
    for kind, index in itertools.product(("noise", "smooth"), range(15)):
        image = images()[kind]
        drawn = policies.draw("augmix", generator(0, 0, index, "policy"), SIDE, 9, 5)
        assert sum(weight for weight, _ in drawn) == pytest.approx(1) and drawn[0][1] == () and len(drawn) == 4
        steps = iter([step for _, chain in drawn for step in chain])

        def ours(_operation, _magnitude, image, steps=steps):
            made = carried_out(*next(steps), functional.to_pil_image(image[0]), "bilinear")
            return torch.from_numpy(made.copy()).permute(2, 0, 1)[None]

        reference = references("bilinear")["augmix"]
        reference.severity = 5
        expected = replay(monkeypatch, reference, generator(0, 0, index, "policy"), image, ours)
        made = policies.apply(drawn, image, Image.Resampling.BILINEAR)
        gap = np.abs(np.asarray(made).astype(int) - np.asarray(expected))
        assert gap.max() <= 1 and (gap > 0).mean() < 0.05


@pytest.mark.parametrize("name", ["randaugment", "trivialaugment", "augmix"])
def test_operations_and_signs_are_equally_likely(name: str):
    augment = Augmentation(policy=name)
    drawn = [chain for index in range(1500) for _, chain in augment.draw(3, 0, index, 8, 8).policy if chain]
    steps = [step for chain in drawn for step in chain]
    known = policies.AUGMIX_OPERATIONS if name == "augmix" else policies.OPERATIONS
    counts = Counter(operation for operation, _ in steps)
    expected = len(steps) / len(known)
    assert set(counts) == set(known)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 34.5  # 13 degrees of freedom: one in a thousand is above
    signs = [magnitude > 0 for operation, magnitude in steps if operation in SIGNED and magnitude]
    assert abs(np.mean(signs) - 0.5) < 4 * 0.5 / len(signs) ** 0.5
    lengths = Counter(map(len, drawn))
    if name == "augmix":
        assert set(lengths) == {1, 2, 3} and all(abs(n / len(drawn) - 1 / 3) < 0.04 for n in lengths.values())
    else:
        assert set(lengths) == {2 if name == "randaugment" else 1}


def test_augmix_weights_are_flat():
    """Half for the image itself on average, and a third of the rest for each chain, with Dirichlet's variances."""
    policy = [Augmentation(policy="augmix").draw(3, 0, index, 8, 8).policy for index in range(1500)]
    weights = np.array([[weight for weight, _ in each] for each in policy])
    assert np.allclose(weights.sum(1), 1)
    assert np.abs(weights.mean(0) - [1 / 2, 1 / 6, 1 / 6, 1 / 6]).max() < 0.03
    assert abs(weights[:, 0].var() - 1 / 12) < 0.01
    assert np.abs((weights[:, 1:] / weights[:, 1:].sum(1, keepdims=True)).var(0) - 1 / 18).max() < 0.01


def test_autoaugment_follows_its_probabilities():
    chains = [Augmentation(policy="autoaugment").draw(3, 0, index, 8, 8).policy[0][1] for index in range(4000)]
    expected: Counter[str] = Counter()
    for pair in v2.AutoAugment()._policies:
        for operation, probability, _ in pair:
            expected[operation] += probability / 25
    found = Counter(operation for chain in chains for operation, _ in chain)
    for operation in expected:
        assert found[operation] / 4000 == pytest.approx(expected[operation], abs=0.04), operation


# Within the whole way of an image


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_drawn_from_its_key_and_shifts_nothing_else(name: str):
    augment, plain = Augmentation(policy=name, size=SIDE), Augmentation(size=SIDE)
    drawn = [augment.draw(0, 1, index, 50, 70) for index in range(30)]
    assert drawn == [Augmentation(policy=name, size=SIDE).draw(0, 1, index, 50, 70) for index in range(30)]
    assert [dataclasses.replace(p, policy=()) for p in drawn] == [
        plain.draw(0, 1, index, 50, 70) for index in range(30)
    ]
    assert len({p.policy for p in drawn}) > 5
    assert {augment.draw(0, 2, index, 50, 70).policy for index in range(30)} != {p.policy for p in drawn}
    assert all(Params(**dataclasses.asdict(p)) == p and isinstance(hash(p), int) for p in drawn)
    off = dataclasses.replace(augment, augment="off")
    assert off.draw(0, 1, 0, 50, 70) == dataclasses.replace(plain, augment="off").draw(0, 1, 0, 50, 70)
    assert augment.evaluation_params(50, 70) == plain.evaluation_params(50, 70)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", ["autoaugment", "randaugment", "trivialaugment"])
def test_policies_act_on_the_cropped_and_flipped_square(name: str, interpolation: str):
    """The order of torchvision's presets, with the filter of the resize."""
    pixels = np.asarray(images(90)["smooth"])
    augment = Augmentation(policy=name, size=SIDE, interpolation=interpolation, policy_magnitude=20)
    reference = references(interpolation)[name]
    for index in range(25):
        params = augment.draw(0, 0, index, 90, 90)
        box = (params.top, params.left, params.height, params.width)
        planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        expected = functional.to_pil_image(functional.resized_crop(planes, *box, [SIDE, SIDE], MODE[interpolation]))
        expected = functional.horizontal_flip(expected) if params.flip else expected
        for step in params.policy[0][1]:
            expected = reference._apply_image_or_video_transform(expected, *step, MODE[interpolation], {})
        made = augment.apply(params, pixels)
        assert made.dtype == np.uint8 and made.flags.c_contiguous and made.flags.writeable
        assert np.array_equal(made, np.asarray(expected))


def test_strength_fields_reach_the_operations():
    weak, strong = (Augmentation(policy="randaugment", policy_magnitude=m) for m in (0, 30))
    angles = [
        {abs(m) for index in range(200) for o, m in each.draw(0, 0, index, 9, 9).policy[0][1] if o == "Rotate"}
        for each in (weak, strong)
    ]
    assert angles == [{0.0}, {30.0}]
    for severity, degrees in ((1, {0.0}), (2, {0.0, 30 / 9})):
        augment = Augmentation(policy="augmix", augmix_severity=severity)
        steps = [s for index in range(100) for _, c in augment.draw(0, 0, index, 9, 9).policy for s in c]
        assert {abs(magnitude) for operation, magnitude in steps if operation == "Rotate"} == degrees
