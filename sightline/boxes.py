"""Box arithmetic for models, tasks and metrics: corners, centres, overlap and the offsets that a detector learns.

A corner box is ymin, xmin, ymax, xmax; a centre box is cy, cx, height, width; both relative to the image, in 0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor

CENTRE_SCALE = 10.0  # centre offsets are in tenths of the anchor's size
SIZE_SCALE = 5.0  # size offsets are five times the logarithm of the ratio
SMALLEST = 1e-8  # added to sizes as in the original, so that an empty box (padding) has finite offsets


def to_corners(boxes: Tensor) -> Tensor:
    """Convert centre boxes to corner boxes, without clipping to the image."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_centres(corners: Tensor) -> Tensor:
    """Convert corner boxes to centre boxes."""
    low, high = corners[..., :2], corners[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU (..., n, m) of all corner boxes in a (..., n, 4) with all in b (..., m, 4).

    It is 0 for boxes that do not overlap, including boxes without an area.
    """
    # One coordinate at a time: pairs of coordinates would double the temporaries.
    ymin_a, xmin_a, ymax_a, xmax_a = (side.unsqueeze(-1) for side in a.unbind(-1))
    ymin_b, xmin_b, ymax_b, xmax_b = (side.unsqueeze(-2) for side in b.unbind(-1))
    height = (torch.minimum(ymax_a, ymax_b) - torch.maximum(ymin_a, ymin_b)).clamp(min=0)
    width = (torch.minimum(xmax_a, xmax_b) - torch.maximum(xmin_a, xmin_b)).clamp(min=0)
    shared = height * width
    union = (ymax_a - ymin_a) * (xmax_a - xmin_a) + (ymax_b - ymin_b) * (xmax_b - xmin_b) - shared
    return torch.where(shared > 0, shared / union, 0.0)


def encode(corners: Tensor, anchors: Tensor) -> Tensor:
    """Return the offsets ty, tx, th, tw from anchors (centre boxes) to corner boxes."""
    boxes = to_centres(corners)
    sizes = anchors[..., 2:] + SMALLEST
    move = (boxes[..., :2] - anchors[..., :2]) / sizes * CENTRE_SCALE
    stretch = ((boxes[..., 2:] + SMALLEST) / sizes).log() * SIZE_SCALE
    return torch.cat([move, stretch], dim=-1)


def decode(offsets: Tensor, anchors: Tensor) -> Tensor:
    """Return the corner boxes at `offsets` from anchors: the inverse of `encode`, without clipping."""
    centre = offsets[..., :2] / CENTRE_SCALE * anchors[..., 2:] + anchors[..., :2]
    size = (offsets[..., 2:] / SIZE_SCALE).exp() * anchors[..., 2:]
    return to_corners(torch.cat([centre, size], dim=-1))
