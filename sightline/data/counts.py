"""Numbers of a split, for the report of a run and for a recipe's plan: images of every class, boxes, pixels, sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from sightline.data.decode import decoded_shape
from sightline.data.sources import IGNORED, BoxSource, MaskSource, Source, spread
from sightline.errors import BadSample
from sightline.parts import SplitFacts

MOST_SIZES = 200  # images whose headers are read for their sizes
MOST_COUNTED = 2000  # images whose boxes are counted


def never() -> bool:
    """Say that there is time."""
    return False


def of_labels(source: Source, is_late: Callable[[], bool] = never, most: int = MOST_SIZES) -> SplitFacts:
    """Count the images of every class; read the sizes of some."""
    sizes = []
    for index in spread(len(source), most):
        if is_late():
            break
        with contextlib.suppress(BadSample):
            height, width = decoded_shape(source.read(index).data, source.name(index))[:2]
            sizes.append((height, width))
    return SplitFacts(len(source), "images", "images", tuple(source.per_class().tolist()), len(source), tuple(sizes))


def of_boxes(source: BoxSource, is_late: Callable[[], bool] = never) -> SplitFacts:
    """Count the boxes of every class in some images, whose sizes are annotated."""
    counts = np.zeros(len(source.classes) + 1, np.int64)
    sizes, boxes = [], []
    for index in spread(len(source), MOST_COUNTED):
        if is_late():
            break
        found = source.objects(index)
        counts += np.bincount(found.labels, minlength=len(counts))
        sizes.append((found.height, found.width))
        boxes.append(len(found.labels))
    per_class = tuple(counts[1:].tolist())
    return SplitFacts(len(source), "images", "boxes", per_class, len(boxes), tuple(sizes), tuple(boxes))


def of_masks(source: MaskSource, is_late: Callable[[], bool] = never, most: int = MOST_SIZES) -> SplitFacts:
    """Count the pixels of every class in some images, and read their sizes."""
    counts, sizes, counted = np.zeros(IGNORED + 1, np.int64), [], 0
    for index in spread(len(source), most):
        if is_late() and counted:
            break
        with contextlib.suppress(BadSample):
            mask = source.mask(index)
            counts += np.bincount(mask.reshape(-1), minlength=len(counts))
            sizes.append((mask.shape[0], mask.shape[1]))
            counted += 1
    per_class = tuple(counts[: len(source.classes)].tolist())
    return SplitFacts(len(source), "images", "pixels", per_class, counted, tuple(sizes))
