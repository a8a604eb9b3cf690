"""The way of a volume from scan to input, against MONAI, map_coordinates and a few lines of NumPy."""

import tracemalloc

import numpy as np
import pytest
from scipy import ndimage

from sightline.data.formats.nifti import Scan
from sightline.data.volumes import geometry as volumes
from sightline.data.volumes.geometry import Geometry, fit_patch, normalise, prepare_image, prepare_label, to_original
from sightline.errors import BadSample
from sightline.parts import DataSpec

FLAT = DataSpec(("background", "a"), 2, (32, 24), (), (), spacing=(1.0, 1.0))
DEEP = DataSpec(("background", "a"), 2, (16, 32, 24), (), (), spacing=(2.0, 1.5, 1.5))
CT = DataSpec(("background", "a"), 2, (32, 24), (99.4,), (39.36,), spacing=(1.0, 1.0), clip=(-17.0, 201.0))


def volume(shape=(2, 9, 30, 21), seed=0):
    """Positive inside a box, zero and negative around it."""
    random = np.random.default_rng(seed)
    voxels = -random.integers(0, 3, shape).astype(np.float32)
    voxels[0, 2:7, 3:25, 4:19] = random.normal(80, 60, (5, 22, 15))
    voxels[1, 1:6, 5:27, 4:18] = random.normal(200, 9, (5, 22, 14))
    voxels[0, 6, 24, 18] = voxels[1, 1, 26, 5] = 7
    return voxels


def scan(spacing=(1.0, 1.0, 1.0), **options):
    return Scan(volume(**options), spacing, np.eye(4))


def test_crop_as_monai():
    from monai.transforms import CropForeground

    voxels = volume()
    wanted, start, end = CropForeground(select_fn=lambda x: x > 0, return_coords=True)(voxels)
    found_start, found_end = volumes.foreground_box(voxels, "a")
    assert (found_start, found_end) == (tuple(start.tolist()), tuple(end.tolist())) == ((1, 3, 4), (7, 27, 19))
    geometry = Geometry((9, 30, 21), found_start, found_end, (6, 24, 15))
    assert np.array_equal(voxels[(slice(None), *geometry.slices)], np.asarray(wanted))


def test_mri_as_monai():
    from monai.transforms import NormalizeIntensity

    voxels = volume()
    voxels[1] = 42  # no deviation at all
    wanted = np.asarray(NormalizeIntensity(nonzero=False, channel_wise=True)(voxels.copy()))
    found = normalise(voxels, FLAT)
    assert found.dtype == np.float32 and np.abs(found - wanted).max() < 1e-5
    assert abs(found[0].mean()) < 1e-5 and abs(found[0].std() - 1) < 1e-5 and not found[1].any()


