"""From a scan to the network's input and back: crop to the foreground, resample, normalise, fit to a patch.

NumPy and SciPy only. Preparing data and predicting single files run the same functions, so they cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sightline.data.formats.nifti import Scan
from sightline.errors import BadSample
from sightline.parts import DataSpec

Triple = tuple[int, int, int]

ANISOTROPIC = 3.0  # from this ratio of the longest to the shortest spacing on, slices are resampled one by one
# Spacings come from files as float32: a shape within this of a whole number is that number.
_ROUNDING = 1e-4
_CUBIC, _LINEAR, _NEAREST = 3, 1, 0


@dataclass(frozen=True)
class Geometry:
    """Position of a prepared volume in its scan; all are (depth, height, width)."""

    original: Triple
    start: Triple  # the box that was cut out
    end: Triple
    shape: Triple  # of the box after resampling, before it is fitted to a patch

    @property
    def box(self) -> Triple:
        """Shape of the box that was cut out."""
        depth, height, width = (b - a for a, b in zip(self.start, self.end, strict=True))
        return depth, height, width

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """Index of the box in the last three axes of the original."""
        depth, height, width = (slice(a, b) for a, b in zip(self.start, self.end, strict=True))
        return depth, height, width


def prepare_image(scan: Scan, spec: DataSpec, name: str) -> tuple[np.ndarray, Geometry]:
    """Crop, resample (for networks of volumes) and normalise a scan: (channel, depth, height, width) float32."""
    channels, depth, height, width = scan.voxels.shape
    if channels != spec.channels:
        raise BadSample(name, f"has {channels} channels, {spec.channels} were expected")
    start, end = foreground_box(scan.voxels, name)
    original = (depth, height, width)
    cut = Geometry(original, start, end, original)
    image = scan.voxels[(slice(None), *cut.slices)]
    shape = cut.box
    if len(spec.size) == 3:
        shape = new_shape(shape, scan.spacing, spec.spacing)
        image = np.stack([resample_image(channel, shape, scan.spacing, spec.spacing) for channel in image])
    return normalise(image, spec), Geometry(original, start, end, shape)


def prepare_label(label: np.ndarray, geometry: Geometry, spacing: Sequence[float], spec: DataSpec) -> np.ndarray:
    """Crop and resample a label (depth, height, width) to the geometry of its prepared image."""
    cut = label[geometry.slices]
    if len(spec.size) == 3:
        return resample_label(cut, geometry.shape, spacing, spec.spacing)
    return np.ascontiguousarray(cut)


def to_original(scores: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Put scores (classes, depth, height, width) of a prepared volume into its scan: (classes, *original) float32.

    Where nothing was predicted, because the scan is empty there, background has 1 and the others 0.
    """
    if scores.shape[1:] != geometry.shape:
        raise ValueError(f"scores of shape {scores.shape[1:]}, the prepared volume has {geometry.shape}")
    whole = np.zeros((len(scores), *geometry.original), np.float32)
    whole[0] = 1
    for number, each in enumerate(scores):
        whole[(number, *geometry.slices)] = _zoom(np.asarray(each, np.float32), geometry.box, _LINEAR)
    return whole


