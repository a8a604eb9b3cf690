"""Whole prepared volumes with their labels, for data/segmentation/dataset.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sightline.data.loading.cache import ImageCache
from sightline.data.sources import VolumeSource
from sightline.errors import BadSample


class VolumeReader:
    """Whole volumes with their labels, from the source or out of memory. Of a mapped file only what is used is read."""

    def __init__(self, source: VolumeSource, cache: ImageCache | None, checks: bool):
        self.source = source
        self.cache = cache
        self.checks = checks  # whole volumes, so that none is scored that is wrong, or without one of its slices
        self._last: tuple[int, np.ndarray, np.ndarray] | None = None  # slices of one volume follow each other

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}  # pickling a mapped file would copy all its voxels

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (channels, depth, height, width) and the label (depth, height, width) of a volume."""
        if self._last is None or self._last[0] != index:
            image, label = self._open(index)
            if self.checks:
                check_whole(self.source, index, image, label)
            self._last = index, image, label
        return self._last[1:]

    def _open(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self.cache is None:
            return self.source.image(index), self.source.label(index)
        if (kept := self.cache.view(index)) is None:
            found = self.source.image(index), self.source.label(index)
            self.cache.put(index, *found)
            return found
        shape = self.source.shape(index)
        voxels = math.prod(shape)
        image = kept[:-voxels].view(np.float32).reshape(self.source.spec.channels, *shape)
        return image, kept[-voxels:].reshape(shape)


def check_whole(source: VolumeSource, volume: int, image: np.ndarray, label: np.ndarray) -> None:
    """Raise BadSample if a label is unknown or a voxel is no number."""
    check_label(source, volume, label)
    # NaN and infinity stay in a sum, which is faster than a look at each; a sum of large numbers may be infinite too.
    if not math.isfinite(float(image.sum())) and not np.isfinite(image).all():
        raise BadSample(source.name(volume), "voxels are NaN or infinite; prepare it again")


def check_label(source: VolumeSource, volume: int, label: np.ndarray) -> None:
    """Raise BadSample if a label, or a part of it, holds a class that is unknown."""
    most, classes = int(label.max()), len(source.spec.classes)
    if most >= classes:
        raise BadSample(
            source.name(volume), f"its label holds class {most}, expected 0 to {classes - 1}; prepare it again"
        )
