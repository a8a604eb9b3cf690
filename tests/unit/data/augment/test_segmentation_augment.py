"""Crops and what is done to them, against NumPy, SciPy and torch's resize; the batched form against the plain one."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage

from sightline.data.augment.segmentation import TOLERANCE, Augmentation, Params, cut, view
from sightline.data.augment.voxels import (
    _mixed,
    _shifted,
    blur_taps,
    gaussian_noise,
    matrix_of,
    rotated,
    tables,
    zoom_taps,
)
from sightline.errors import UsageError
from sightline.kernels.taps import plain

CROP = (9, 12, 10)
LABEL = np.zeros(CROP, np.uint8)
OPERATIONS = {
    "zoom": Params(zoom=(0.75, 0.75, 0.75)),
    "zoom in plane": Params(zoom=(1.0, 0.83, 0.83)),
    "flip width": Params(flips=(False, False, True)),
    "flip height": Params(flips=(False, True, False)),
    "flip all": Params(flips=(True, True, True)),
    "noise": Params(noise=0.3, noise_key=(7, 2**32 - 1, 12345)),
    "blur": Params(blur=1.37),
    "slight blur": Params(blur=0.5),
    "brightness": Params(brightness=0.8),
    "contrast up": Params(contrast=1.4),
    "contrast down": Params(contrast=0.7),
    "rotation": Params(turn=33.7),
    "rotation backwards": Params(turn=-121.0),
    "gamma": Params(gamma=1.4),
    "gamma below 1": Params(gamma=0.75),
    "inverted gamma": Params(gamma_inverted=0.8),
}
AS_NNUNET = Augmentation(rotation=0.2, gamma=0.3, gamma_inverted=0.1)
ALL = Params((0, 0, 0), (0.75, 0.75, 0.75), (True, False, True), 0.3, (7, 8, 9), 1.37, 0.8, 1.4)
MORE = replace(ALL, turn=50.0, gamma_inverted=0.9, gamma=1.3)


def crop_of(number: int, channels: int = 2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(number)
    image = random.normal(0.3, 1, (channels, *CROP)).astype(np.float32)
    return image, random.integers(0, 4, CROP, dtype=np.uint8)


def close(some: np.ndarray, others: np.ndarray) -> None:
    np.testing.assert_allclose(some, others, rtol=0, atol=TOLERANCE * float(np.abs(others).max()))


# Each operation against what others compute


def keys_cubic(values: np.ndarray, size: int) -> np.ndarray:
    """Keys' cubic convolution with a = -0.5 along the last axis, written down as he did."""

    def weight(x: float) -> float:
        x = abs(x)
        if x < 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0

    n = values.shape[-1]
    resized = np.zeros((*values.shape[:-1], size))
    for i in range(size):
        place = (i + 0.5) * n / size - 0.5
        for tap in range(math.floor(place) - 1, math.floor(place) + 3):
            resized[..., i] += weight(place - tap) * values[..., min(max(tap, 0), n - 1)]
    return resized


@pytest.mark.parametrize(("n", "length"), [(20, 14), (20, 20), (7, 5), (5, 1), (64, 45), (1, 1)])
def test_zoom_is_a_cubic_resize_of_the_middle(n: int, length: int):
    values = np.random.default_rng(n).normal(size=(3, n))
    start = (n - length + 1) // 2
    matrix = matrix_of(zoom_taps(torch.tensor([[start, length, 0]], dtype=torch.int32), n))[0].double().numpy()
    resized = values @ matrix.T
    np.testing.assert_allclose(resized, keys_cubic(values[:, start : start + length], n), atol=1e-6)
    flipped = matrix_of(zoom_taps(torch.tensor([[start, length, 1]], dtype=torch.int32), n))[0].double().numpy()
    assert np.array_equal(flipped, matrix[::-1])
    # Away from the edges, where it leaves taps out, torch's antialiased resize (a = -0.5 too) is the same.
    window = torch.from_numpy(values[:, start : start + length])[None, :, None]
    other = torch.nn.functional.interpolate(window, (1, n), mode="bicubic", antialias=True)[0, :, 0].numpy()
    margin = math.ceil(2 * n / length)
    np.testing.assert_allclose(resized[:, margin : n - margin], other[:, margin : n - margin], atol=1e-6)


