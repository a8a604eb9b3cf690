"""Check the kernel of kernels/resize_triton.py against plain torch before squares.py uses it."""

from __future__ import annotations

import numpy as np
import torch

from sightline.data.augment import batched
from sightline.kernels import self_check

# Sides of images, and their rows of numbers for squares of SIZE (batched.FIELDS): a crop made smaller, one made larger
# and flipped, one with a border. Squares of 44 pixels fill neither the last lines nor the last values of a program.
SIDES = ((61, 90), (37, 20), (40, 40))
ROWS = (
    (3, 5, 55, 81, 44, 44, 0, 0, 0),
    (1, 2, 33, 17, 44, 44, 0, 0, 1),
    (0, 0, 40, 40, 36, 36, -4, -4, 0),
)
SIZE = 44
# Grey levels, of the worst value and on average: both round, plain torch once more, between columns and rows.
MOST, ON_AVERAGE = 2, 0.5


def is_right(device: torch.device, interpolation: str) -> bool:
    """Return whether the kernel computes what plain torch does; warn once if it does not."""
    return self_check.passes(f"resizing ({interpolation})", device, lambda: why_wrong(device, interpolation))


def why_wrong(device: torch.device, interpolation: str) -> str:
    """Return what the kernel computes wrongly on a ragged batch; "" if nothing.

    The expected values are computed on the CPU, in fp32: the same on every machine.
    """
    from sightline.kernels import resize_triton

    generator = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (3, *sides), dtype=torch.uint8, generator=generator) for sides in SIDES]
    if interpolation == batched.GRID:
        rows = _grids()
        expected = batched.between_planes(images, rows)
    else:
        rows = torch.tensor(ROWS, dtype=torch.int32)
        expected = batched.cut_and_resize(images, rows, SIZE, interpolation)
    places, parts, offset = [], [], 0
    for number, image in enumerate(images):
        height, width = SIDES[number]
        is_planes = number == 1  # as torchvision's decoder leaves an image
        strides = (width, 1, height * width) if is_planes else (3 * width, 3, 1)
        places.append((offset, *strides, len(images) - 1 - number))
        parts.append((image if is_planes else image.permute(1, 2, 0)).flatten())
        offset += image.numel()
    out = (255 - expected.flip(0)).to(device)  # wrong until it is written
    resize_triton.resize(
        torch.cat(parts).to(device), torch.tensor(places).to(device), rows.to(device), out, interpolation
    )
    levels = (out.cpu().flip(0).int() - expected.int()).abs()
    if levels.max() > MOST or levels.float().mean() > ON_AVERAGE:
        return (
            f"values differ by up to {levels.max()} levels, {levels.float().mean():.2f} on average, "
            f"expected at most {MOST} and {ON_AVERAGE}"
        )
    return ""


def _grids() -> torch.Tensor:
    """Return rows of `batched.grid_row` for SIDES: a part of the image from right to left, beyond the last pixel, and
    the whole."""
    shares = ((0.2, 0.9), (0.5, 1.2), (0.0, 1.0))
    made = [np.linspace(low, high, SIZE) for low, high in shares]
    lines = [
        (share * (height - 1), share[::-1] * (width - 1)) for share, (height, width) in zip(made, SIDES, strict=True)
    ]
    return torch.from_numpy(
        np.stack([batched.grid_row(*sides, *line) for sides, line in zip(SIDES, lines, strict=True)])
    )
