"""Triton kernels of kernels/instance_norm.py for channels_last images.

An image is a table of rows (pixels) by channels. Small images fit into registers: one launch forward, one backward.
Larger ones are split into chunks of rows: one pass reduces each chunk, a small one joins the results, one applies them.
Sizes depend on the shape alone and there are no atomic sums, so equal inputs give equal bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements that a program reads at once: 16 per thread of 128, two 16-byte loads in half precision
WHOLE = 16384  # elements of an image's channel block that fit one program's registers, with their gradients
PROGRAMS = 2048  # target per launch: some waves over 132 processors; constant, so that bits do not depend on the GPU
LEAST_TILES = 2  # per chunk, so that it writes much less than it reads
JOINED = 16  # chunks that a program joins at once


class Tiling(NamedTuple):
    """Split of a shape: `chunks` chunks of `tiles` tiles of `rows` x `channels` elements; 0 chunks: a single tile."""

    channels: int
    rows: int
    tiles: int
    chunks: int
    warps: int

    @property
    def launch_options(self) -> dict[str, int | bool]:
        """Return the keyword arguments of a launch. Multiply-adds are always fused, whatever Triton's default."""
        sizes = {"ROWS": self.rows, "CHANNELS": self.channels}
        if self.chunks:
            sizes["TILES"] = self.tiles
        return {**sizes, "num_warps": self.warps, "enable_fp_fusion": True}

    @property
    def joining(self) -> "Tiling":
        """Return the tiling of the join, in which one program reads the chunks of an image as rows."""
        return self._replace(rows=JOINED, tiles=triton.cdiv(self.chunks, JOINED), warps=2)