@pytest.mark.parametrize(
    ("sigma", "n"), [(0.5, 1), (0.9, 2), (1.0, 4), (1.34, 5), (1.5, 30), (1.5, 1), (1.5, 4), (0.5, 30), (1.34, 2)]
)
def test_blur_is_scipys(sigma: float, n: int):
    values = np.random.default_rng(0).normal(size=(3, n))
    matrix = matrix_of(blur_taps(torch.tensor([sigma]), n, most=5))[0].double().numpy()
    expected = ndimage.gaussian_filter1d(values, sigma, axis=1, mode="mirror", radius=math.ceil(3 * sigma))
    np.testing.assert_allclose(values @ matrix.T, expected, atol=1e-6)


@pytest.mark.parametrize("axis", [2, 3, 4])
def test_taps_summed_along_an_axis_are_their_matrix(axis: int):
    """As a step on CUDA sums them: each sample with its own numbers, against NumPy in float64."""
    image = torch.randn(2, 3, *CROP)
    n = image.shape[axis]
    windows = torch.tensor([[2, n - 4, 1], [0, n, 0]], dtype=torch.int32)
    for taps in (zoom_taps(windows, n), blur_taps(torch.tensor([0.0, 1.3]), n, most=5)):
        matrices = matrix_of(taps).double().numpy()
        expected = [
            np.moveaxis(np.tensordot(matrix, one, (1, axis - 1)), 0, axis - 1)
            for matrix, one in zip(matrices, image.double().numpy(), strict=True)
        ]
        close(plain(image, *tables(taps), axis).numpy(), np.stack(expected))
    nothing = zoom_taps(torch.tensor([[0, n, 0]] * 2, dtype=torch.int32), n)
    assert torch.equal(plain(image, *tables(nothing), axis), image)


def test_words_of_32_bits_are_mixed_as_those_held_in_64():
    """CUDA mixes int32, the CPU int64: crops must have the same noise."""
    wide = torch.randint(0, 2**32, (10_000,), generator=torch.Generator().manual_seed(0))
    wide[:4] = torch.tensor([0, 1, 2**31, 2**32 - 1])
    narrow = wide.int()
    assert torch.equal(_mixed(narrow), _mixed(wide).int())
    assert torch.equal(_shifted(_mixed(narrow), 8).long(), _mixed(wide) >> 8)


def test_what_is_not_drawn_changes_no_bit():
    nothing = torch.tensor([[0, 13, 0]], dtype=torch.int32)
    assert torch.equal(matrix_of(zoom_taps(nothing, 13))[0], torch.eye(13))
    assert torch.equal(matrix_of(blur_taps(torch.zeros(1), 13, most=5))[0], torch.eye(13))
    image, label = crop_of(0)
    found = Augmentation().apply(Params(), image, label)
    assert np.array_equal(found[0], image) and np.array_equal(found[1], label)
    batch = finished([Params(), MORE], [(image, label), crop_of(1)], AS_NNUNET)
    assert np.array_equal(batch[0][0], image) and np.array_equal(batch[1][0], label)


def test_the_whole_of_zoom():
    image, label = crop_of(1)
    found, classes = Augmentation().apply(OPERATIONS["zoom"], image, label)
    inner = (slice(2, 8), slice(2, 11), slice(2, 9))  # 6 of 9, 9 of 12, 7 of 10: the middle, half a voxel is rounded up
    expected = image[(slice(None), *inner)].astype(np.float64)
    for axis, n in zip((1, 2, 3), CROP, strict=True):
        expected = np.moveaxis(keys_cubic(np.moveaxis(expected, axis, -1), n), -1, axis)
    close(found, expected)
    window = torch.from_numpy(label[inner].astype(np.float32))[None, None]
    nearest = torch.nn.functional.interpolate(window, CROP, mode="nearest-exact")[0, 0].numpy()
    assert np.array_equal(classes, nearest)


def test_flips_are_numpys():
    image, label = crop_of(2)
    for flips in itertools.product((False, True), repeat=3):
        axes = [axis for axis in range(3) if flips[axis]]
        found, classes = Augmentation().apply(Params(flips=flips), image, label)
        assert np.array_equal(found, np.flip(image, [axis + 1 for axis in axes]))
        assert np.array_equal(classes, np.flip(label, axes))


