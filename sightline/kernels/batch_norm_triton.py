"""Triton kernels of kernels/batch_norm.py for channels_last images, in training; see batch_norm_sum_triton.py too.

A batch is a table of rows (pixels of all images) by channels. Reductions split the rows into chunks: one pass reduces
each chunk, a small one joins them. Sizes depend on the shape alone and there are no atomic sums, so equal inputs give
equal bits. ReLU masks are computed again from x instead of read from the result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program reads at once, and channels of them, timed on the H200 on the layers of ResNet-50: 2048 are 16
# per thread of 128, two 16-byte loads in half precision.
TILE = 2048
NARROW, WIDE = 64, 256  # reductions, all others
PROGRAMS = 1056  # target of a reduction: 8 for each of 132 processors; constant: bits do not depend on the GPU
JOINED = (256, 16)  # chunks and channels that a program joins at once
FUSED = {"enable_fp_fusion": True}  # whatever Triton's default: backward must see the same signs as forward


class Tiling(NamedTuple):
    """Split of a shape into tiles of `rows` x `channels` elements and, in reductions, chunks of `length` rows."""

    rows: int
    channels: int
    length: int
    chunks: int
    warps: int = 4

    def options(self) -> dict[str, int | bool]:
        """Return the keyword arguments of a launch."""
        return {"ROWS": self.rows, "CHANNELS": self.channels, "num_warps": self.warps, **FUSED}

    def programs(self, rows: int, channels: int) -> int:
        """Return the number of tiles."""
        return triton.cdiv(rows, self.rows) * triton.cdiv(channels, self.channels)


def choose_tiling(rows: int, channels: int, tile: int = TILE, widest: int = NARROW) -> Tiling:
    """Return the tiling for (rows, channels)."""
    # The largest power of two that divides the channels; at least 32 of them, even if that leaves lanes idle.
    block = min(triton.next_power_of_2(channels), max(32, min(widest, channels & -channels)))
    tile_rows = tile // block
    tiles = triton.cdiv(rows, tile_rows)
    length = triton.cdiv(tiles, max(PROGRAMS // triton.cdiv(channels, block), 1)) * tile_rows
    return Tiling(tile_rows, block, length, triton.cdiv(rows, length))


def rows_of(x: Tensor) -> int:
    """Return the number of values per channel."""
    return x.numel() // x.shape[1]


def statistics(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return (2, channels) in fp32, the mean and 1 / deviation of the batch; update the running statistics."""
    rows, channels = rows_of(x), x.shape[1]
    tiling = tiling or choose_tiling(rows, channels)
    found = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    parts = torch.empty((2, tiling.chunks, channels), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(channels, tiling.channels)
    with torch.cuda.device_of(x):
        batch_norm_moments[(blocks * tiling.chunks,)](x, *parts, rows, channels, tiling.length, **tiling.options())
        size = (rows, channels, tiling.chunks, tiling.length)
        batch_norm_join[(triton.cdiv(channels, JOINED[1]),)](
            *parts, *found, running_mean, running_var, *size, eps, momentum, *JOINED, num_warps=4, **FUSED
        )
    return found


def apply(x: Tensor, affine: tuple[Tensor, ...], tiling: Tiling | None = None) -> Tensor:
    """Return relu(normalised x); `affine` is statistics, weight and bias."""
    return _apply(x, affine, x, affine, 0, tiling)


def apply_and_add(
    x: Tensor,
    affine: tuple[Tensor, ...],
    other: Tensor,
    of_other: tuple[Tensor, ...] | None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return relu(normalised x + other), where `other` is normalised too if it has an affine."""
    return _apply(x, affine, other, of_other or affine, 2 if of_other else 1, tiling)


def _apply(
    x: Tensor, affine: tuple[Tensor, ...], other: Tensor, of_other: tuple[Tensor, ...], kind: int, tiling: Tiling | None
) -> Tensor:
    rows, channels = rows_of(x), x.shape[1]
    tiling = tiling or choose_tiling(rows, channels, widest=WIDE)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        batch_norm_apply[(tiling.programs(rows, channels),)](
            x, *affine, other, *of_other, y, rows, channels, KIND=kind, **tiling.options()
        )
    return y


def reduce_backward(grad_y: Tensor, x: Tensor, affine: tuple[Tensor, ...], tiling: Tiling | None = None) -> Tensor:
    """Return (2, channels) in fp32: sums of the gradient before the ReLU, and of its product with the normalised x.

    These are the gradients of bias and weight.
    """
    rows, channels = rows_of(x), x.shape[1]
    tiling = tiling or choose_tiling(rows, channels)
    sums = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    parts = torch.empty((2, tiling.chunks, channels), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(channels, tiling.channels)
    with torch.cuda.device_of(x):
        batch_norm_reduce_backward[(blocks * tiling.chunks,)](
            grad_y, x, *affine, parts, rows, channels, tiling.chunks, tiling.length, **tiling.options()
        )
        batch_norm_join_backward[(2 * triton.cdiv(channels, JOINED[1]),)](
            parts, sums, channels, tiling.chunks, *JOINED, num_warps=4, **FUSED
        )
    return sums


def backward(
    grad_y: Tensor, x: Tensor, affine: tuple[Tensor, ...], tiling: Tiling | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, as (2, channels) in fp32, of bias and weight."""
    sums = reduce_backward(grad_y, x, affine, tiling)
    rows, channels = rows_of(x), x.shape[1]
    tiling = tiling or choose_tiling(rows, channels, widest=WIDE)
    grad_x = torch.empty_like(x)
    with torch.cuda.device_of(x):
        batch_norm_apply_backward[(tiling.programs(rows, channels),)](
            grad_y, x, *affine, *sums, grad_x, rows, channels, **tiling.options()
        )
    return grad_x, sums


@triton.jit
def place(program: tl.tensor, channels: tl.tensor, CHANNELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return a program's part of the rows and its channels; neighbouring programs have neighbouring channels."""
    blocks = tl.cdiv(channels, CHANNELS)
    # A batch may exceed 2^31 elements, a tile may not.
    return (program // blocks).to(tl.int64), (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def load_affine(
    statistics: tl.tensor, weight: tl.tensor, bias: tl.tensor, channel: tl.tensor, channels: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return mean, 1 / deviation, gain and bias of the channels."""
    known = channel < channels
    mean = tl.load(statistics + channel, mask=known, other=0.0)
    rstd = tl.load(statistics + channels + channel, mask=known, other=0.0)
    gain = rstd * tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    return mean, rstd, gain, tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)


@triton.jit
def normalise(x: tl.tensor, mean: tl.tensor, gain: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Return the input of the ReLU; shared, because backward must see the same signs as forward."""
    return (x - mean) * gain + bias


@triton.jit
def relu(x: tl.tensor) -> tl.tensor:
    """Return x if it is positive or NaN, so that a step that is not finite stays one."""
    return tl.where(x <= 0, 0.0, x)


@triton.jit
def batch_norm_moments(
    x: tl.tensor,
    means: tl.tensor,
    spreads: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Compute each chunk's mean and sum of squared deviations by Welford's method: one pass, no cancellation."""
    # Last rows first: what the convolution wrote last is still in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    chunk, channel = place(program, channels, CHANNELS)
    known = channel < channels
    count = tl.minimum(rows - chunk * length, length).to(tl.int32)
    x += chunk * length * channels
    mean = tl.zeros((ROWS, CHANNELS), tl.float32)
    spread = tl.zeros((ROWS, CHANNELS), tl.float32)
    seen = 0.0
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < count) & known
        value = tl.load(x + row * channels + channel, mask=inside, other=0.0).to(tl.float32)
        seen += 1.0
        centred = tl.where(inside, value - mean, 0.0)
        mean += centred * (1.0 / seen)
        spread += centred * (value - mean)
    # Each position of the tile saw one row per round, except some in the last round.
    rounds = ((count - tl.arange(0, ROWS) + ROWS - 1) // ROWS).to(tl.float32)[:, None]
    centre = tl.sum(mean * rounds, 0) / count
    centred = mean - centre
    total = tl.sum(spread + rounds * centred * centred, 0)
    tl.store(means + chunk * channels + channel, centre, mask=known)
    tl.store(spreads + chunk * channels + channel, total, mask=known)


@triton.jit
def batch_norm_join(
    means: tl.tensor,
    spreads: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    running_mean: tl.tensor,
    running_var: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    length: tl.tensor,
    eps: tl.tensor,
    momentum: tl.tensor,
    CHUNKS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Join chunks by Chan's method: the common mean, computed relative to the first chunk's, then the deviations."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    origin = tl.load(means + channel, mask=known, other=0.0)
    shift = tl.zeros((CHUNKS, CHANNELS), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        inside = (chunk < chunks) & known
        count = tl.minimum(rows - chunk * length, length).to(tl.float32)
        found = tl.load(means + chunk * channels + channel, mask=inside, other=0.0)
        shift += tl.where(inside, (found - origin) * count, 0.0)
    centre = origin + tl.sum(shift, 0) / rows
    spread = tl.zeros((CHUNKS, CHANNELS), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        inside = (chunk < chunks) & known
        count = tl.minimum(rows - chunk * length, length).to(tl.float32)
        centred = tl.load(means + chunk * channels + channel, mask=inside, other=0.0) - centre
        within = tl.load(spreads + chunk * channels + channel, mask=inside, other=0.0)
        spread += tl.where(inside, within + count * centred * centred, 0.0)
    total = tl.sum(spread, 0)
    tl.store(mean + channel, centre, mask=known)
    tl.store(rstd + channel, 1.0 / tl.sqrt(total / rows + eps), mask=known)
    old_mean = tl.load(running_mean + channel, mask=known, other=0.0)
    old_var = tl.load(running_var + channel, mask=known, other=0.0)
    tl.store(running_mean + channel, old_mean * (1 - momentum) + centre * momentum, mask=known)
    tl.store(running_var + channel, old_var * (1 - momentum) + total / (rows - 1) * momentum, mask=known)


@triton.jit
def batch_norm_apply(
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    other: tl.tensor,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    other_bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Write relu(normalised x); KIND 1: plus `other`; KIND 2: plus normalised `other`."""
    part, channel = place(tl.program_id(0), channels, CHANNELS)
    first = part * ROWS
    row = tl.arange(0, ROWS)[:, None]
    inside = (row < rows - first) & (channel < channels)
    at = row * channels + channel
    mean, _, gain, b = load_affine(statistics, weight, bias, channel, channels)
    result = normalise(tl.load(x + first * channels + at, mask=inside, other=0.0).to(tl.float32), mean, gain, b)
    if KIND > 0:
        value = tl.load(other + first * channels + at, mask=inside, other=0.0).to(tl.float32)
        if KIND == 2:
            mean, _, gain, b = load_affine(other_statistics, other_weight, other_bias, channel, channels)
            value = normalise(value, mean, gain, b)
        result += value
    tl.store(y + first * channels + at, relu(result).to(y.dtype.element_ty), mask=inside)


@triton.jit
def batch_norm_reduce_backward(
    grad_y: tl.tensor,
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    length: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Sum, per chunk, the gradient before the ReLU and its product with the normalised x."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last rows first, as in batch_norm_moments
    chunk, channel = place(program, channels, CHANNELS)
    known = channel < channels
    count = tl.minimum(rows - chunk * length, length).to(tl.int32)
    mean, rstd, gain, b = load_affine(statistics, weight, bias, channel, channels)
    x += chunk * length * channels
    grad_y += chunk * length * channels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    dot = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < count) & known
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.where(normalise(value, mean, gain, b) > 0, grad, 0.0)
        total += grad
        dot += grad * (value - mean)
    at = chunk * channels + channel
    tl.store(parts + at, tl.sum(total, 0), mask=known)
    tl.store(parts + chunks * channels + at, tl.sum(dot, 0) * rstd, mask=known)


@triton.jit
def batch_norm_join_backward(
    parts: tl.tensor,
    sums: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    CHUNKS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Add up the chunks of each sum, in their order."""
    which, channel = place(tl.program_id(0), channels, CHANNELS)
    known = channel < channels
    parts += which * chunks * channels
    total = tl.zeros((CHUNKS, CHANNELS), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        total += tl.load(parts + chunk * channels + channel, mask=(chunk < chunks) & known, other=0.0)
    tl.store(sums + which * channels + channel, tl.sum(total, 0), mask=known)


@triton.jit
def batch_norm_apply_backward(
    grad_y: tl.tensor,
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    dot: tl.tensor,
    grad_x: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    part, channel = place(tl.program_id(0), channels, CHANNELS)
    first = part * ROWS
    row = tl.arange(0, ROWS)[:, None]
    inside = (row < rows - first) & (channel < channels)
    at = row * channels + channel
    mean, rstd, gain, b = load_affine(statistics, weight, bias, channel, channels)
    offset, factor = load_offsets(total, dot, rstd, gain, rows, channel, channels)
    value = tl.load(x + first * channels + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + first * channels + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.where(normalise(value, mean, gain, b) > 0, grad, 0.0)
    result = grad * gain - offset - (value - mean) * factor
    tl.store(grad_x + first * channels + at, result.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def load_offsets(
    total: tl.tensor,
    dot: tl.tensor,
    rstd: tl.tensor,
    gain: tl.tensor,
    rows: tl.tensor,
    channel: tl.tensor,
    channels: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Return what x's gradient loses because x changes the mean, and per deviation because it changes the variance."""
    known = channel < channels
    offset = tl.load(total + channel, mask=known, other=0.0) / rows * gain
    return offset, tl.load(dot + channel, mask=known, other=0.0) / rows * rstd * gain
