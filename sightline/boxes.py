"""Boxes as numbers: corners, overlap and the offsets a detector learns. Models, tasks and metrics all use these.

A corner box is ymin, xmin, ymax, xmax; a centre box is cy, cx, height, width; both in 0..1 of the picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

CENTRE_SCALE = 10.0  # offsets are learnt in units of a tenth of the anchor's size
SIZE_SCALE = 5.0  # and of a fifth of the logarithm of their ratio
SMALLEST = 1e-8  # added to sizes, as the original does, so that an empty box (padding) has finite offsets


def to_corners(boxes: Tensor) -> Tensor:
    """Corner form of centre boxes; not clipped to the picture."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_centres(corners: Tensor) -> Tensor:
    """Centre form of corner boxes."""
    low, high = corners[..., :2], corners[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Overlap of every corner box in a (..., n, 4) with every one in b (..., m, 4): (..., n, m); 0 where they do not
    meet, also for boxes without an area."""
    # By coordinate, because pairs of coordinates would be temporaries of twice the size.
    ymin_a, xmin_a, ymax_a, xmax_a = (side.unsqueeze(-1) for side in a.unbind(-1))
    ymin_b, xmin_b, ymax_b, xmax_b = (side.unsqueeze(-2) for side in b.unbind(-1))
    height = (torch.minimum(ymax_a, ymax_b) - torch.maximum(ymin_a, ymin_b)).clamp(min=0)
    width = (torch.minimum(xmax_a, xmax_b) - torch.maximum(xmin_a, xmin_b)).clamp(min=0)
    shared = height * width
    union = (ymax_a - ymin_a) * (xmax_a - xmin_a) + (ymax_b - ymin_b) * (xmax_b - xmin_b) - shared
    return torch.where(shared > 0, shared / union, 0.0)


def encode(corners: Tensor, anchors: Tensor) -> Tensor:
    """Offsets ty, tx, th, tw from anchors, which are centre boxes, to corner boxes."""
    boxes = to_centres(corners)
    sizes = anchors[..., 2:] + SMALLEST
    move = (boxes[..., :2] - anchors[..., :2]) / sizes * CENTRE_SCALE
    stretch = ((boxes[..., 2:] + SMALLEST) / sizes).log() * SIZE_SCALE
    return torch.cat([move, stretch], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Corner boxes at `offsets` from anchors: the inverse of `encode`, without clipping."""
    centre = offsets[..., :2] / CENTRE_SCALE * anchors[..., 2:] + anchors[..., :2]
    size = (offsets[..., 2:] / SIZE_SCALE).exp() * anchors[..., 2:]
    return to_corners(torch.cat([centre, size], dim=-1))