def fit_patch(volume: np.ndarray, patch: Sequence[int]) -> np.ndarray:
    """Pad both sides with zeros to at least the patch; a flat patch is then cut out of the centre."""
    axes = len(patch)
    missing = [max(0, want - have) for want, have in zip(patch, volume.shape[-axes:], strict=True)]
    sides = [(0, 0)] * (volume.ndim - axes) + [(n // 2, n - n // 2) for n in missing]
    padded = np.pad(volume, sides)
    if axes == 3:  # training cuts its own patches out of the volume
        return padded
    begins = [have // 2 - want // 2 for have, want in zip(padded.shape[-2:], patch, strict=True)]
    rows, columns = (slice(begin, begin + want) for begin, want in zip(begins, patch, strict=True))
    return np.ascontiguousarray(padded[..., rows, columns])


def foreground_box(voxels: np.ndarray, name: str) -> tuple[Triple, Triple]:
    """Return (start, end) of the smallest box around all voxels above 0; `voxels`: (channel, depth, height, width)."""
    above = np.zeros(voxels.shape[1:], bool)
    for channel in voxels:
        above |= channel > 0
    if not above.any():
        raise BadSample(name, "has no voxel above 0 in any channel, so there is nothing to cut out; remove the volume")
    starts, ends = [], []
    for axis in range(3):
        hit = np.flatnonzero(above.any(axis=tuple(other for other in range(3) if other != axis)))
        starts.append(int(hit[0]))
        ends.append(int(hit[-1]) + 1)
    return (starts[0], starts[1], starts[2]), (ends[0], ends[1], ends[2])


def normalise(image: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Scale CT by the numbers of the spec, MRI channel by channel by its own mean and deviation, zeros included."""
    out = np.empty(image.shape, np.float32)
    for channel, into in zip(image, out, strict=True):
        if spec.clip:
            low, high = spec.clip
            np.clip(channel, low, high, out=into)
            mean, std = spec.mean[0], spec.std[0]
        else:
            into[...] = channel
            # In double: the sum of 10^8 floats loses digits otherwise.
            mean = float(channel.mean(dtype=np.float64))
            std = _deviation(channel, mean) or 1.0
        into -= np.float32(mean)
        into /= np.float32(std)
    return out


def _deviation(channel: np.ndarray, mean: float) -> float:
    """Compute it in double, slice by slice: NumPy's own would hold all of the channel in doubles."""
    squares = sum(float(np.square(np.subtract(plane, mean, dtype=np.float64)).sum()) for plane in channel)
    return math.sqrt(squares / channel.size)


def close_gaps(label: np.ndarray) -> np.ndarray:
    """Dilate every slice of a label by 3 x 3, then erode it: holes and cracks of one voxel are filled."""
    from scipy import ndimage

    grown = ndimage.grey_dilation(label, size=(1, 3, 3), mode="constant", cval=0)
    return ndimage.grey_erosion(grown, size=(1, 3, 3), mode="constant", cval=255)


def is_anisotropic(spacing: Sequence[float]) -> bool:
    """Return whether slices lie so far apart that nothing should be interpolated between them."""
    return max(spacing) / min(spacing) >= ANISOTROPIC


def new_shape(shape: Triple, spacing: Sequence[float], target: Sequence[float]) -> Triple:
    """Return the shape at another spacing, rounded down, at least one voxel."""
    depth, height, width = (
        max(1, int(n * have / want + _ROUNDING)) for n, have, want in zip(shape, spacing, target, strict=True)
    )
    return depth, height, width


def resample_image(volume: np.ndarray, shape: Triple, spacing: Sequence[float], target: Sequence[float]) -> np.ndarray:
    """Resample one channel: cubic; if it is anisotropic, cubic within slices and nearest across them."""
    return _resample(volume.astype(np.float32, copy=False), shape, _low_axis(spacing, target), _CUBIC)


def resample_label(label: np.ndarray, shape: Triple, spacing: Sequence[float], target: Sequence[float]) -> np.ndarray:
    """Resample each class as a mask, linearly, and keep values from 0.5 on; later classes cover earlier ones."""
    if label.shape == shape:
        return np.ascontiguousarray(label)
    out = np.zeros(shape, np.uint8)
    for number in np.unique(label[label > 0]).tolist():
        mask = _resample((label == number).astype(np.float32), shape, _low_axis(spacing, target), _LINEAR)
        out[mask >= 0.5] = number
    return out


def _low_axis(spacing: Sequence[float], target: Sequence[float]) -> int | None:
    """Return the axis across which slices lie far apart; None if no axis stands out."""
    for each in (spacing, target):
        if is_anisotropic(each):
            return int(np.argmax(each))
    return None


def _resample(volume: np.ndarray, shape: Triple, low_axis: int | None, order: int) -> np.ndarray:
    if volume.shape == shape:
        return np.ascontiguousarray(volume)
    if low_axis is None:
        return _zoom(volume, shape, order)
    stack = np.moveaxis(volume, low_axis, 0)
    plane = tuple(n for axis, n in enumerate(shape) if axis != low_axis)
    flat = np.stack([_zoom(each, plane, order) for each in stack])
    deep = _zoom(flat, (shape[low_axis], *plane), _NEAREST)
    return np.ascontiguousarray(np.moveaxis(deep, 0, low_axis))


def _zoom(volume: np.ndarray, shape: tuple[int, ...], order: int) -> np.ndarray:
    """Resample, with voxels as areas, so edges stay on edges; the border is repeated, and cubic cannot overshoot.

    The original fills with 0 beyond the border when it takes the nearest slice, which blanks the first and the last
    slice when their number grows; here they are kept.
    """
    if volume.shape == shape:
        return volume
    from scipy import ndimage

    factors = [new / old for new, old in zip(shape, volume.shape, strict=True)]
    out = ndimage.zoom(volume, factors, order=order, mode="nearest", grid_mode=True)
    assert out.shape == shape, f"{out.shape} came, {shape} was asked for"
    return np.clip(out, volume.min(), volume.max(), out=out)
