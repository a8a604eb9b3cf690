"""The geometry of many pictures at once, on the device: what `Augmentation.apply` does to one, from the same Params.

Decoded pictures differ in size, so each is cut to its box, padded to the largest of its group, and resized, flipped and
windowed by two matrix products with the filter's weights in them. Used where the GPU decodes (data/classification.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sightline.data.augment.classification import Params

# One row of numbers per picture, as it travels from a loader worker.
FIELDS = ("top", "left", "height", "width", "resized_height", "resized_width", "window_top", "window_left", "flip")
GROUP_BYTES = 2**30  # of padded boxes at a time, and of the filter's weights for them


def as_row(params: Params) -> np.ndarray:
    """The numbers of one picture that `cut_and_resize` needs."""
    return np.asarray([int(getattr(params, field)) for field in FIELDS], dtype=np.int32)


def cut_and_resize(pictures: Sequence[Tensor], rows: Tensor, size: int, interpolation: str) -> Tensor:
    """(batch, size, size, 3) uint8 from uint8 pictures (3, height, width) on one device and their rows on the host.

    Equal to `Augmentation.apply` within two grey levels (bilinear, bicubic) or one (legacy), which the tests check:
    both round once between the two passes and once at the end, the CPU's kernel in whole numbers.
    """
    device = pictures[0].device
    # Whole numbers up to 255 are exact in half precision, weights are good to a tenth of a level.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    out = torch.empty(len(pictures), size, size, 3, dtype=torch.uint8, device=device)
    for group in _groups(rows, size):
        chosen = rows[group]
        tallest, widest = int(chosen[:, 2].max()), int(chosen[:, 3].max())
        boxes = torch.zeros(len(group), 3, tallest, widest, dtype=dtype, device=device)
        for box, number, row in zip(boxes, group.tolist(), chosen.tolist(), strict=True):
            top, left, height, width = row[:4]
            box[:, :height, :width].copy_(pictures[number][:, top : top + height, left : left + width])
        on_device = chosen.to(device, torch.float32, non_blocking=True)
        _, _, heights, widths, resized_heights, resized_widths, tops, lefts, flips = on_device.unbind(1)
        across = _weights(widths, resized_widths, lefts, flips, size, widest, interpolation).to(dtype)
        down = _weights(heights, resized_heights, tops, torch.zeros_like(flips), size, tallest, interpolation).to(dtype)
        # Columns first, as the CPU's kernel does, because it rounds in between.
        lines = (boxes.flatten(1, 2) @ across.transpose(1, 2)).round_().clamp_(0, 255)  # (group, 3 * tallest, size)
        lines = lines.view(len(group), 3, tallest, size).permute(0, 2, 3, 1).flatten(2)  # (group, tallest, size * 3)
        squares = (down @ lines).round_().clamp_(0, 255).to(torch.uint8)
        out[group.to(device)] = squares.view(len(group), size, size, 3)
    return out


def _groups(rows: Tensor, size: int) -> list[Tensor]:
    """Pictures of like size together, as many as fit into GROUP_BYTES when padded to their largest."""
    groups: list[Tensor] = []
    order = torch.argsort(rows[:, 2].long() * rows[:, 3])
    start = 0
    while start < len(order):
        tallest, widest = (rows[order[start:], side].cummax(0).values.long() for side in (2, 3))
        # Strips, long and thin, have more weights than pixels.
        largest = torch.maximum(tallest * widest * 3, torch.maximum(tallest, widest) * size)
        bytes_padded = largest * torch.arange(1, len(largest) + 1) * 4
        count = max(1, int((bytes_padded <= GROUP_BYTES).sum()))
        groups.append(order[start : start + count])
        start += count
    return groups


def _weights(
    lengths: Tensor, resized: Tensor, offsets: Tensor, flips: Tensor, size: int, longest: int, interpolation: str
) -> Tensor:
    """(batch, size, longest): how much of each source pixel goes into each pixel of the window along one axis."""
    shown = torch.arange(size, device=lengths.device, dtype=torch.float32).expand(len(lengths), size)
    shown = torch.where(flips[:, None] > 0, size - 1 - shown, shown)
    at = shown + offsets[:, None]  # in the resized box
    scale = (lengths / resized)[:, None]
    source = torch.arange(longest, device=lengths.device, dtype=torch.float32)
    inside = source < lengths[:, None]  # (batch, longest)
    if interpolation == "legacy":
        point = at * scale
        # The last pixel is its own neighbour.
        distance = (source - torch.minimum(point, lengths[:, None] - 1)[:, :, None]).abs()
        weights = (1 - distance).clamp_(min=0)
    else:
        stretch = scale.clamp(min=1)  # a smaller picture is blurred as far as its pixels lie apart
        distance = (source + 0.5 - ((at + 0.5) * scale)[:, :, None]).abs_().div_(stretch[:, :, None])
        weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    weights = weights * inside[:, None, :]
    weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-12)
    return weights * ((at >= 0) & (at < resized[:, None]))[:, :, None]  # black where the picture does not reach


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, as Pillow and torch's antialiased kernel have it."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
