"""Triton kernels of data/gpu/squares.py: cut, resize and flip decoded images of any size into one batch of squares.

The images lie one after another in one buffer, which no padded copy ever leaves. Plain torch: data/augment/batched.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACE = ("offset", "pitch", "pixel", "colour", "target")  # where an image lies: bytes; and its row of the batch
GEOMETRY_NUMBERS = 9  # batched.FIELDS
LINES, VALUES = 16, 128  # of a square that a program makes; a line has three values for each pixel
BICUBIC, LEGACY = 2, 1


def resize(buffer: Tensor, places: Tensor, geometry: Tensor, out: Tensor, interpolation: str) -> None:
    """Write the squares of images in `buffer` (uint8) to their rows of `out` (batch, size, size, 3) uint8.

    `places` is (images, 5) int64, see PLACE, `geometry` (images, 9) int32, see batched.FIELDS, or with interpolation
    "grid" (images, 2 + 2 * size) float32, see batched.grid_row; both on the device. Sums are fp32 and rounded once, so
    a value is within 0.52 of the exact one (tests: sides up to 1000, float64).
    """
    size = out.shape[1]
    grid = (len(places), triton.cdiv(size, LINES), triton.cdiv(3 * size, VALUES))
    if interpolation == "grid":
        with torch.cuda.device_of(buffer):
            sample_images[grid](buffer, places, geometry, out, size, LINES=LINES, VALUES=VALUES)
        return
    kind = {"bicubic": BICUBIC, "legacy": LEGACY}.get(interpolation, 0)
    with torch.cuda.device_of(buffer):
        resize_images[grid](
            buffer, places, geometry, out, size, KIND=kind, LINES=LINES, VALUES=VALUES, enable_fp_fusion=True
        )


@triton.jit
def weight_of(source, point, shrink, length, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the filter's weight of pixel `source` in one whose centre is at `point`; 0 beyond the box."""
    distance = tl.abs(source.to(tl.float32) - point) * shrink
    if KIND == 2:  # Keys' cubic with a = -0.5
        near = (1.5 * distance - 2.5) * distance * distance + 1.0
        far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
        weight = tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))
    else:
        weight = tl.maximum(1.0 - distance, 0.0)
    return tl.where((source >= 0) & (source < length), weight, 0.0)


