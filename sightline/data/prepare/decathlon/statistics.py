"""Spacing, patch and CT numbers of data outside the ten tasks, measured on its training set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sightline.data.prepare.decathlon.raw import RawCase
from sightline.data.volumes.files import read_label, read_scan
from sightline.data.volumes.geometry import foreground_box, is_anisotropic
from sightline.data.volumes.plan import Ct, Patch, make_spec
from sightline.errors import BadData, BadSample
from sightline.parts import DataSpec

_FITTING_2D = 95  # percent of the cases that a flat patch holds whole, if they are no longer than
_LONGEST_SIDE_2D = 512
_MOST_VOXELS_3D = 128**3
_PERCENTILES = (0.5, 99.5)
_SMALLEST_HALVED, _MOST_HALVINGS = 8, 5  # as the network halves a side


class Measured(NamedTuple):
    """Numbers of one case."""

    box: tuple[int, ...]  # sides of the foreground
    spacing: tuple[float, ...]
    values: np.ndarray  # of labelled voxels, rounded to whole numbers; empty where not CT
    counts: np.ndarray
    sums: tuple[int, float, float]  # voxels, their sum and the sum of their squares, not rounded


def is_ct(modalities: Sequence[str]) -> bool:
    """Return whether every channel is CT, whose numbers mean the same in every scan."""
    return all(modality.strip().upper() == "CT" for modality in modalities)


def measure(wants_values: bool, case: RawCase) -> Measured | str:
    """Read a case of the training set; return the reason if it cannot be used."""
    try:
        scan = read_scan(case.image, case.name, case.header.shape[0])
        start, end = foreground_box(scan.voxels, case.name)
        values = np.zeros(0, np.float32)
        if wants_values:
            assert case.label is not None, "cases of the training set have labels"
            label, _ = read_label(case.label, case.name)
            values = scan.voxels[:, label > 0]
    except BadSample as error:
        return str(error)
    rounded, counts = np.unique(np.rint(values).astype(np.int64), return_counts=True)
    sums = (values.size, float(values.sum(dtype=np.float64)), float(np.square(values, dtype=np.float64).sum()))
    box = tuple(b - a for a, b in zip(start, end, strict=True))
    return Measured(box, scan.spacing, rounded, counts, sums)


def find_spec(
    found: Sequence[Measured], dim: int, classes: tuple[str, ...], modalities: Sequence[str], where: str
) -> DataSpec:
    """Return the spec of data with these cases."""
    spacings = np.array([each.spacing for each in found])  # (cases, 3)
    boxes = np.array([each.box for each in found])
    ct = _ct(found, where) if is_ct(modalities) else None
    if dim == 2:
        # Slices are cut to the patch, also those that are evaluated: it must be wide enough for nearly all of them.
        height, width = np.percentile(boxes, _FITTING_2D, axis=0)[1:]
        spacing = tuple(round(float(mm), 4) for mm in np.median(spacings, axis=0)[1:])
        patch = Patch((flat_side(height), flat_side(width)), spacing)
    else:
        target = _target_spacing(spacings)
        sides = np.median(boxes * spacings / target, axis=0)
        patch = Patch(deep_sides(sides.tolist()), tuple(target.tolist()))
    return make_spec(classes, len(modalities), patch, ct)


def _target_spacing(spacings: np.ndarray) -> np.ndarray:
    """Return the median; where slices lie far apart, their distance becomes that of the closest tenth of the cases."""
    target = np.median(spacings, axis=0)
    if is_anisotropic(target):
        axis = int(np.argmax(target))
        target[axis] = np.percentile(spacings[:, axis], 10)
    return np.round(target, 4)


def halvings(side: int) -> int:
    """Return how often the network halves a side."""
    count = 0
    while count < _MOST_HALVINGS and side / 2**count >= _SMALLEST_HALVED:
        count += 1
    return count


def _fits(side: int) -> bool:
    return side % 2 ** halvings(side) == 0


def flat_side(wanted: float) -> int:
    """Return the shortest side from the wanted one on that can be halved as often as the network does, at most 512."""
    side = max(1, math.ceil(wanted))
    while not _fits(side):
        side += 1
    return min(side, _LONGEST_SIDE_2D)


def deep_sides(medians: Sequence[float]) -> tuple[int, ...]:
    """Return sides as `flat_side` does, the longest then shortened until there are at most 128^3 voxels."""
    sides = [flat_side(median) for median in medians]
    while math.prod(sides) > _MOST_VOXELS_3D:
        longest = sides.index(max(sides))
        sides[longest] -= 1
        while not _fits(sides[longest]):
            sides[longest] -= 1
    return tuple(sides)


def _ct(found: Sequence[Measured], where: str) -> Ct:
    """Measure the labelled voxels of all cases; percentiles are of values rounded to whole Hounsfield units."""
    count = sum(each.sums[0] for each in found)
    if not count:
        raise BadData(f"{where}: no voxel of the training set is labelled, so CT cannot be scaled; label some")
    mean = sum(each.sums[1] for each in found) / count
    variance = sum(each.sums[2] for each in found) / count - mean**2
    values, inverse = np.unique(np.concatenate([each.values for each in found]), return_inverse=True)
    ends = np.cumsum(np.bincount(inverse, np.concatenate([each.counts for each in found])))
    low, high = (float(_percentile(values, ends, share)) for share in _PERCENTILES)
    if not low < high:
        raise BadData(f"{where}: all labelled voxels have the value {low:g}, so CT cannot be scaled; check the files")
    return Ct(round(low, 4), round(high, 4), round(mean, 4), round(math.sqrt(max(variance, 0)), 4))


def _percentile(values: np.ndarray, ends: np.ndarray, share: float) -> float:
    """Return a percentile of sorted values, of which `ends` says how many there are up to each; linear in between, as
    NumPy does."""
    place = (ends[-1] - 1) * share / 100
    below, above = values[np.searchsorted(ends, [math.floor(place), math.ceil(place)], side="right")]
    return below + (above - below) * (place - math.floor(place))
