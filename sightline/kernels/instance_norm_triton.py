"""Triton kernels of kernels/instance_norm.py, over pictures whose channels lie together in memory (channels_last).

A picture is a table of rows (its pixels) by channels. Small ones are held in registers whole: one launch forward, one
backward. Others are cut into chunks of rows: one pass reduces each chunk, a small one joins them, one pass applies.
Sizes follow from the shape alone and nothing is added up atomically, so equal inputs give equal bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # elements a program reads at once: 16 for each of 128 threads, two loads of 16 bytes in half precision
WHOLE = 16384  # elements of a picture's block of channels that fit the registers of one program, with their gradients
PROGRAMS = 2048  # wanted of a launch: some waves over 132 processors; a constant, so that bits depend on no device
LEAST_TILES = 2  # of a chunk: what is written of it is then small beside what was read
JOINED = 16  # chunks joined at once


class Cut(NamedTuple):
    """How a shape is cut up: `chunks` of `tiles` tiles of `rows` x `channels` elements; 0 chunks: one tile is all."""

    channels: int
    rows: int
    tiles: int
    chunks: int
    warps: int

    @property
    def options(self) -> dict[str, int | bool]:
        """Of a launch. Products and sums are fused whatever this version of Triton does by default."""
        sizes = {"ROWS": self.rows, "CHANNELS": self.channels}
        if self.chunks:
            sizes["TILES"] = self.tiles
        return {**sizes, "num_warps": self.warps, "enable_fp_fusion": True}

    @property
    def joining(self) -> "Cut":
        """How the chunks of a picture, as rows, are joined by one program."""
        return self._replace(rows=JOINED, tiles=triton.cdiv(self.chunks, JOINED), warps=2)


def cut_of(pictures: int, rows: int, channels: int) -> Cut:
    """The cut for (pictures, rows, channels)."""
    # 64 channels in half precision are a cache line; with 32, fewer lanes idle when 64 does not divide the channels.
    block = min(triton.next_power_of_2(channels), 64 if channels % 64 == 0 else 32)
    padded = triton.next_power_of_2(rows)
    if padded * min(block, 32) <= WHOLE:
        block = min(block, max(32, 8192 // padded))
        return Cut(block, padded, 1, 0, min(max(padded * block // 1024, 1), 16))
    tile_rows = TILE // block
    tiles = triton.cdiv(rows, tile_rows)
    wanted = triton.cdiv(PROGRAMS, pictures * triton.cdiv(channels, block))
    tiles_of_chunk = triton.cdiv(tiles, max(min(wanted, tiles // LEAST_TILES), 1))
    return Cut(block, tile_rows, tiles_of_chunk, triton.cdiv(tiles, tiles_of_chunk), 4)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """The result, laid out like x, and (2, pictures, channels) in fp32: means and reciprocals of deviations."""
    pictures, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    cut = cut or cut_of(pictures, rows, channels)
    y = torch.empty_like(x)
    statistics = torch.empty((2, pictures, channels), dtype=torch.float32, device=x.device)
    programs = pictures * triton.cdiv(channels, cut.channels)
    with torch.cuda.device_of(x):
        if not cut.chunks:
            instance_norm_whole[(programs,)](x, weight, bias, y, *statistics, rows, channels, eps, slope, **cut.options)
            return y, statistics
        parts = torch.empty((2, pictures, cut.chunks, channels), dtype=torch.float32, device=x.device)
        size = (rows, channels, cut.chunks)
        instance_norm_reduce[(programs * cut.chunks,)](x, *parts, *size, **cut.options)
        instance_norm_join[(programs,)](
            *parts, *statistics, *size, eps, LENGTH=cut.rows * cut.tiles, **cut.joining.options
        )
        instance_norm_apply[(programs * cut.chunks,)](x, weight, bias, y, *statistics, *size, slope, **cut.options)
    return y, statistics


def backward(
    outer: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, laid out like x, and of (bias, weight), (2, channels) in fp32, given that of the result."""
    pictures, channels, rows = len(x), x.shape[1], x[0, 0].numel()
    cut = cut or cut_of(pictures, rows, channels)
    inner = torch.empty_like(x)
    programs = pictures * triton.cdiv(channels, cut.channels)
    given = (x, outer, weight, bias, *statistics)
    with torch.cuda.device_of(x):
        if not cut.chunks:
            sums = torch.empty_like(statistics)
            instance_norm_whole_backward[(programs,)](*given, inner, *sums, rows, channels, slope, **cut.options)
            return inner, sums.sum(1)
        parts = torch.empty((2, pictures, cut.chunks, channels), dtype=torch.float32, device=x.device)
        size = (rows, channels, cut.chunks)
        instance_norm_reduce_backward[(programs * cut.chunks,)](*given, *parts, *size, slope, **cut.options)
        sums = parts.sum(2)  # (2, pictures, channels)
        instance_norm_apply_backward[(programs * cut.chunks,)](*given, *sums, inner, *size, slope, **cut.options)
    return inner, sums.sum(1)


