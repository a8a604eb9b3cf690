"""The geometry of many images at once, on the device: `Augmentation.apply` for a batch, from the same Params.

Decoded images differ in size, so each is cut to its box, padded to the largest of its group, and resized, flipped and
windowed by two matrix products that hold the filter's weights. Used if the GPU decodes (data/gpu/squares.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sightline.data.augment.classification import Params

# The row of numbers of an image, as a loader worker sends it.
FIELDS = ("top", "left", "height", "width", "resized_height", "resized_width", "window_top", "window_left", "flip")
GRID = "grid"  # an interpolation whose row of numbers is `grid_row`'s
GATHERED = 16  # images at once: every value of the result has four places of 8 bytes
GROUP_BYTES = 2**30  # limit on the padded boxes of a group, and on the filter's weights for them


def as_row(params: Params) -> np.ndarray:
    """Return the numbers of one image that `cut_and_resize` needs."""
    return np.asarray([int(getattr(params, field)) for field in FIELDS], dtype=np.int32)


def grid_row(height: int, width: int, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the numbers of one image that `between_planes` needs: its sides, and where each row and column of the
    result lies between its pixels."""
    return np.concatenate([np.asarray((height, width)), rows, columns]).astype(np.float32)


def cut_and_resize(images: Sequence[Tensor], rows: Tensor, size: int, interpolation: str) -> Tensor:
    """Return (batch, size, size, 3) uint8 from uint8 images (3, height, width) on a device and their rows on the host.

    Equal to `Augmentation.apply` within two grey levels (bilinear, bicubic) or one (legacy), which the tests check:
    both round once between the two passes and once at the end, the CPU's kernel in whole numbers.
    """
    device = images[0].device
    # Whole numbers up to 255 are exact in half precision, weights are good to a tenth of a level.
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    out = torch.empty(len(images), size, size, 3, dtype=torch.uint8, device=device)
    for group in _groups(rows, size):
        chosen = rows[group]
        tallest, widest = int(chosen[:, 2].max()), int(chosen[:, 3].max())
        boxes = torch.zeros(len(group), 3, tallest, widest, dtype=dtype, device=device)
        for box, number, row in zip(boxes, group.tolist(), chosen.tolist(), strict=True):
            top, left, height, width = row[:4]
            box[:, :height, :width].copy_(images[number][:, top : top + height, left : left + width])
        on_device = chosen.to(device, torch.float32, non_blocking=True)
        _, _, heights, widths, resized_heights, resized_widths, tops, lefts, flips = on_device.unbind(1)
        across = _weights(widths, resized_widths, lefts, flips, size, widest, interpolation).to(dtype)
        down = _weights(heights, resized_heights, tops, torch.zeros_like(flips), size, tallest, interpolation).to(dtype)
        # Columns first, as the CPU's kernel, which rounds in between.
        lines = (boxes.flatten(1, 2) @ across.transpose(1, 2)).round_().clamp_(0, 255)  # (group, 3 * tallest, size)
        lines = lines.view(len(group), 3, tallest, size).permute(0, 2, 3, 1).flatten(2)  # (group, tallest, size * 3)
        squares = (down @ lines).round_().clamp_(0, 255).to(torch.uint8)
        out[group.to(device)] = squares.view(len(group), size, size, 3)
    return out


def between_planes(images: Sequence[Tensor], grids: Tensor) -> Tensor:
    """Interpolate images (3, height, width) on a device as `between_pixels` does."""
    flat = torch.cat([image.permute(1, 2, 0).flatten() for image in images])
    sizes = torch.tensor([0, *(image.numel() for image in images[:-1])])
    return between_pixels(flat, sizes.cumsum(0), grids)


def between_pixels(flat: Tensor, starts: Tensor, grids: Tensor) -> Tensor:
    """Interpolate images as TensorFlow did, (batch, size, size, 3) uint8: tensorflow.py's, for many at once.

    Images (height, width, 3) lie one after another in `flat`, on its device; on the host are where each begins, and its
    row of `grid_row`.
    """
    parts, size = [], (grids.shape[1] - 2) // 2
    for part in torch.arange(len(starts)).split(GATHERED):
        first, grid = starts[part].to(flat.device)[:, None], grids[part].to(flat.device)
        height, width = grid[:, :2].long().unbind(1)
        above, below, down = _neighbours(grid[:, 2 : 2 + size], height)
        left, right, across = _neighbours(grid[:, 2 + size :], width)
        channels = torch.arange(3, device=flat.device)

        def line(row: Tensor, column: Tensor, first: Tensor = first, width: Tensor = width) -> Tensor:
            begins = first + row * width[:, None] * 3
            places = begins[:, :, None, None] + (column[:, None, :, None] * 3 + channels)  # noqa: B023
            return flat[places].float()

        share = down[:, :, None, None]
        of_left = line(above, left).lerp_(line(below, left), share)
        of_right = line(above, right).lerp_(line(below, right), share)
        parts.append(of_left.lerp_(of_right, across[:, None, :, None]).round_().to(torch.uint8))
    return torch.cat(parts)


def _neighbours(at: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two pixels around each position along an axis, and the share of the second."""
    last = length[:, None] - 1
    first = torch.minimum(at.long(), last)
    return first, torch.minimum(first + 1, last), at - first.float()


def _groups(rows: Tensor, size: int) -> list[Tensor]:
    """Group images of similar size, as many as fit into GROUP_BYTES when padded to the largest."""
    groups: list[Tensor] = []
    order = torch.argsort(rows[:, 2].long() * rows[:, 3])
    start = 0
    while start < len(order):
        tallest, widest = (rows[order[start:], side].cummax(0).values.long() for side in (2, 3))
        # Long thin strips have more weights than pixels.
        largest = torch.maximum(tallest * widest * 3, torch.maximum(tallest, widest) * size)
        bytes_padded = largest * torch.arange(1, len(largest) + 1) * 4
        count = max(1, int((bytes_padded <= GROUP_BYTES).sum()))
        groups.append(order[start : start + count])
        start += count
    return groups


def _weights(
    lengths: Tensor, resized: Tensor, offsets: Tensor, flips: Tensor, size: int, longest: int, interpolation: str
) -> Tensor:
    """Return (batch, size, longest): the weight of each source pixel in each pixel of the window, along one axis."""
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
        stretch = scale.clamp(min=1)  # widen the filter when shrinking
        distance = (source + 0.5 - ((at + 0.5) * scale)[:, :, None]).abs_().div_(stretch[:, :, None])
        weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    weights = weights * inside[:, None, :]
    weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-12)
    return weights * ((at >= 0) & (at < resized[:, None]))[:, :, None]  # black where the image does not reach


def _cubic(x: Tensor) -> Tensor:
    """Compute Keys' cubic with a = -0.5, as Pillow and torch's antialiased kernel."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