def choose_tiling(images: int, rows: int, channels: int) -> Tiling:
    """Return the tiling for (images, rows, channels)."""
    # 64 half-precision channels fill a cache line; 32 leave fewer lanes idle if 64 does not divide the channels.
    block = min(triton.next_power_of_2(channels), 64 if channels % 64 == 0 else 32)
    padded = triton.next_power_of_2(rows)
    if padded * min(block, 32) <= WHOLE:
        block = min(block, max(32, 8192 // padded))
        return Tiling(block, padded, 1, 0, min(max(padded * block // 1024, 1), 16))
    tile_rows = TILE // block
    tiles = triton.cdiv(rows, tile_rows)
    wanted = triton.cdiv(PROGRAMS, images * triton.cdiv(channels, block))
    tiles_of_chunk = triton.cdiv(tiles, max(min(wanted, tiles // LEAST_TILES), 1))
    return Tiling(block, tile_rows, tiles_of_chunk, triton.cdiv(tiles, tiles_of_chunk), 4)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float, tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result in x's layout and fp32 statistics (2, images, channels): mean and 1 / deviation."""
    images, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    tiling = tiling or choose_tiling(images, rows, channels)
    y = torch.empty_like(x)
    statistics = torch.empty((2, images, channels), dtype=torch.float32, device=x.device)
    programs, options = images * triton.cdiv(channels, tiling.channels), tiling.launch_options
    with torch.cuda.device_of(x):
        if not tiling.chunks:
            instance_norm_whole[(programs,)](x, weight, bias, y, *statistics, rows, channels, eps, slope, **options)
            return y, statistics
        parts = torch.empty((2, images, tiling.chunks, channels), dtype=torch.float32, device=x.device)
        size = (rows, channels, tiling.chunks)
        instance_norm_reduce[(programs * tiling.chunks,)](x, *parts, *size, **options)
        instance_norm_join[(programs,)](
            *parts, *statistics, *size, eps, LENGTH=tiling.rows * tiling.tiles, **tiling.joining.launch_options
        )
        instance_norm_apply[(programs * tiling.chunks,)](x, weight, bias, y, *statistics, *size, slope, **options)
    return y, statistics


def backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    statistics: Tensor,
    slope: float,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in x's layout, and of (bias, weight) per image, (2, images, channels) in fp32."""
    images, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    tiling = tiling or choose_tiling(images, rows, channels)
    grad_x = torch.empty_like(x)
    programs, options = images * triton.cdiv(channels, tiling.channels), tiling.launch_options
    given = (x, grad_y, weight, bias, *statistics)
    with torch.cuda.device_of(x):
        if not tiling.chunks:
            sums = torch.empty_like(statistics)
            instance_norm_whole_backward[(programs,)](*given, grad_x, *sums, rows, channels, slope, **options)
            return grad_x, sums
        parts = torch.empty((2, images, tiling.chunks, channels), dtype=torch.float32, device=x.device)
        size = (rows, channels, tiling.chunks)
        instance_norm_reduce_backward[(programs * tiling.chunks,)](*given, *parts, *size, slope, **options)
        sums = parts.sum(2)  # (2, images, channels)
        instance_norm_apply_backward[(programs * tiling.chunks,)](*given, *sums, grad_x, *size, slope, **options)
    return grad_x, sums


@triton.jit
def _place(
    program: tl.tensor, channels: tl.tensor, chunks: tl.tensor, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return image, chunk and channels of a program; programs of neighbouring channels have neighbouring numbers."""
    blocks = tl.cdiv(channels, CHANNELS)
    channel = (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = (program // blocks) % chunks
    image = (program // blocks // chunks).to(tl.int64)  # a batch may exceed 2^31 elements, an image may not
    return image, chunk, channel


@triton.jit
def _normalise(x: tl.tensor, mean: tl.tensor, gain: tl.tensor, bias: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return x - mean and the input of the leaky ReLU; shared, because backward must see the same signs as forward."""
    centred = x - mean
    return centred, centred * gain + bias


@triton.jit
def instance_norm_whole(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    eps: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    image, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    row, known = tl.arange(0, ROWS)[:, None], channel < channels
    at, inside = row * channels + channel, (row < rows) & known
    x += image * rows * channels
    y += image * rows * channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(value, 0) / rows
    centred = tl.where(inside, value - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / rows + eps)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    _, before = _normalise(value, centre, scale * w, b)
    after = tl.where(before > 0, before, before * slope)
    tl.store(y + at, after.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + image * channels + channel, centre, mask=known)
    tl.store(rstd + image * channels + channel, scale, mask=known)


@triton.jit
def instance_norm_reduce(
    x: tl.tensor,
    means: tl.tensor,
    spreads: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Compute each chunk's mean and sum of squared deviations by Welford's method: one pass, no cancellation."""
    # Last image first: the data that the previous launch wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    image, chunk, channel = _place(program, channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    length = tl.minimum(rows - first, TILES * ROWS)
    x += image * rows * channels
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    count = 0.0
    for tile in range(TILES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < length) & known
        value = tl.load(x + (first + row) * channels + channel, mask=inside, other=0.0).to(tl.float32)
        count += 1.0
        centred = tl.where(inside, value - mean, 0.0)
        mean += centred * (1.0 / count)
        spread += centred * (value - mean)
    # Each position of the tile saw one row per round, except some in the last round.
    seen = ((length - tl.arange(0, ROWS) + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    centre = tl.sum(mean * seen, 0) / length
    centred = mean - centre
    total = tl.sum(spread + seen * centred * centred, 0)
    at = (image * chunks + chunk) * channels + channel
    tl.store(means + at, centre, mask=known)
    tl.store(spreads + at, total, mask=known)


@triton.jit
def instance_norm_join(
    means: tl.tensor,
    spreads: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    LENGTH: tl.constexpr,
) -> None:
    """Join chunks by Chan's method: the common mean, computed relative to the first chunk's, then the deviations."""
    image, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    known = channel < channels
    at = image * chunks * channels + channel
    origin = tl.load(means + at, mask=known, other=0.0)
    shift = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(TILES):
        chunk = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (chunk < chunks) & known
        length = tl.minimum(rows - chunk * LENGTH, LENGTH).to(tl.float32)
        found = tl.load(means + at + chunk * channels, mask=inside, other=0.0)
        shift += tl.where(inside, (found - origin) * length, 0.0)
    centre = origin + tl.sum(shift, 0) / rows
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(TILES):
        chunk = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (chunk < chunks) & known
        length = tl.minimum(rows - chunk * LENGTH, LENGTH).to(tl.float32)
        centred = tl.load(means + at + chunk * channels, mask=inside, other=0.0) - centre
        within = tl.load(spreads + at + chunk * channels, mask=inside, other=0.0)
        spread += tl.where(inside, within + length * centred * centred, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(spread, 0) / rows + eps)
    tl.store(mean + image * channels + channel, centre, mask=known)
    tl.store(rstd + image * channels + channel, scale, mask=known)


@triton.jit
def instance_norm_apply(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    centre = tl.load(mean + image * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + image * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    y += image * rows * channels
    for tile in range(TILES):
        row = (chunk * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < rows) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        _, before = _normalise(value, centre, gain, b)
        after = tl.where(before > 0, before, before * slope)
        tl.store(y + at, after.to(y.dtype.element_ty), mask=inside)


@triton.jit
def instance_norm_whole_backward(
    x: tl.tensor,
    grad_y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    image, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    row, known = tl.arange(0, ROWS)[:, None], channel < channels
    at, inside = row * channels + channel, (row < rows) & known
    centre = tl.load(mean + image * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + image * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    grad_y += image * rows * channels
    grad_x += image * rows * channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)  # 0 outside, so that the sums are right
    centred, before = _normalise(value, centre, gain, b)
    grad = tl.where(before > 0, grad, grad * slope)
    total, dot = tl.sum(grad, 0), tl.sum(grad * centred, 0) * scale
    result = grad * gain - total / rows * gain - centred * (dot / rows * scale * gain)
    tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(sums + image * channels + channel, total, mask=known)
    tl.store(dots + image * channels + channel, dot, mask=known)


@triton.jit
def instance_norm_reduce_backward(
    x: tl.tensor,
    grad_y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Sum, per chunk, the gradient before the leaky ReLU and its product with the normalised x."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last image first, as in instance_norm_reduce
    image, chunk, channel = _place(program, channels, chunks, CHANNELS)
    known = channel < channels
    centre = tl.load(mean + image * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + image * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    grad_y += image * rows * channels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    dot = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(TILES):
        row = (chunk * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < rows) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        centred, before = _normalise(value, centre, gain, b)
        grad = tl.where(before > 0, grad, grad * slope)
        total += grad
        dot += grad * centred
    at = (image * chunks + chunk) * channels + channel
    tl.store(sums + at, tl.sum(total, 0), mask=known)
    tl.store(dots + at, tl.sum(dot, 0) * scale, mask=known)


@triton.jit
def instance_norm_apply_backward(
    x: tl.tensor,
    grad_y: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    grad_x: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    image, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    of_image = image * channels + channel
    centre = tl.load(mean + of_image, mask=known, other=0.0)
    scale = tl.load(rstd + of_image, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    offset = tl.load(sums + of_image, mask=known, other=0.0) / rows * gain
    factor = tl.load(dots + of_image, mask=known, other=0.0) / rows * scale * gain
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += image * rows * channels
    grad_y += image * rows * channels
    grad_x += image * rows * channels
    for tile in range(TILES):
        row = (chunk * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < rows) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        centred, before = _normalise(value, centre, gain, b)
        grad = tl.where(before > 0, grad, grad * slope)
        result = grad * gain - offset - centred * factor
        tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
