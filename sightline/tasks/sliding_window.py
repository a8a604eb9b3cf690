"""Inference on an image or volume of any size with a network of one patch size: overlapping windows, blended by weight.

Equal to MONAI 1.6's sliding_window_inference. MONAI 0.4, which the original used, centred the Gaussian at roi // 2,
truncated it at four sigma and scaled it to 1; since then it is symmetric and at least 0.001 everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

SIGMA = 0.125  # deviation of the Gaussian, as a fraction of the window
LOWEST_WEIGHT = 1e-3
Blend = Literal["gaussian", "constant"]


@torch.no_grad()
def sliding_window(
    predictor: Callable[[Tensor], Tensor],
    volume: Tensor,
    roi: Sequence[int],
    overlap: float,
    blend: Blend,
    batch: int,
) -> Tensor:
    """Return scores (classes, *space) of a volume (channels, *space).

    `predictor` maps (n, channels, *roi) to (n, classes, *roi) and gets at most `batch` windows at a time. If `roi` has
    one axis less than the volume, the network works on slices; batches then mix windows of all slices.
    """
    is_sliced = volume.ndim == len(roi) + 2
    if not is_sliced and volume.ndim != len(roi) + 1:
        raise ValueError(f"windows of {tuple(roi)} do not fit a volume of shape {tuple(volume.shape)}")
    items = volume.movedim(1, 0) if is_sliced else volume[None]  # (items, channels, *space)
    missing = [max(window - size, 0) for window, size in zip(roi, items.shape[2:], strict=True)]
    # F.pad counts from the last axis; the odd voxel goes to the end.
    if any(missing):
        items = F.pad(items, [n for gap in reversed(missing) for n in (gap // 2, gap - gap // 2)])
    grid = windows(items.shape[2:], roi, overlap)
    weight = _weight(tuple(roi), blend, volume.device)
    weights = torch.zeros(items.shape[2:], device=volume.device)
    for window in grid:
        weights[window] += weight
    total: Tensor | None = None
    # All items of one window, then the next window: a batch adds the items that share a window in one operation.
    for start in range(0, len(grid) * len(items), batch):
        parts = _parts(start, min(start + batch, len(grid) * len(items)), len(items))
        answer = predictor(torch.cat([items[first:last, :, *grid[number]] for number, first, last in parts])).float()
        if total is None:
            total = torch.zeros(len(items), answer.shape[1], *items.shape[2:], device=volume.device)
        sizes = [last - first for _, first, last in parts]
        for (number, first, last), scores in zip(parts, answer.split(sizes), strict=True):
            total[first:last, :, *grid[number]].addcmul_(scores, weight)
    assert total is not None
    total /= weights
    kept = tuple(slice(gap // 2, gap // 2 + n) for gap, n in zip(missing, volume.shape[-len(roi) :], strict=True))
    total = total[:, :, *kept]
    return total.movedim(0, 1) if is_sliced else total[0]


def windows(size: Sequence[int], roi: Sequence[int], overlap: float) -> list[tuple[slice, ...]]:
    """Return the windows of an image or volume that is at least as large as `roi`; the last of each axis is shifted
    back inside."""
    axes = []
    for length, window in zip(size, roi, strict=True):
        step = max(int(window * (1 - overlap)), 1)
        count = math.ceil((length - window) / step) + 1
        axes.append([min(number * step, length - window) for number in range(count)])
    starts = itertools.product(*axes)
    return [tuple(slice(first, first + window) for first, window in zip(s, roi, strict=True)) for s in starts]


def _parts(start: int, end: int, items: int) -> list[tuple[int, int, int]]:
    """Return windows `start` to `end` of all items as (window, first item, item after the last)."""
    numbers = range(start // items, (end - 1) // items + 1)
    return [(n, max(start - n * items, 0), min(end - n * items, items)) for n in numbers]


@lru_cache(maxsize=16)
def _weight(roi: tuple[int, ...], blend: Blend, device: torch.device) -> Tensor:
    """Return (*roi): the weight of a window at each of its voxels."""
    with torch.inference_mode(False):  # the cached tensor outlives this call
        weight = torch.ones(roi, device=device)
        for axis, size in enumerate(roi) if blend == "gaussian" else ():
            place = torch.arange(size, dtype=torch.float32, device=device) - (size - 1) / 2
            weight *= (place**2 / (-2 * (SIGMA * size) ** 2)).exp().view(-1, *[1] * (len(roi) - axis - 1))
        return weight.clamp_(min=max(float(weight.min()), LOWEST_WEIGHT))
