"""Compare what an exported file computes with what the network does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sightline.boxes import iou

SAME_IOU = 0.99  # from which on two boxes of one class are the same


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return max |theirs - ours| / max |ours| of the output in which it is largest; infinite if one is not finite or
    shapes differ."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or not bool(a.isfinite().all() and b.isfinite().all()):
            return math.inf
        if a.numel():
            largest = float((b.double() - a.double()).abs().max())
            worst = max(worst, largest / max(float(a.double().abs().max()), 1e-30) if largest else 0.0)
    return worst


class Matched(NamedTuple):
    """Detections of both sides that belong together, of how many, and the largest difference of scores and corners."""

    pairs: int
    total: int
    difference: float

    def __add__(self, other: Matched) -> Matched:  # type: ignore[override]  # of tuples it would join them
        return Matched(self.pairs + other.pairs, self.total + other.total, max(self.difference, other.difference))


def match_boxes(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Matched:
    """Match the boxes (batch, n, 4), scores (batch, n) and labels (batch, n), 0 for none, of two detectors: by class
    and overlap, best scores first. A side with more detections sets the total."""
    found = Matched(0, 0, 0.0)
    for image in range(len(ours[0])):
        found += _match_image(*(_detections(side, image) for side in (ours, theirs)))
    return found


Detections = tuple[Tensor, Tensor, Tensor]


def _detections(side: Sequence[Tensor], image: int) -> Detections:
    boxes, scores, labels = (each[image] for each in side[:3])
    return boxes[labels > 0], scores[labels > 0], labels[labels > 0]


def _match_image(ours: Detections, theirs: Detections) -> Matched:
    total = max(len(ours[0]), len(theirs[0]))
    is_same = (ours[2][:, None] == theirs[2]) & (iou(ours[0], theirs[0]) >= SAME_IOU)
    free = torch.ones(len(theirs[0]), dtype=torch.bool)
    pairs, difference = 0, 0.0
    for place in range(len(ours[0])):
        others = (is_same[place] & free).nonzero().flatten()
        if len(others):
            other = int(others[0])
            free[other] = False
            pairs += 1
            scale = max(1.0, float(ours[0][place].abs().max()))  # of a box larger than its image
            corners = float((ours[0][place] - theirs[0][other]).abs().max()) / scale
            difference = max(difference, corners, float((ours[1][place] - theirs[1][other]).abs()))
    return Matched(pairs, total, difference)
