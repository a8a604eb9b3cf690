"""Inference on an image or volume of any size with a network of one patch size: overlapping windows, blended by weight.

Equal to MONAI 1.6's sliding_window_inference. MONAI 0.4, which the original used, centred the Gaussian at roi // 2,
truncated it at four sigma and scaled it to 1; since then it is symmetric and at least 0.001 everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SIGMA = 0.125  # deviation of the Gaussian, as a fraction of the window
LOWEST_WEIGHT = 1e-3
Blend = Literal["gaussian", "constant"]


def sliding_window(
    predictor: Callable[[Tensor], Tensor],
    volume: Tensor,
    roi: Sequence[int],
    overlap: float,
    blend: Blend,
    batch: int,
) -> Tensor:
    """Return scores (classes, *space) of a volume (channels, *space); `sliding_windows` of one."""
    return sliding_windows(predictor, [volume], roi, overlap, blend, batch)[0]


@torch.no_grad()
def sliding_windows(
    predictor: Callable[[Tensor], Tensor],
    volumes: Sequence[Tensor],
    roi: Sequence[int],
    overlap: float,
    blend: Blend,
    batch: int,
) -> list[Tensor]:
    """Return scores (classes, *space) of volumes (channels, *space) of any sizes.

    `predictor` maps (n, channels, *roi) to (n, classes, *roi). It gets `batch` windows at a time, those of one volume
    after those of the one before, so that small volumes fill it together and all calls but the last have one shape. If
    `roi` has one axis less than the volumes, the network works on slices; batches then mix windows of all slices.
    """
    parts = [_Parts(volume, tuple(roi), overlap, blend) for volume in volumes]
    lots: list[list[_Lot]] = [[]]
    room = batch
    for part in parts:
        done = 0
        while done < part.count:
            taken = min(room, part.count - done)
            lots[-1] += part.lots(done, done + taken)
            done, room = done + taken, room - taken
            if not room:
                lots.append([])
                room = batch
    for lot in filter(None, lots):
        answer = predictor(torch.cat([each.images() for each in lot])).float()
        for each, scores in zip(lot, answer.split([len(each) for each in lot]), strict=True):
            each.part.add(each, scores)
    return [part.scores() for part in parts]


class _Lot(NamedTuple):
    """One window of some items that follow each other: of slices, or of the only volume."""

    part: _Parts
    window: tuple[slice, ...]
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def images(self) -> Tensor:
        """Return (items, channels, *roi)."""
        return self.part.items[self.first : self.last, :, *self.window]


class _Parts:
    """A volume in windows, and the sum of their scores."""

    def __init__(self, volume: Tensor, roi: tuple[int, ...], overlap: float, blend: Blend):
        self.is_sliced = volume.ndim == len(roi) + 2
        if not self.is_sliced and volume.ndim != len(roi) + 1:
            raise ValueError(f"windows of {roi} do not fit a volume of shape {tuple(volume.shape)}")
        items = volume.movedim(1, 0) if self.is_sliced else volume[None]  # (items, channels, *space)
        self.size = items.shape[2:]
        self.missing = [max(window - size, 0) for window, size in zip(roi, self.size, strict=True)]
        # F.pad counts from the last axis; the odd voxel goes to the end.
        if any(self.missing):
            items = F.pad(items, [n for gap in reversed(self.missing) for n in (gap // 2, gap - gap // 2)])
        self.items = items
        self.grid = windows(items.shape[2:], roi, overlap)
        self.weight = _weight(roi, blend, volume.device)
        self.count = len(self.grid) * len(items)
        self.total: Tensor | None = None

    def lots(self, start: int, end: int) -> list[_Lot]:
        """Return windows `start` to `end` of all items: all items of one window, then the next window, so that those
        which share one are added in one operation."""
        items = len(self.items)
        numbers = range(start // items, (end - 1) // items + 1)
        return [_Lot(self, self.grid[n], max(start - n * items, 0), min(end - n * items, items)) for n in numbers]

    def add(self, lot: _Lot, scores: Tensor) -> None:
        """Add the scores (items, classes, *roi) of a window."""
        if self.total is None:
            self.total = scores.new_zeros(len(self.items), scores.shape[1], *self.items.shape[2:])
        self.total[lot.first : lot.last, :, *lot.window].addcmul_(scores, self.weight)

    def scores(self) -> Tensor:
        """Return the mean of all windows, without what was padded."""
        assert self.total is not None
        weights = torch.zeros(self.items.shape[2:], device=self.items.device)
        for window in self.grid:
            weights[window] += self.weight
        self.total /= weights
        pairs = zip(self.missing, self.size, strict=True)
        kept = self.total[:, :, *(slice(gap // 2, gap // 2 + n) for gap, n in pairs)]
        return kept.movedim(0, 1) if self.is_sliced else kept[0]


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


@lru_cache(maxsize=16)
def _weight(roi: tuple[int, ...], blend: Blend, device: torch.device) -> Tensor:
    """Return (*roi): the weight of a window at each of its voxels."""
    with torch.inference_mode(False):  # the cached tensor outlives this call
        weight = torch.ones(roi, device=device)
        for axis, size in enumerate(roi) if blend == "gaussian" else ():
            place = torch.arange(size, dtype=torch.float32, device=device) - (size - 1) / 2
            weight *= (place**2 / (-2 * (SIGMA * size) ** 2)).exp().view(-1, *[1] * (len(roi) - axis - 1))
        return weight.clamp_(min=max(float(weight.min()), LOWEST_WEIGHT))
