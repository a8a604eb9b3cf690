"""Triton kernels of kernels/stem_tail.py: batch norm, ReLU and 3x3 max-pool of stride 2 in one pass, and its gradient.

Forward keeps, per output, the x that won and its place in the window. So the sums of the gradient read only the small
tensors (batch_norm_reduce_backward), and the pass over the large one gathers from at most four windows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels import batch_norm_triton
from sightline.kernels.batch_norm_triton import FUSED, load_affine, load_offsets, normalise, relu

# Steps, columns and warps of a program, timed on the H200 on the stem of ResNet-50.
FORWARD = (4, 8, 4)
BACKWARD = (2, 8, 4)
NO_WINNER = tl.constexpr(9)  # no value of the window is positive: no gradient


class Tiling(NamedTuple):
    """Tile of a program: `steps` rows of `columns` outputs of `channels` channels."""

    steps: int
    columns: int
    channels: int
    warps: int

    def options(self) -> dict[str, int | bool]:
        """Return the keyword arguments of a launch."""
        return {
            "STEPS": self.steps,
            "COLUMNS": self.columns,
            "CHANNELS": self.channels,
            "num_warps": self.warps,
            **FUSED,
        }

    def programs(self, images: int, height: int, width: int, channels: int) -> int:
        """Return the number of programs that cover this many rows and columns of outputs."""
        tiles = triton.cdiv(height, self.steps) * triton.cdiv(width, self.columns)
        return images * tiles * triton.cdiv(channels, self.channels)


def make_tiling(channels: int, sizes: tuple[int, int, int]) -> Tiling:
    """Return a tiling of these steps, columns and warps; 64 half-precision channels fill a cache line."""
    steps, columns, warps = sizes
    return Tiling(steps, columns, min(triton.next_power_of_2(channels), 64), warps)


def forward(
    x: Tensor, affine: tuple[Tensor, ...], top: int, left: int, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pooled result, the x of every winner, and its place: row * 3 + column in the window, one byte."""
    images, channels, height, width = x.shape
    tiling = tiling or make_tiling(channels, FORWARD)
    out_height, out_width = triton.cdiv(height, 2), triton.cdiv(width, 2)
    y = torch.empty(
        (images, channels, out_height, out_width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
    )
    winners, places = torch.empty_like(y), torch.empty_like(y, dtype=torch.uint8)
    size = (channels, height, width, out_height, out_width, top, left)
    programs = tiling.programs(images, out_height, out_width, channels)
    with torch.cuda.device_of(x):
        stem_tail_forward[(programs,)](x, *affine, y, winners, places, *size, **tiling.options())
    return y, winners, places


def backward(
    grad_y: Tensor,
    x: Tensor,
    winners: Tensor,
    places: Tensor,
    affine: tuple[Tensor, ...],
    top: int,
    left: int,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, as (2, channels) in fp32, of bias and weight."""
    images, channels, height, width = x.shape
    tiling = tiling or make_tiling(channels, BACKWARD)
    out_height, out_width = grad_y.shape[2:]
    sums = batch_norm_triton.reduce_backward(grad_y, winners, affine)
    grad_x = torch.empty_like(x)
    size = (batch_norm_triton.rows_of(x), channels, height, width, out_height, out_width, top, left)
    # Without padding before, the first row or column belongs to a quad whose other pixels lie outside.
    programs = tiling.programs(images, out_height + 1 - top, out_width + 1 - left, channels)
    with torch.cuda.device_of(x):
        stem_tail_backward[(programs,)](grad_y, places, x, *affine, *sums, grad_x, *size, **tiling.options())
    return grad_x, sums


@triton.jit
def _place(
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return image, first row, columns and channels of a program that works on `height` x `width` outputs."""
    program = tl.program_id(0)
    blocks, across, strips = tl.cdiv(channels, CHANNELS), tl.cdiv(width, COLUMNS), tl.cdiv(height, STEPS)
    channel = (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    column = (program // blocks % across) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    tile = program // blocks // across
    return (tile // strips).to(tl.int64), (tile % strips) * STEPS, column, channel


@triton.jit
def _inside(
    row: tl.tensor,
    column: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the pixels lie in an image, and which of them are inside."""
    row += tl.zeros_like(column)  # Triton's interpreter cannot mask with a scalar
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (channel < channels)
    return (row * width + column) * channels + channel, inside


@triton.jit
def _best_of_row(
    x: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    left: tl.tensor,
    sign: tl.tensor,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the largest sign * x of three neighbours in a row, and which of the three; the first of equals wins."""
    best = tl.full((COLUMNS, CHANNELS), float("-inf"), tl.float32)
    place = tl.zeros((COLUMNS, CHANNELS), tl.int32)
    for tap in tl.static_range(3):
        at, inside = _inside(row, 2 * column - left + tap, channel, channels, height, width)
        found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * sign
        wins = inside & (found > best)
        best, place = tl.where(wins, found, best), tl.where(wins, tap, place)
    return best, place


@triton.jit
def stem_tail_forward(
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    winners: tl.tensor,
    places: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_height: tl.tensor,
    out_width: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Pool downwards; the last row of a window is the first of the next one, so its best is kept.

    The norm keeps or turns the order of a channel's values, so that x is compared and only the winner normalised. One
    NaN makes all of its channel NaN.
    """
    image, first, column, channel = _place(channels, out_height, out_width, STEPS, COLUMNS, CHANNELS)
    mean, _, gain, b = load_affine(statistics, weight, bias, channel, channels)
    sign = tl.where(gain < 0, -1.0, 1.0)
    x += image * height * width * channels
    to = image * out_height * out_width * channels
    best, place = _best_of_row(
        x, 2 * first - top, column, channel, channels, height, width, left, sign, COLUMNS, CHANNELS
    )
    for step in tl.static_range(STEPS):
        out = first + step
        row = 2 * out - top
        middle, middle_place = _best_of_row(
            x, row + 1, column, channel, channels, height, width, left, sign, COLUMNS, CHANNELS
        )
        below, below_place = _best_of_row(
            x, row + 2, column, channel, channels, height, width, left, sign, COLUMNS, CHANNELS
        )
        place = tl.where(middle > best, middle_place + 3, place)
        best = tl.where(middle > best, middle, best)
        place = tl.where(below > best, below_place + 6, place)
        winner = tl.where(below > best, below, best) * sign
        before = normalise(winner, mean, gain, b)
        at, inside = _inside(out, column, channel, channels, out_height, out_width)
        tl.store(y + to + at, relu(before).to(y.dtype.element_ty), mask=inside)
        tl.store(winners + to + at, winner.to(winners.dtype.element_ty), mask=inside)
        tl.store(places + to + at, tl.where(before > 0, place, NO_WINNER).to(tl.uint8), mask=inside)
        best, place = below, below_place


@triton.jit
def _window(grad_y: tl.tensor, places: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradient of a window's output and the place it goes to."""
    place = tl.load(places + at, mask=inside, other=NO_WINNER).to(tl.int32)
    return tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32), place


@triton.jit
def _to(place: tl.tensor, grad: tl.tensor, TAP: tl.constexpr) -> tl.tensor:
    """Return the gradient if it goes to this place of the window."""
    return tl.where(place == TAP, grad, 0.0)


@triton.jit
def _finish(
    x: tl.tensor,
    grad_x: tl.tensor,
    grad: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    mean: tl.tensor,
    gain: tl.tensor,
    offset: tl.tensor,
    factor: tl.tensor,
) -> None:
    """Write the gradient of one pixel, through the batch norm."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    result = grad * gain - offset - (value - mean) * factor
    tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def stem_tail_backward(
    grad_y: tl.tensor,
    places: tl.tensor,
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    dot: tl.tensor,
    grad_x: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_height: tl.tensor,
    out_width: tl.tensor,
    top: tl.tensor,
    left: tl.tensor,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Write quads of pixels: the middle of window (a, c), the two on its lower and right edges, and the corner."""
    image, first, column, channel = _place(
        channels, out_height + 1 - top, out_width + 1 - left, STEPS, COLUMNS, CHANNELS
    )
    mean, rstd, gain, _ = load_affine(statistics, weight, bias, channel, channels)
    offset, factor = load_offsets(total, dot, rstd, gain, rows, channel, channels)
    x += image * height * width * channels
    grad_x += image * height * width * channels
    grad_y += image * out_height * out_width * channels
    places += image * out_height * out_width * channels
    c = column - 1 + left
    to = 2 * c + 1 - left
    at, inside = _inside(first - 1 + top, c, channel, channels, out_height, out_width)
    here, here_place = _window(grad_y, places, at, inside)
    at, inside = _inside(first - 1 + top, c + 1, channel, channels, out_height, out_width)
    right, right_place = _window(grad_y, places, at, inside)
    for step in tl.static_range(STEPS):
        a = first + step - 1 + top
        row = 2 * a + 1 - top
        at, inside = _inside(a + 1, c, channel, channels, out_height, out_width)
        below, below_place = _window(grad_y, places, at, inside)
        at, inside = _inside(a + 1, c + 1, channel, channels, out_height, out_width)
        corner, corner_place = _window(grad_y, places, at, inside)
        grad = _to(here_place, here, 4)
        at, inside = _inside(row, to, channel, channels, height, width)
        _finish(x, grad_x, grad, at, inside, mean, gain, offset, factor)
        grad = _to(here_place, here, 5) + _to(right_place, right, 3)
        at, inside = _inside(row, to + 1, channel, channels, height, width)
        _finish(x, grad_x, grad, at, inside, mean, gain, offset, factor)
        grad = _to(here_place, here, 7) + _to(below_place, below, 1)
        at, inside = _inside(row + 1, to, channel, channels, height, width)
        _finish(x, grad_x, grad, at, inside, mean, gain, offset, factor)
        grad = _to(here_place, here, 8) + _to(right_place, right, 6)
        grad += _to(below_place, below, 2) + _to(corner_place, corner, 0)
        at, inside = _inside(row + 1, to + 1, channel, channels, height, width)
        _finish(x, grad_x, grad, at, inside, mean, gain, offset, factor)
        here, here_place, right, right_place = below, below_place, corner, corner_place