def test_brightness_contrast_and_blur_are_numpys():
    image, label = crop_of(3)
    low, high = image.min(), image.max()  # of all channels together

    def change(params: Params) -> np.ndarray:
        found, classes = Augmentation().apply(params, image, label)
        assert np.array_equal(classes, label)  # only what moves voxels may touch them
        return found

    close(change(Params(brightness=1.2)), image * 1.2)
    brighter = change(Params(contrast=1.5))
    close(brighter, np.clip(image * 1.5, low, high))
    assert brighter.max() == high and brighter.min() == low and (brighter == high).sum() > 1
    close(change(Params(contrast=0.7)), np.clip(image * 0.7, low, high))
    blurred = np.stack([ndimage.gaussian_filter(c, 1.2, mode="mirror", radius=4) for c in image])
    close(change(Params(blur=1.2)), blurred)
    noise = change(OPERATIONS["noise"]) - image
    close(noise, 0.3 * gaussian_noise(torch.tensor([[7, 2**32 - 1, 12345]]), (1, *image.shape))[0].numpy())


@pytest.mark.parametrize("degrees", [12.0, -75.5, 90.0, 161.25])
def test_rotation_is_scipys(degrees: float):
    image, label = crop_of(9)
    found, classes = Augmentation().apply(Params(turn=degrees), image, label)
    angle = math.radians(degrees)
    matrix = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    middle = (np.array(CROP[1:]) - 1) / 2
    how = {"offset": middle - matrix @ middle, "mode": "grid-constant"}

    def turned(plane: np.ndarray, order: int) -> np.ndarray:
        return ndimage.affine_transform(plane.astype(np.float64), matrix, order=order, **how)

    expected = np.stack([[turned(plane, 1) for plane in channel] for channel in image])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(image).max())  # angles have 22 bits
    assert np.array_equal(classes, np.stack([turned(plane, 0) for plane in label]).astype(np.uint8))


def test_quarter_turns_of_a_square_are_numpys():
    image, label = crop_of(10)
    image, label = image[..., :10, :], label[:, :10]
    for quarters in (1, 2, 3):
        found, classes = Augmentation().apply(Params(turn=90.0 * quarters), image, label)
        assert np.array_equal(found, np.rot90(image, -quarters, (2, 3)))
        assert np.array_equal(classes, np.rot90(label, -quarters, (1, 2)))
    whole = rotated(torch.from_numpy(image)[None], torch.from_numpy(label)[None], torch.tensor([[2**22, 0]]))
    assert np.array_equal(whole[0][0], image) and np.array_equal(whole[1][0], label)


def numpy_gamma(image: np.ndarray, power: float) -> np.ndarray:
    """nnU-Net's gamma with kept statistics, in float64."""
    found = []
    for channel in image.astype(np.float64):
        low, high = channel.min(), channel.max()
        bent = ((channel - low) / (high - low)) ** power
        found.append((bent - bent.mean()) / bent.std() * channel.std() + channel.mean())
    return np.stack(found)


def test_gamma_is_numpys_and_keeps_mean_and_deviation():
    image, label = crop_of(11)
    for power in (0.7, 1.5):
        found, classes = Augmentation().apply(Params(gamma=power), image, label)
        close(found, numpy_gamma(image, power))
        inverted = Augmentation().apply(Params(gamma_inverted=power), image, label)[0]
        close(inverted, -numpy_gamma(-image, power))
        assert np.array_equal(classes, label) and np.abs(found - inverted).max() > 0.1
        for one, other in zip(found, image, strict=True):
            assert one.mean() == pytest.approx(other.mean(), abs=1e-5) and one.std() == pytest.approx(other.std())
    flat = np.full_like(image, 3.0)  # empty slices have no range
    assert np.isfinite(Augmentation().apply(Params(gamma=1.5), flat, label)[0]).all()