def test_mri_is_scaled_without_a_copy_in_doubles():
    voxels = np.random.default_rng(0).normal(500, 200, (1, 64, 128, 128)).astype(np.float32)
    tracemalloc.start()
    found = normalise(voxels, FLAT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    doubles = voxels.astype(np.float64)
    assert np.array_equal(found, (voxels - np.float32(doubles.mean())) / np.float32(doubles.std()))
    assert peak < 1.5 * found.nbytes


def test_ct_by_the_numbers_of_the_spec():
    voxels = volume() * 3
    wanted = (np.minimum(np.maximum(voxels.astype(np.float64), -17), 201) - 99.4) / 39.36
    before = voxels.copy()
    assert np.allclose(normalise(voxels, CT), wanted, atol=1e-5) and np.array_equal(voxels, before)


@pytest.mark.parametrize("size", [(20, 15), (40, 40), (31, 22), (33, 17)])
def test_fit_to_a_flat_patch_as_monai(size):
    from monai.transforms import CenterSpatialCrop, SpatialPad

    voxels = volume()
    depth = voxels.shape[1]
    padded = SpatialPad((depth, *size))(voxels)
    wanted = np.asarray(CenterSpatialCrop((depth, *size))(padded))
    found = fit_patch(voxels, size)
    assert found.shape == (2, 9, *size) and np.array_equal(found, wanted)
    assert np.array_equal(fit_patch(voxels[0], size), wanted[0])


def test_fit_to_a_deep_patch_only_adds():
    from monai.transforms import SpatialPad

    voxels = volume()
    found = fit_patch(voxels, (12, 20, 24))
    assert found.shape == (2, 12, 30, 24)
    assert np.array_equal(found, np.asarray(SpatialPad((12, 20, 24))(voxels)))


def sampled(values, shape, order):
    """The same by its definition: the value at the place of every new voxel's centre."""
    places = [(np.arange(new) + 0.5) * old / new - 0.5 for new, old in zip(shape, values.shape, strict=True)]
    found = ndimage.map_coordinates(values, np.meshgrid(*places, indexing="ij"), order=order, mode="nearest")
    return np.clip(found, values.min(), values.max())


@pytest.mark.parametrize("shape", [(9, 30, 21), (14, 18, 40), (4, 60, 21)])
def test_resample_by_its_definition(shape):
    image = volume()[0]
    found = volumes.resample_image(image, shape, (1.0, 1.0, 1.0), (1.2, 1.0, 1.0))
    assert found.shape == shape and np.allclose(found, sampled(image, shape, 3), atol=1e-4)


def test_slices_far_apart_are_resampled_one_by_one():
    image = volume()[0]
    shape = (14, 18, 40)
    planes = np.stack([sampled(plane, shape[1:], 3) for plane in image])
    nearest = np.floor((np.arange(14) + 0.5) * 9 / 14).astype(int)  # the slice that a new slice's centre lies in
    for spacing, target in (((3.0, 1.0, 1.0), (1.0, 1.0, 1.0)), ((1.0, 1.0, 1.0), (4.0, 1.0, 1.2))):
        found = volumes.resample_image(image, shape, spacing, target)
        assert np.allclose(found, planes[nearest], atol=1e-4)
    assert np.abs(found[0]).max() > 0 and np.abs(found[-1]).max() > 0  # no slice is lost at the ends
    # The axis of the longest spacing it is, not always the first.
    turned = volumes.resample_image(image.T, shape[::-1], (1.0, 1.0, 3.0), (1.0, 1.0, 1.0))
    assert np.allclose(turned, planes[nearest].T, atol=1e-4)


def test_labels_are_resampled_class_by_class():
    label = np.zeros((9, 30, 21), np.uint8)
    label[2:6, 5:20, 4:12], label[3:7, 12:26, 8:18], label[8, 0, 0] = 1, 3, 2
    for spacing, shape in (((1.0, 1.0, 1.0), (13, 22, 30)), ((4.0, 1.0, 1.0), (13, 22, 30))):
        wanted = np.zeros(shape, np.uint8)
        for number in (1, 2, 3):
            mask = (label == number).astype(np.float32)
            if spacing[0] == 1:
                share = sampled(mask, shape, 1)
            else:
                flat = np.stack([sampled(plane, shape[1:], 1) for plane in mask])
                share = flat[np.floor((np.arange(13) + 0.5) * 9 / 13).astype(int)]
            wanted[share >= 0.5] = number
        found = volumes.resample_label(label, shape, spacing, (1.0, 1.0, 1.0))
        assert found.dtype == np.uint8 and np.mean(found != wanted) < 1e-3  # ties, one side or the other
        assert set(np.unique(found)) <= {0, 1, 2, 3} and np.count_nonzero(found == 3) > 500
    assert np.array_equal(volumes.resample_label(label, (9, 30, 21), (1.0,) * 3, (1.0,) * 3), label)


@pytest.mark.parametrize(
    ("shape", "spacing", "target", "wanted"),
    [
        ((10, 20, 30), (1.0, 1.0, 1.0), (2.0, 1.0, 3.0), (5, 20, 10)),
        ((10, 20, 30), (1.0, 0.99, 1.5), (3.0, 1.0, 1.0), (3, 19, 45)),  # rounded down
        ((512, 512, 512), tuple(float(np.float32(v)) for v in (0.79, 0.7676, 1.37)), (0.79, 0.7676, 1.37), (512,) * 3),
        ((1, 2, 3), (1.0, 1.0, 1.0), (5.0, 5.0, 5.0), (1, 1, 1)),
    ],
)
def test_new_shape(shape, spacing, target, wanted):
    assert volumes.new_shape(shape, spacing, target) == wanted


def test_flat_images_are_not_resampled():
    image, geometry = prepare_image(scan(spacing=(5.0, 0.3, 2.0)), FLAT, "a")
    assert geometry == Geometry((9, 30, 21), (1, 3, 4), (7, 27, 19), (6, 24, 15))
    assert image.shape == (2, 6, 24, 15)
    assert np.allclose(image.mean(axis=(1, 2, 3)), 0, atol=1e-5) and np.allclose(
        image.std(axis=(1, 2, 3)), 1, atol=1e-5
    )


def test_deep_images_are_and_labels_with_them():
    taken = scan(spacing=(1.0, 3.0, 0.75))
    image, geometry = prepare_image(taken, DEEP, "a")
    assert geometry.shape == (3, 48, 7) and geometry.box == (6, 24, 15) and image.shape == (2, 3, 48, 7)
    label = (taken.voxels[0] > 0).astype(np.uint8)
    found = prepare_label(label, geometry, taken.spacing, DEEP)
    assert found.shape == geometry.shape
    cut = label[geometry.slices]
    assert np.array_equal(found, volumes.resample_label(cut, geometry.shape, taken.spacing, DEEP.spacing))


def test_wrong_channels_and_nothing_inside():
    with pytest.raises(BadSample, match="^case 7: has 2 channels, 4 were expected"):
        prepare_image(scan(), DataSpec(("background", "a"), 4, (8, 8), (), (), spacing=(1.0, 1.0)), "case 7")
    empty = Scan(np.full((2, 3, 4, 5), -1, np.float32), (1.0, 1.0, 1.0), np.eye(4))
    with pytest.raises(BadSample, match="^case 7: has no voxel above 0"):
        prepare_image(empty, FLAT, "case 7")


def test_back_to_the_original():
    taken = scan(spacing=(1.0, 1.0, 1.0))
    scores = np.random.default_rng(0).normal(size=(3, 6, 24, 15)).astype(np.float32)
    whole = to_original(scores, Geometry((9, 30, 21), (1, 3, 4), (7, 27, 19), (6, 24, 15)))
    assert whole.shape == (3, 9, 30, 21) and np.array_equal(whole[:, 1:7, 3:27, 4:19], scores)
    outside = np.ones(whole.shape[1:], bool)
    outside[1:7, 3:27, 4:19] = False
    assert (whole[0][outside] == 1).all() and not whole[1:, outside].any()
    # There and back through another spacing a label stays nearly what it was.
    label = (ndimage.gaussian_filter((taken.voxels[0] > 60).astype(float), 2) > 0.3).astype(np.uint8)
    _, geometry = prepare_image(taken, DEEP, "a")
    small = prepare_label(label, geometry, taken.spacing, DEEP)
    back = to_original(np.stack([1 - small, small]).astype(np.float32), geometry).argmax(0)
    inside = label[geometry.slices]
    assert 2 * (back[geometry.slices] & inside).sum() / (back.sum() + inside.sum()) > 0.85
    with pytest.raises(ValueError, match="scores of shape"):
        to_original(scores[:, 1:], geometry)


def test_gaps_are_closed_by_slice():
    label = np.zeros((3, 9, 9), np.uint8)
    label[0, 2:7, 2:7] = 2
    label[0, 4, 4] = 0  # a hole
    label[1, 0, 0] = 1  # alone at the edge
    label[2, :, 3], label[2, :, 5] = 1, 1  # two lines with a crack between
    found = volumes.close_gaps(label)
    wanted = label.copy()
    wanted[0, 4, 4], wanted[2, :, 4] = 2, 1
    assert np.array_equal(found, wanted) and found.dtype == np.uint8