@triton.jit
def _place(
    program: tl.tensor, channels: tl.tensor, chunks: tl.tensor, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Picture, chunk and channels of a program; those that read neighbouring channels run side by side."""
    blocks = tl.cdiv(channels, CHANNELS)
    channel = (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    chunk = (program // blocks) % chunks
    picture = (program // blocks // chunks).to(tl.int64)  # a batch may hold more than 2^31 elements, a picture not
    return picture, chunk, channel


@triton.jit
def _normalise(x: tl.tensor, mean: tl.tensor, gain: tl.tensor, bias: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Distances from the mean, and what goes into the leaky ReLU; one place: backward must find forward's signs."""
    away = x - mean
    return away, away * gain + bias


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
    picture, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    row, known = tl.arange(0, ROWS)[:, None], channel < channels
    at, inside = row * channels + channel, (row < rows) & known
    x += picture * rows * channels
    y += picture * rows * channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(value, 0) / rows
    away = tl.where(inside, value - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 0) / rows + eps)
    w = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    _, before = _normalise(value, centre, scale * w, b)
    after = tl.where(before > 0, before, before * slope)
    tl.store(y + at, after.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + picture * channels + channel, centre, mask=known)
    tl.store(rstd + picture * channels + channel, scale, mask=known)


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
    """Mean and sum of squared distances from it of each chunk, after Welford: one pass, no cancellation."""
    # From the last picture to the first: what was written last before this launch is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    picture, chunk, channel = _place(program, channels, chunks, CHANNELS)
    known = channel < channels
    first = chunk * (TILES * ROWS)
    length = tl.minimum(rows - first, TILES * ROWS)
    x += picture * rows * channels
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    count = 0.0
    for tile in range(TILES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < length) & known
        value = tl.load(x + (first + row) * channels + channel, mask=inside, other=0.0).to(tl.float32)
        count += 1.0
        away = tl.where(inside, value - mean, 0.0)
        mean += away * (1.0 / count)
        spread += away * (value - mean)
    # Every place of the tile saw one row of each round, some none of the last.
    seen = ((length - tl.arange(0, ROWS) + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    centre = tl.sum(mean * seen, 0) / length
    away = mean - centre
    total = tl.sum(spread + seen * away * away, 0)
    at = (picture * chunks + chunk) * channels + channel
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
    """Chunks joined after Chan: first their common mean, as a distance from that of the first, then distances to it."""
    picture, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    known = channel < channels
    at = picture * chunks * channels + channel
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
        away = tl.load(means + at + chunk * channels, mask=inside, other=0.0) - centre
        within = tl.load(spreads + at + chunk * channels, mask=inside, other=0.0)
        spread += tl.where(inside, within + length * away * away, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(spread, 0) / rows + eps)
    tl.store(mean + picture * channels + channel, centre, mask=known)
    tl.store(rstd + picture * channels + channel, scale, mask=known)


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
    picture, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    centre = tl.load(mean + picture * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + picture * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += picture * rows * channels
    y += picture * rows * channels
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
    outer: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    inner: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    picture, _, channel = _place(tl.program_id(0), channels, 1, CHANNELS)
    row, known = tl.arange(0, ROWS)[:, None], channel < channels
    at, inside = row * channels + channel, (row < rows) & known
    centre = tl.load(mean + picture * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + picture * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += picture * rows * channels
    outer += picture * rows * channels
    inner += picture * rows * channels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    slant = tl.load(outer + at, mask=inside, other=0.0).to(tl.float32)  # 0 outside, which adds nothing to the sums
    away, before = _normalise(value, centre, gain, b)
    slant = tl.where(before > 0, slant, slant * slope)
    total, dot = tl.sum(slant, 0), tl.sum(slant * away, 0) * scale
    result = slant * gain - total / rows * gain - away * (dot / rows * scale * gain)
    tl.store(inner + at, result.to(inner.dtype.element_ty), mask=inside)
    tl.store(sums + picture * channels + channel, total, mask=known)
    tl.store(dots + picture * channels + channel, dot, mask=known)


@triton.jit
def instance_norm_reduce_backward(
    x: tl.tensor,
    outer: tl.tensor,
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
    """Sums over each chunk of the gradient before the leaky ReLU, and of its product with the normalised x."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last picture first, as in _reduce
    picture, chunk, channel = _place(program, channels, chunks, CHANNELS)
    known = channel < channels
    centre = tl.load(mean + picture * channels + channel, mask=known, other=0.0)
    scale = tl.load(rstd + picture * channels + channel, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += picture * rows * channels
    outer += picture * rows * channels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    dot = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(TILES):
        row = (chunk * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < rows) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slant = tl.load(outer + at, mask=inside, other=0.0).to(tl.float32)
        away, before = _normalise(value, centre, gain, b)
        slant = tl.where(before > 0, slant, slant * slope)
        total += slant
        dot += slant * away
    at = (picture * chunks + chunk) * channels + channel
    tl.store(sums + at, tl.sum(total, 0), mask=known)
    tl.store(dots + at, tl.sum(dot, 0) * scale, mask=known)


@triton.jit
def instance_norm_apply_backward(
    x: tl.tensor,
    outer: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    sums: tl.tensor,
    dots: tl.tensor,
    inner: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    slope: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    picture, chunk, channel = _place(tl.program_id(0), channels, chunks, CHANNELS)
    known = channel < channels
    of_picture = picture * channels + channel
    centre = tl.load(mean + of_picture, mask=known, other=0.0)
    scale = tl.load(rstd + of_picture, mask=known, other=0.0)
    gain = scale * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    level = tl.load(sums + of_picture, mask=known, other=0.0) / rows * gain
    tilt = tl.load(dots + of_picture, mask=known, other=0.0) / rows * scale * gain
    b = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    x += picture * rows * channels
    outer += picture * rows * channels
    inner += picture * rows * channels
    for tile in range(TILES):
        row = (chunk * TILES + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < rows) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slant = tl.load(outer + at, mask=inside, other=0.0).to(tl.float32)
        away, before = _normalise(value, centre, gain, b)
        slant = tl.where(before > 0, slant, slant * slope)
        result = slant * gain - level - away * tilt
        tl.store(inner + at, result.to(inner.dtype.element_ty), mask=inside)