@triton.jit
def point_of(at, scale, length, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return where pixel `at` of the resized box lies in the box, in its pixels."""
    if KIND == 1:
        point = tl.minimum(at.to(tl.float32) * scale, length - 1.0)  # the last pixel is its own neighbour
    else:
        point = (at.to(tl.float32) + 0.5) * scale - 0.5
    return point


@triton.jit
def resize_images(  # type: ignore[no-untyped-def]
    buffer, places, geometry, out, size, KIND: tl.constexpr, LINES: tl.constexpr, VALUES: tl.constexpr
):
    """Make LINES lines of VALUES values of one square: each line of the box is resized once, then spread over them."""
    number = tl.program_id(0)
    place, row = places + number * 5, geometry + number * 9
    offset, target = tl.load(place), tl.load(place + 4)
    pitch, pixel, colour = tl.load(place + 1).to(tl.int32), tl.load(place + 2).to(tl.int32), tl.load(place + 3)
    top, left, height, width = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    resized_height, resized_width = tl.load(row + 4), tl.load(row + 5)
    window_top, window_left, flip = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    reach = 2.0 if KIND == 2 else 1.0
    scale_x, scale_y = width.to(tl.float32) / resized_width, height.to(tl.float32) / resized_height
    # Widen the filter when shrinking, unless it is legacy.
    stretch_x = tl.maximum(scale_x * (KIND != 1), 1.0)
    stretch_y = tl.maximum(scale_y * (KIND != 1), 1.0)
    shrink_x, shrink_y = 1.0 / stretch_x, 1.0 / stretch_y

    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    column = value // 3
    at_x = tl.where(flip != 0, size - 1 - column, column) + window_left
    point_x = point_of(at_x, scale_x, width, KIND)
    first_x = tl.floor(point_x - reach * stretch_x).to(tl.int32)
    taps = (2.0 * reach * stretch_x).to(tl.int32) + 2
    total_x = tl.zeros((VALUES,), tl.float32)
    for tap in range(taps):
        total_x += weight_of(first_x + tap, point_x, shrink_x, width, KIND)
    # Black where the image does not reach.
    is_seen_x = (at_x >= 0) & (at_x < resized_width) & (value < 3 * size)
    share_x = tl.where(is_seen_x, 1.0 / tl.maximum(total_x, 1e-12), 0.0)

    start = tl.program_id(1) * LINES
    line = start + tl.arange(0, LINES)
    at_y = line + window_top
    point_y = point_of(at_y, scale_y, height, KIND)
    first, last = start + window_top, tl.minimum(start + LINES, size) - 1 + window_top
    begin = tl.floor(point_of(first, scale_y, height, KIND) - reach * stretch_y).to(tl.int32)
    end = tl.floor(point_of(last, scale_y, height, KIND) + reach * stretch_y).to(tl.int32) + 1
    values = buffer + offset + top * pitch + left * pixel + (value % 3) * colour
    total_y = tl.zeros((LINES,), tl.float32)
    sums = tl.zeros((LINES, VALUES), tl.float32)
    for y in range(tl.maximum(begin, 0), tl.minimum(end, height)):
        resized = tl.zeros((VALUES,), tl.float32)
        for tap in range(taps):
            x = first_x + tap
            is_inside = (x >= 0) & (x < width) & is_seen_x
            pixels = tl.load(values + y * pitch + x * pixel, mask=is_inside, other=0).to(tl.float32)
            resized += pixels * weight_of(x, point_x, shrink_x, width, KIND)
        weight_y = weight_of(y + tl.zeros((LINES,), tl.int32), point_y, shrink_y, height, KIND)
        total_y += weight_y
        # Columns first, and bytes in between, as the CPU's kernel has them; here they keep their fraction.
        resized = tl.minimum(tl.maximum(resized * share_x, 0.0), 255.0)
        sums += weight_y[:, None] * resized[None, :]
    is_seen_y = (at_y >= 0) & (at_y < resized_height)
    share_y = tl.where(is_seen_y, 1.0 / tl.maximum(total_y, 1e-12), 0.0)
    squares = tl.minimum(tl.maximum(sums * share_y[:, None], 0.0), 255.0)
    rounded = tl.floor(squares + 0.5).to(tl.uint8)
    places_out = out + target * size * size * 3 + line[:, None] * size * 3 + value[None, :]
    tl.store(places_out, rounded, mask=(line[:, None] < size) & (value[None, :] < 3 * size))


@triton.jit
def between(low, high, share):  # type: ignore[no-untyped-def]
    return low.to(tl.float32) + (high.to(tl.float32) - low.to(tl.float32)) * share


@triton.jit
def sample_images(buffer, places, grids, out, size, LINES: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Make LINES lines of VALUES values of one square, each between the four pixels around its place in the image."""
    number = tl.program_id(0).to(tl.int64)
    place, row = places + number * 5, grids + number * (2 + 2 * size)
    offset, target = tl.load(place), tl.load(place + 4)
    pitch, pixel, colour = tl.load(place + 1).to(tl.int32), tl.load(place + 2).to(tl.int32), tl.load(place + 3)
    last_y, last_x = tl.load(row).to(tl.int32) - 1, tl.load(row + 1).to(tl.int32) - 1
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    at_y = tl.load(row + 2 + line, mask=line < size, other=0.0)
    at_x = tl.load(row + 2 + size + value // 3, mask=value < 3 * size, other=0.0)
    above, left = tl.minimum(at_y.to(tl.int32), last_y), tl.minimum(at_x.to(tl.int32), last_x)
    down, across = (at_y - above.to(tl.float32))[:, None], (at_x - left.to(tl.float32))[None, :]
    upper, lower = (above * pitch)[:, None], (tl.minimum(above + 1, last_y) * pitch)[:, None]
    first, second = (left * pixel)[None, :], (tl.minimum(left + 1, last_x) * pixel)[None, :]
    values = buffer + offset + ((value % 3) * colour)[None, :]
    of_left = between(tl.load(values + upper + first), tl.load(values + lower + first), down)
    of_right = between(tl.load(values + upper + second), tl.load(values + lower + second), down)
    rounded = tl.floor(between(of_left, of_right, across) + 0.5).to(tl.uint8)
    places_out = out + target * size * size * 3 + line[:, None] * size * 3 + value[None, :]
    tl.store(places_out, rounded, mask=(line[:, None] < size) & (value[None, :] < 3 * size))
