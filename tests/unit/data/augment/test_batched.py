"""The batched geometry agrees with `Augmentation.apply`, image by image."""

import numpy as np
import pytest
import torch

from sightline.data.augment import batched
from sightline.data.augment.classification import Augmentation


def images(rng, count=24):
    """Smooth and noisy ones, of many shapes."""
    found = []
    for number in range(count):
        height, width = (int(side) for side in rng.integers(20, 240, 2))
        noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        rows, columns = np.mgrid[0:height, 0:width]
        smooth = np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=2).astype(np.uint8)
        found.append(noise if number % 2 else smooth)
    return found


def on_device(augment, params, made, device="cpu"):
    rows = torch.from_numpy(np.stack([batched.as_row(p) for p in params]))
    planes = [torch.from_numpy(p).permute(2, 0, 1).contiguous().to(device) for p in made]
    return batched.cut_and_resize(planes, rows, params[0].size, augment.interpolation).cpu().numpy()


def compare(augment, params, made, levels, device="cpu"):
    expected = np.stack([augment.apply(p, image) for p, image in zip(params, made, strict=True)])
    found = on_device(augment, params, made, device)
    assert found.shape == expected.shape and found.dtype == np.uint8
    difference = np.abs(found.astype(int) - expected.astype(int))
    assert difference.max() <= levels
    assert difference.mean() < 0.2


@pytest.mark.parametrize(("interpolation", "levels"), [("bilinear", 2), ("bicubic", 2), ("legacy", 1)])
@pytest.mark.parametrize("geometry", [{"size": 64, "eval_resize": 80, "eval_size": 72}, {"size": 224}])
def test_training_crops(interpolation, levels, geometry):
    augment = Augmentation(interpolation=interpolation, **geometry)
    made = images(np.random.default_rng(1))
    params = [augment.draw(5, 0, index, *image.shape[:2]) for index, image in enumerate(made)]
    assert {p.flip for p in params} == {True, False}
    compare(augment, params, made, levels)


@pytest.mark.parametrize(("interpolation", "levels"), [("bilinear", 2), ("bicubic", 2), ("legacy", 1)])
def test_shifted_crops(interpolation, levels):
    """With black borders on some sides, flipped after that."""
    augment = Augmentation(
        crop="shift", crop_padding=9, size=64, eval_size=64, eval_resize=70, interpolation=interpolation
    )
    made = images(np.random.default_rng(3))
    params = [augment.draw(5, 0, index, *image.shape[:2]) for index, image in enumerate(made)]
    assert {p.flip for p in params} == {True, False} and any(p.window_left < 0 for p in params)
    compare(augment, params, made, levels)


@pytest.mark.parametrize(("interpolation", "levels"), [("bilinear", 2), ("bicubic", 2), ("legacy", 1)])
@pytest.mark.parametrize("resize", [40, 80])
@pytest.mark.parametrize("eval_geometry", ["short_side", "stretch"])
def test_evaluation_windows(interpolation, levels, resize, eval_geometry):
    """A window smaller than the resized image, and a larger one, which has a black border."""
    augment = Augmentation(eval_resize=resize, eval_size=64, interpolation=interpolation, eval_geometry=eval_geometry)
    made = images(np.random.default_rng(2))
    compare(augment, [augment.evaluation_params(*p.shape[:2]) for p in made], made, levels)


def test_groups_are_bounded_and_complete(monkeypatch):
    monkeypatch.setattr(batched, "GROUP_BYTES", 200 * 200 * 3 * 4)
    augment = Augmentation(size=32)
    made = images(np.random.default_rng(3))
    params = [augment.draw(5, 0, index, *image.shape[:2]) for index, image in enumerate(made)]
    rows = torch.from_numpy(np.stack([batched.as_row(p) for p in params]))
    groups = batched._groups(rows, 32)
    assert len(groups) > 2 and sorted(torch.cat(groups).tolist()) == list(range(len(made)))
    for group in groups:
        padded = len(group) * int(rows[group, 2].max()) * int(rows[group, 3].max()) * 3 * 4
        assert len(group) == 1 or padded <= batched.GROUP_BYTES
    compare(augment, params, made, 2)


def test_groups_of_strips_are_bounded_by_their_weights():
    augment = Augmentation(size=224)
    row = batched.as_row(augment.evaluation_params(1, 60_000))
    groups = batched._groups(torch.from_numpy(np.stack([row] * 256)), 224)
    assert sum(map(len, groups)) == 256
    assert max(map(len, groups)) * 224 * 60_000 * 4 <= batched.GROUP_BYTES


@pytest.mark.device
def test_on_the_device_too():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    for interpolation, levels in (("bilinear", 2), ("bicubic", 2), ("legacy", 1)):
        augment = Augmentation(interpolation=interpolation)
        made = images(np.random.default_rng(4))
        params = [augment.draw(5, 0, index, *image.shape[:2]) for index, image in enumerate(made)]
        compare(augment, params, made, levels, "cuda")