def test_rotation_and_gamma_are_drawn_as_often_as_in_nnunet():
    drawn = [AS_NNUNET.draw(1, index // 100, index % 100, LABEL, (4, 6, 5), dim=2) for index in range(4000)]
    turns = np.array([params.turn for params in drawn])
    assert (turns != 0).mean() == pytest.approx(0.2, abs=0.02) and -180 <= turns.min() < -170 < 170 < turns.max() <= 180
    for field, share in (("gamma", 0.3), ("gamma_inverted", 0.1)):
        powers = np.array([getattr(params, field) for params in drawn])
        assert (powers != 1).mean() == pytest.approx(share, abs=0.02)
        assert ((powers < 1).sum() / (powers != 1).sum()) == pytest.approx(0.5, abs=0.07)
        assert 0.7 <= powers.min() < 0.73 and 1.45 < powers.max() <= 1.5
    # Each operation has a stream of its own: the others are drawn as without them.
    plain = Augmentation().draw(1, 3, 7, LABEL, (4, 6, 5), dim=2)
    assert replace(AS_NNUNET.draw(1, 3, 7, LABEL, (4, 6, 5), dim=2), turn=0.0, gamma=1.0, gamma_inverted=1.0) == plain
    assert plain.turn == 0 and plain.gamma == plain.gamma_inverted == 1  # off unless asked for


def test_noise_is_normal_and_of_its_key():
    from scipy.stats import kstest

    shape = (2, 3, 16, 40, 32)
    noise = gaussian_noise(torch.tensor([[1, 2, 3], [1, 2, 4]]), shape)
    assert noise.shape == shape and torch.isfinite(noise).all()
    first, second = noise.flatten(1).double().numpy()
    assert kstest(first, "norm").pvalue > 0.01 and kstest(second, "norm").pvalue > 0.01
    few = 4 / math.sqrt(len(first))  # four deviations of a correlation of independent numbers
    assert abs(np.corrcoef(first, second)[0, 1]) < few
    for lag in (1, 2, 32, 32 * 40, 16 * 32 * 40):
        assert abs(np.corrcoef(first[:-lag], first[lag:])[0, 1]) < few
    assert torch.equal(gaussian_noise(torch.tensor([[1, 2, 3]]), (1, *shape[1:]))[0], noise[0])


def test_noise_written_again_with_pythons_integers():
    """A run resumed elsewhere, or with another version, must see the noise it saw before."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x7FEB352D % 2**32
        word = (word ^ (word >> 15)) * 0x846CA68B % 2**32
        return word ^ (word >> 16)

    keys = 2**32 - 1, 0x9E3779B9, 3
    expected = []
    for voxel in (0, 1, 2, 3, 70_000):
        base = mix(voxel ^ keys[0])
        distance, angle = ((mix(base ^ keys[1]) >> 8) + 1) / 2**24, (mix(base ^ keys[2]) >> 8) / 2**24
        expected.append(math.sqrt(-2 * math.log(distance)) * math.cos(2 * math.pi * angle))
    found = gaussian_noise(torch.tensor([keys]), (1, 1, 1, 1, 70_001)).flatten()[[0, 1, 2, 3, 70_000]]
    assert found.tolist() == pytest.approx(expected, abs=2e-6)


# The batched form


def finished(
    params: list[Params], crops: list[tuple[np.ndarray, np.ndarray]], config: Augmentation | None = None, dim: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    config = config or Augmentation()
    carried = [config.carried(each, CROP) for each in params]
    numbers = {key: torch.from_numpy(np.stack([each[key] for each in carried])) for key in carried[0]}
    images, labels = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*crops, strict=True))
    found, classes = config.finish(images, labels, numbers, dim)
    return found.numpy(), classes.numpy()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_in_a_batch(name: str):
    """Beside a crop with which much is done, which must not leak into it."""
    config, crops = AS_NNUNET, [crop_of(4), crop_of(5)]
    images, labels = finished([OPERATIONS[name], MORE], crops, config)
    for number, params in enumerate((OPERATIONS[name], MORE)):
        expected = config.apply(params, *crops[number])
        close(images[number], expected[0])
        assert np.array_equal(labels[number], expected[1])


def test_all_together_is_one_after_the_other():
    image, label = crop_of(6)
    config, moves = AS_NNUNET, (Params(zoom=ALL.zoom), Params(flips=ALL.flips), Params(turn=MORE.turn))
    steps = (*moves, Params(noise=0.3, noise_key=(7, 8, 9)), Params(blur=ALL.blur), Params(brightness=0.8))
    expected = image, label
    for params in (*steps, Params(contrast=1.4), Params(gamma_inverted=0.9), Params(gamma=1.3)):
        expected = config.apply(params, *expected)
    for found in (config.apply(MORE, image, label), [a[0] for a in finished([MORE], [(image, label)], config)]):
        close(found[0], expected[0])
        assert np.array_equal(found[1], expected[1])


@pytest.mark.parametrize("off", ["zoom", "noise", "blur", "brightness", "contrast"])
def test_an_operation_that_is_never_drawn_is_left_out(off: str):
    """A share of 0 takes the operation out of the batched form; the others stay as they are."""
    neutral = {"zoom": (1.0, 1.0, 1.0), "noise": 0.0, "blur": 0.0, "brightness": 1.0, "contrast": 1.0}
    params, config = replace(ALL, **{off: neutral[off]}), replace(Augmentation(), **{off: 0.0})
    image, label = crop_of(7)
    images, labels = finished([params], [(image, label)], config)
    expected = Augmentation().apply(params, image, label)
    close(images[0], expected[0])
    assert np.array_equal(labels[0], expected[1])


def test_slices_are_not_zoomed_in_depth_where_that_is_off():
    config, (image, label) = replace(Augmentation(), zoom_depth=False), crop_of(8)
    params = Params(zoom=(1.0, 0.75, 0.75), flips=(False, True, False))
    images, labels = finished([params], [(image, label)], config, dim=2)
    expected = Augmentation().apply(params, image, label)
    close(images[0], expected[0])
    assert np.array_equal(labels[0], expected[1])


# Draws


DRAWS = 10_000


@pytest.fixture(scope="module")
def drawn() -> list[Params]:
    return [Augmentation().draw(1, index // 100, index % 100, LABEL, (4, 6, 5), dim=3) for index in range(DRAWS)]


def test_every_operation_is_drawn_as_often_as_it_should(drawn: list[Params]):
    def share(is_drawn) -> float:
        return sum(map(is_drawn, drawn)) / DRAWS

    for field, neutral in (("noise", 0), ("blur", 0), ("brightness", 1), ("contrast", 1), ("zoom", (1, 1, 1))):
        assert share(lambda p, f=field, n=neutral: getattr(p, f) != n) == pytest.approx(0.15, abs=0.01)
    for axis in range(3):
        assert share(lambda p, a=axis: p.flips[a]) == pytest.approx(0.33, abs=0.01)


def test_what_is_drawn_lies_in_its_range(drawn: list[Params]):
    from scipy.stats import kstest

    ranges = {"noise": (0, 0.33), "blur": (0.5, 1.5), "brightness": (0.7, 1.3), "contrast": (0.65, 1.5)}
    values = {name: [getattr(p, name) for p in drawn if getattr(p, name) not in (0, 1)] for name in ranges}
    ranges["zoom"], values["zoom"] = (0.7, 1.0), [p.zoom[0] for p in drawn if p.zoom != (1, 1, 1)]
    for name, (low, high) in ranges.items():
        found = np.array(values[name])
        assert low <= found.min() < low + 0.02 and high - 0.02 < found.max() <= high
        assert kstest((found - low) / (high - low), "uniform").pvalue > 0.01
    assert all(len(set(p.zoom)) == 1 for p in drawn)


def test_streams_know_nothing_of_each_other(drawn: list[Params]):
    """With one seed for all, as the original had it, both flips would agree."""
    tosses = np.array([(*p.flips, p.noise > 0, p.blur > 0, p.brightness != 1, p.contrast != 1) for p in drawn], float)
    between = np.corrcoef(tosses.T)
    assert np.abs(between - np.eye(len(between))).max() < 4 / math.sqrt(DRAWS)


def test_draws_depend_on_seed_epoch_and_index_alone():
    config = Augmentation()
    base = config.draw(1, 2, 3, LABEL, (4, 6, 5), dim=2)
    assert base == config.draw(1, 2, 3, LABEL, (4, 6, 5), dim=2)
    others = [config.draw(*key, LABEL, (4, 6, 5), dim=2) for key in ((0, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert len({base, *others}) == 4


def test_networks_of_slices_flip_no_depth_and_may_zoom_none():
    always = replace(Augmentation(), zoom=1.0, flip=1.0)
    deep, flat = (always.draw(1, 0, 0, LABEL, (4, 6, 5), dim=dim) for dim in (3, 2))
    assert deep.flips == (True, True, True) and flat.flips == (False, True, True)
    assert flat.zoom == deep.zoom and deep.zoom[0] < 1
    kept = replace(always, zoom_depth=False).draw(1, 0, 0, LABEL, (4, 6, 5), dim=2)
    assert kept.zoom == (1.0, *flat.zoom[1:])


def test_without_augmentation_only_the_crop_moves():
    off = replace(Augmentation(), augment="off")
    found = [off.draw(1, 0, index, LABEL, (4, 6, 5), dim=3) for index in range(50)]
    assert all(replace(params, anchor=(0, 0, 0)) == Params() for params in found)
    assert len({params.anchor for params in found}) > 40
    assert found[7].anchor == Augmentation().draw(1, 0, 7, LABEL, (4, 6, 5), dim=3).anchor


# The crop


def test_a_third_of_the_crops_is_centred_on_the_foreground():
    label = np.zeros((10, 20, 20), np.uint8)
    label[4:6, 8:12, 9:11] = 2  # 16 of 4000 voxels
    config = replace(Augmentation(), augment="off")
    anchors = [config.draw(0, 0, index, label, (1, 1, 1), dim=3).anchor for index in range(DRAWS)]  # the centres
    hits = np.array([label[anchor] > 0 for anchor in anchors])
    assert hits.mean() == pytest.approx(0.33 + 0.67 * 16 / 4000, abs=0.015)
    met = {anchor for anchor, hit in zip(anchors, hits, strict=True) if hit}
    assert len(met) == 16
    others = np.array([anchor for anchor, hit in zip(anchors, hits, strict=True) if not hit])
    for axis, side in enumerate(label.shape):
        assert np.bincount(others[:, axis], minlength=side).min() > 0.8 * len(others) / side
    always = replace(config, oversampling=1.0)
    assert all(label[always.draw(0, 0, i, label, (1, 1, 1), dim=3).anchor] for i in range(100))
    assert len({always.draw(0, 0, i, LABEL, (1, 1, 1), dim=3).anchor for i in range(100)}) > 80  # no foreground at all


def test_crops_are_centred_and_stay_inside():
    label = np.zeros((12, 9, 7), np.uint8)
    label[6, 1, 6] = 1
    always = replace(Augmentation(), oversampling=1.0)
    # Half of 5 is 2: 6 - 2 in depth; clamped at the top edge; at the far edge 7 - 4; an axis that is too short.
    assert always.draw(0, 0, 0, label, (5, 4, 4), dim=3).anchor == (4, 0, 3)
    assert always.draw(0, 0, 0, label, (16, 9, 7), dim=3).anchor == (-4, 0, 0)
    for index in range(300):
        anchor = Augmentation().draw(0, 0, index, label, (5, 4, 4), dim=3).anchor
        assert all(0 <= a <= side - n for a, side, n in zip(anchor, label.shape, (5, 4, 4), strict=True))


class Watched:
    """An array that notes what is read of it."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __getitem__(self, key):
        found = self.array[key]
        self.read += found.size
        return found


@pytest.mark.parametrize("anchor", [(2, 0, 1), (-3, 0, 0), (0, -2, -1), (-3, -2, 5)])
def test_a_crop_reads_what_it_needs_and_fills_up_with_zeros(anchor: tuple[int, int, int]):
    volume = np.random.default_rng(0).normal(size=(2, 8, 9, 10)).astype(np.float32)
    crop = (5, 6, 4)
    padded = np.pad(volume, ((0, 0), (3, 3), (2, 2), (1, 1)))
    z, y, x = (a + p for a, p in zip(anchor, (3, 2, 1), strict=True))
    expected = padded[:, z : z + 5, y : y + 6, x : x + 4]
    watched = Watched(volume)
    found = cut(watched, anchor, crop)
    assert np.array_equal(found, expected) and found.flags.owndata
    inside = [min(a + n, side) - max(a, 0) for a, n, side in zip(anchor, crop, volume.shape[1:], strict=True)]
    assert watched.read == 2 * math.prod(inside)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("augment", "maybe"),
        ("augment_on", "moon"),
        ("oversampling", 1.5),
        ("noise", math.nan),
        ("flip", -0.1),
        ("zoom_range", (0.9, 0.7)),
        ("zoom_range", (0.5, 1.2)),
        ("noise_std", (0.0, math.inf)),
        ("blur_sigma", (math.nan, 1.0)),
        ("contrast_range", (-1.0, 1.0)),
        ("rotation_range", (-200.0, 10.0)),
        ("gamma", 2.0),
        ("gamma_range", (1.5, 0.7)),
    ],
)
def test_fields_that_cannot_work_are_refused(field: str, value):
    with pytest.raises(UsageError, match=field):
        replace(Augmentation(), **{field: value})


@pytest.mark.parametrize(("anchor", "is_copied"), [((1, 0, 2), False), ((1, 1, 3), True), ((-1, 0, 0), True)])
def test_a_view_is_the_crop_and_copies_it_only_beyond_the_volume(anchor, is_copied):
    volume = np.random.default_rng(0).random((2, 6, 5, 7), np.float32)
    found = view(volume, anchor, (4, 5, 5))
    assert np.array_equal(found, cut(volume, anchor, (4, 5, 5)))
    assert np.shares_memory(found, volume) != is_copied
