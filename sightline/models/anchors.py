"""Default boxes (anchors) of a single-shot detector, with the box arithmetic of sightline/boxes.py.

The detector keeps them in the order of its outputs; the task matches ground truth to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from sightline.boxes import decode, encode, iou, to_corners
from sightline.errors import UsageError

__all__ = ["decode", "default_boxes", "encode", "iou", "to_corners"]


def default_boxes(
    size: int,
    feature_sizes: Sequence[int],
    steps: Sequence[float],
    scales: Sequence[float],
    ratios: Sequence[Sequence[float]],
) -> Tensor:
    """Return centre boxes (anchors, 4) in (level, row, column, anchor) order, clipped to 0..1.

    `size` is the side of the image; `steps` (between cells) and `scales` are in its pixels.
    """
    levels = len(feature_sizes)
    if not (levels == len(steps) == len(ratios) == len(scales) - 1):
        raise UsageError(
            f"anchors: {levels} feature sizes, {len(steps)} steps, {len(ratios)} groups of ratios and {len(scales)} "
            f"scales do not fit; for {levels} levels give {levels}, {levels} and {levels + 1} of them"
        )
    found = []
    for level, (cells, step) in enumerate(zip(feature_sizes, steps, strict=True)):
        shapes = _shapes(scales[level] / size, scales[level + 1] / size, ratios[level])
        centres = (torch.arange(cells, dtype=torch.float64) + 0.5) * step / size
        cy, cx = torch.meshgrid(centres, centres, indexing="ij")
        centre = torch.stack([cy, cx], dim=-1)[:, :, None].expand(-1, -1, len(shapes), -1)
        sides = torch.tensor(shapes, dtype=torch.float64).expand(cells, cells, -1, -1)
        found.append(torch.cat([centre, sides], dim=-1).reshape(-1, 4))
    # Computed in float64, so that every float32 is correctly rounded.
    return torch.cat(found).clamp(0, 1).float()


def _shapes(scale: float, following: float, ratios: Sequence[float]) -> list[tuple[float, float]]:
    """Return (height, width) of the boxes of one cell: two squares, then each ratio as a wide and a tall box."""
    between = sqrt(scale * following)
    shapes = [(scale, scale), (between, between)]
    for ratio in ratios:
        long, short = scale * sqrt(ratio), scale / sqrt(ratio)
        shapes += [(short, long), (long, short)]
    return shapes
