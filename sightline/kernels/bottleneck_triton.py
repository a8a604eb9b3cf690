"""Triton kernels of kernels/bottleneck_cudnn.py: what cuDNN's engines leave of a bottleneck's batch norms and ReLUs.

A tensor (batch, channels, height, width) in channels_last is a table of rows (pixels) by channels. Passes read and
write every value once; sums go to one row per program, which a second launch adds: equal inputs give equal bits. Names
say batch_norm, by which profiles know them.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.bottleneck_steps import WIDEST, Norm

TILE = 4096  # elements that a program of a pass handles: 32 per thread
SUMMED_TILE = 1024  # elements that a program of a reduction reads at once: 8 per thread, one load of 16 bytes
# Programs of a reduction: eight for each of 132 processors, which run all at once if a thread has 64 registers; with
# more registers the last ones run alone, which took a third longer. Constant: bits do not depend on the GPU.
PROGRAMS = 1056
REGISTERS = 64
JOINED = (8, 256)  # channels and rows that a program of a join adds up at once


def _table(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[1], x.shape[1]


def _block(channels: int, most: int) -> int:
    return math.gcd(channels, most)


def _pass(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and sizes of a pass over `x`."""
    rows, channels = _table(x)
    block = _block(channels, WIDEST)
    tile = TILE // block
    return (triton.cdiv(rows, tile) * (channels // block),), {"ROWS": tile, "CHANNELS": block, "num_warps": 4}


def _reduction(x: Tensor, sums: int) -> tuple[tuple[int], dict[str, int], Tensor]:
    """Return grid and sizes of a reduction over `x`, and room for the sums of each program."""
    rows, channels = _table(x)
    block = _block(channels, 64)
    tile = SUMMED_TILE // block
    tiles = triton.cdiv(rows, tile)
    each = triton.cdiv(tiles, max(PROGRAMS // (channels // block), 1))
    chunks = triton.cdiv(tiles, each)
    parts = torch.empty((sums, chunks, channels), dtype=torch.float32, device=x.device)
    sizes = {"ROWS": tile, "CHANNELS": block, "tiles": each, "num_warps": 4, "maxnreg": REGISTERS}
    return (chunks * (channels // block),), sizes, parts


def _join(parts: Tensor, results: list[Tensor], factors: list[Tensor]) -> None:
    """Write the sums over programs of `parts` (sums, programs, channels), all but the first times a factor."""
    count, chunks, channels = parts.shape
    block = _block(channels, JOINED[0])
    none = results[0]
    results, factors = results + [none] * (3 - count), factors + [none] * (2 - len(factors))
    sizes = {"COUNT": count, "CHANNELS": block, "ROWS": JOINED[1], "num_warps": 8}
    batch_norm_join[(channels // block,)](parts, *results, *factors, chunks, channels, **sizes)


def statistics(y: Tensor) -> Tensor:
    """Return sum and sum of squares per channel, (2, channels) in fp32."""
    grid, sizes, parts = _reduction(y, 2)
    sums = torch.empty((2, y.shape[1]), dtype=torch.float32, device=y.device)
    batch_norm_statistics[grid](y, parts, *_table(y), parts.shape[1], **sizes)
    ones = torch.ones(y.shape[1], dtype=torch.float32, device=y.device)
    _join(parts, list(sums), [ones])
    return sums


def finish(sums: Tensor, norm: tuple[Tensor, Tensor], count: int, eps: float, stats: Tensor, half: Tensor) -> None:
    """Turn sums into `stats` (mean, 1 / deviation, unbiased variance, scale, bias) and `half` (scale, bias in fp16)."""
    channels = sums.shape[1]
    sizes = {"CHANNELS": _block(channels, 64), "num_warps": 2}
    batch_norm_finish[(channels // sizes["CHANNELS"],)](
        sums, *norm, stats, half, count, eps, channels, stats.stride(0), half.stride(0), **sizes
    )


def end(y: Tensor, norm: tuple[Tensor, Tensor], shortcut: Tensor, other: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Return relu(y * scale + bias + shortcut) and one bit per value: is it positive? `other` scales the shortcut."""
    grid, sizes = _pass(y)
    rows, channels = _table(y)
    out, bits = torch.empty_like(y), torch.empty((rows, channels // 8), dtype=torch.uint8, device=y.device)
    batch_norm_end[grid](
        y, *norm, shortcut, *(other or norm), out, bits, rows, channels, PROJECTED=bool(other), **sizes
    )
    return [out, bits]


def end_sums(grad: Tensor, bits: Tensor, y: Tensor, norm: Norm, shortcut: Tensor | None, other: Norm | None) -> None:
    """Compute the gradients of gamma and beta of the last batch norm and, where there is one, the projection's."""
    grid, sizes, parts = _reduction(y, 3 if other else 2)
    second = (shortcut, other.mean) if other else (y, norm.mean)
    batch_norm_end_sums[grid](
        *(grad, bits, y, norm.mean, *second, parts), *_table(y), parts.shape[1], PROJECTED=bool(other), **sizes
    )
    results = [norm.dbeta, norm.dgamma, *([other.dgamma] if other else [])]
    _join(parts, results, [norm.rstd, *([other.rstd] if other else [])])


def end_gradients(
    grad: Tensor, bits: Tensor, y: Tensor, norm: Norm, shortcut: Tensor | None, other: Norm | None
) -> list[Tensor]:
    """Return the gradients of y and of the shortcut's convolution; without a projection that of the shortcut itself."""
    grid, sizes = _pass(y)
    rows, channels = _table(y)
    dy, rest = torch.empty_like(y), torch.empty_like(y)
    second = (shortcut, *other) if other else (y, *norm)
    batch_norm_end_backward[grid](
        *(grad, bits, y, *norm, *second, dy, rest, rows, channels), PROJECTED=bool(other), **sizes
    )
    return [dy, rest]


def inner_sums(grad: Tensor, y: Tensor, half: Tensor, norm: Norm, wants_input: bool) -> Tensor | None:
    """Compute the gradients of gamma and beta of relu(norm(y)) from `grad`, its own; return relu(norm(y)) if wanted."""
    grid, sizes, parts = _reduction(y, 2)
    z = torch.empty_like(y) if wants_input else None
    batch_norm_relu_sums[grid](
        *(grad, y, half, half.stride(0), norm.mean, y if z is None else z, parts),
        *(*_table(y), parts.shape[1]),
        WRITES=wants_input,
        **sizes,
    )
    _join(parts, [norm.dbeta, norm.dgamma], [norm.rstd])
    return z


def inner_gradient(grad: Tensor, y: Tensor, half: Tensor, norm: Norm, is_masked: bool) -> Tensor:
    """Turn `grad`, of relu(norm(y)), into that of y, in place; `is_masked`: it already passed the ReLU."""
    grid, sizes = _pass(y)
    batch_norm_relu_backward[grid](grad, y, half, half.stride(0), *norm, *_table(y), MASKED=is_masked, **sizes)
    return grad


def activate(y: Tensor, half: Tensor) -> Tensor:
    """Return relu(y * scale + bias)."""
    grid, sizes = _pass(y)
    z = torch.empty_like(y)
    batch_norm_relu[grid](y, half, half.stride(0), z, *_table(y), **sizes)
    return z


@triton.jit
def _place(program: tl.tensor, channels: tl.tensor, CHANNELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return chunk and channels of a program; programs of neighbouring channels have neighbouring numbers."""
    blocks = channels // CHANNELS
    return (program // blocks).to(tl.int64), (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)


@triton.jit
def _are_set(
    bits: tl.tensor, row: tl.tensor, channel: tl.tensor, inside: tl.tensor, channels: tl.tensor, SHAPE: tl.constexpr
) -> tl.tensor:
    """Return the bits of a tile of SHAPE as numbers 0 and 1."""
    byte = tl.load(bits + row * (channels // 8) + channel, mask=inside, other=0).to(tl.int32)
    return tl.reshape((byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1, SHAPE)


@triton.jit
def _behind_norm(
    gradient: tl.tensor,
    x: tl.tensor,
    channel: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    gamma: tl.tensor,
    dgamma: tl.tensor,
    dbeta: tl.tensor,
    rows: tl.tensor,
) -> tl.tensor:
    """Return the gradient of a batch norm's input `x` from that of its output."""
    r = tl.load(rstd + channel)
    centred = x - tl.load(mean + channel)[None, :]
    share = 1.0 / rows
    slope = tl.load(dgamma + channel) * r * share
    inner = gradient - (tl.load(dbeta + channel) * share)[None, :] - centred * slope[None, :]
    return inner * (tl.load(gamma + channel) * r)[None, :]


@triton.jit
def batch_norm_join(
    parts: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    factor: tl.tensor,
    factor_of_third: tl.tensor,
    chunks: tl.tensor,
    channels: tl.tensor,
    COUNT: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    size = chunks * channels
    a = tl.zeros((ROWS, CHANNELS), tl.float32)
    b = tl.zeros((ROWS, CHANNELS), tl.float32)
    c = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)[:, None]
        at, inside = chunk * channels + channel[None, :], chunk < chunks
        a += tl.load(parts + at, mask=inside, other=0.0)
        b += tl.load(parts + size + at, mask=inside, other=0.0)
        if COUNT == 3:
            c += tl.load(parts + 2 * size + at, mask=inside, other=0.0)
    tl.store(first + channel, tl.sum(a, 0))
    tl.store(second + channel, tl.sum(b, 0) * tl.load(factor + channel))
    if COUNT == 3:
        tl.store(third + channel, tl.sum(c, 0) * tl.load(factor_of_third + channel))


@triton.jit
def batch_norm_statistics(
    y: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    a = tl.zeros((ROWS, CHANNELS), tl.float32)
    b = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(tiles):
        row = (chunk * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        value = tl.load(y + row * channels + channel[None, :], mask=row < rows, other=0.0).to(tl.float32)
        a += value
        b += value * value
    at = chunk * channels + channel
    tl.store(parts + at, tl.sum(a, 0))
    tl.store(parts + chunks * channels + at, tl.sum(b, 0))


@triton.jit
def batch_norm_finish(
    sums: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    stats: tl.tensor,
    half: tl.tensor,
    count: tl.tensor,
    eps: tl.tensor,
    channels: tl.tensor,
    stats_stride: tl.tensor,
    half_stride: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mean = tl.load(sums + channel) / count
    variance = tl.maximum(tl.load(sums + channels + channel) / count - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(gamma + channel) * rstd
    bias = tl.load(beta + channel) - mean * scale
    tl.store(stats + channel, mean)
    tl.store(stats + stats_stride + channel, rstd)
    tl.store(stats + 2 * stats_stride + channel, variance * (count / (count - 1.0)))
    tl.store(stats + 3 * stats_stride + channel, scale)
    tl.store(stats + 4 * stats_stride + channel, bias)
    # The bias of the rounded scale, whose error would move the channel by its mean.
    rounded = scale.to(half.dtype.element_ty)
    bias = tl.load(beta + channel) - mean * rounded.to(tl.float32)
    tl.store(half + channel, rounded)
    tl.store(half + half_stride + channel, bias.to(half.dtype.element_ty))


@triton.jit
def batch_norm_end(
    y: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    shortcut: tl.tensor,
    other_scale: tl.tensor,
    other_bias: tl.tensor,
    out: tl.tensor,
    bits: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    PROJECTED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    row = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = row * channels + channel[None, :], row < rows
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + channel)[None, :] + tl.load(bias + channel)[None, :]
    add = tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
    if PROJECTED:
        add = add * tl.load(other_scale + channel)[None, :] + tl.load(other_bias + channel)[None, :]
    value = value + add
    # Not maximum(value, 0), which is 0 for a NaN: a step that is not finite must be seen.
    tl.store(out + at, tl.where(value < 0, 0.0, value).to(out.dtype.element_ty), mask=inside)
    is_positive = tl.reshape((value > 0).to(tl.int32), (ROWS, CHANNELS // 8, 8))
    byte = tl.sum(is_positive << tl.arange(0, 8)[None, None, :], 2)
    of_byte = (tl.program_id(0) % (channels // CHANNELS)) * (CHANNELS // 8) + tl.arange(0, CHANNELS // 8)
    tl.store(bits + row * (channels // 8) + of_byte[None, :], byte.to(tl.uint8), mask=inside)


@triton.jit
def batch_norm_end_sums(
    grad: tl.tensor,
    bits: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    shortcut: tl.tensor,
    other_mean: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    PROJECTED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    of_byte = (tl.program_id(0) % (channels // CHANNELS)) * (CHANNELS // 8) + tl.arange(0, CHANNELS // 8)
    centre, other_centre = tl.load(mean + channel)[None, :], tl.load(other_mean + channel)[None, :]
    a = tl.zeros((ROWS, CHANNELS), tl.float32)
    b = tl.zeros((ROWS, CHANNELS), tl.float32)
    c = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(tiles):
        row = (chunk * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel[None, :], row < rows
        passes = _are_set(bits, row, of_byte[None, :], inside, channels, (ROWS, CHANNELS))
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(passes != 0, gradient, 0.0)
        a += gradient
        b += gradient * (tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - centre)
        if PROJECTED:
            c += gradient * (tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32) - other_centre)
    at_parts = chunk * channels + channel
    tl.store(parts + at_parts, tl.sum(a, 0))
    tl.store(parts + chunks * channels + at_parts, tl.sum(b, 0))
    if PROJECTED:
        tl.store(parts + 2 * chunks * channels + at_parts, tl.sum(c, 0))


@triton.jit
def batch_norm_end_backward(
    grad: tl.tensor,
    bits: tl.tensor,
    y: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    gamma: tl.tensor,
    dgamma: tl.tensor,
    dbeta: tl.tensor,
    shortcut: tl.tensor,
    other_mean: tl.tensor,
    other_rstd: tl.tensor,
    other_gamma: tl.tensor,
    other_dgamma: tl.tensor,
    other_dbeta: tl.tensor,
    dy: tl.tensor,
    rest: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    PROJECTED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    of_byte = (tl.program_id(0) % (channels // CHANNELS)) * (CHANNELS // 8) + tl.arange(0, CHANNELS // 8)
    row = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = row * channels + channel[None, :], row < rows
    passes = _are_set(bits, row, of_byte[None, :], inside, channels, (ROWS, CHANNELS))
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.where(passes != 0, gradient, 0.0)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    inner = _behind_norm(gradient, value, channel, mean, rstd, gamma, dgamma, dbeta, rows)
    tl.store(dy + at, inner.to(dy.dtype.element_ty), mask=inside)
    if PROJECTED:
        value = tl.load(shortcut + at, mask=inside, other=0.0).to(tl.float32)
        gradient = _behind_norm(
            gradient, value, channel, other_mean, other_rstd, other_gamma, other_dgamma, other_dbeta, rows
        )
    tl.store(rest + at, gradient.to(rest.dtype.element_ty), mask=inside)


@triton.jit
def batch_norm_relu_sums(
    grad: tl.tensor,
    y: tl.tensor,
    half: tl.tensor,
    half_stride: tl.tensor,
    mean: tl.tensor,
    z: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    tiles: tl.tensor,
    WRITES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    scale = tl.load(half + channel).to(tl.float32)[None, :]
    bias = tl.load(half + half_stride + channel).to(tl.float32)[None, :]
    centre = tl.load(mean + channel)[None, :]
    a = tl.zeros((ROWS, CHANNELS), tl.float32)
    b = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tile in range(tiles):
        row = (chunk * tiles + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel[None, :], row < rows
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        active = value * scale + bias
        gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.where(active > 0, gradient, 0.0)
        a += gradient
        b += gradient * (value - centre)
        if WRITES:
            tl.store(z + at, tl.where(active < 0, 0.0, active).to(z.dtype.element_ty), mask=inside)
    at_parts = chunk * channels + channel
    tl.store(parts + at_parts, tl.sum(a, 0))
    tl.store(parts + chunks * channels + at_parts, tl.sum(b, 0))


@triton.jit
def batch_norm_relu_backward(
    grad: tl.tensor,
    y: tl.tensor,
    half: tl.tensor,
    half_stride: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    gamma: tl.tensor,
    dgamma: tl.tensor,
    dbeta: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    row = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = row * channels + channel[None, :], row < rows
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if not MASKED:
        scale = tl.load(half + channel).to(tl.float32)[None, :]
        bias = tl.load(half + half_stride + channel).to(tl.float32)[None, :]
        gradient = tl.where(value * scale + bias > 0, gradient, 0.0)
    inner = _behind_norm(gradient, value, channel, mean, rstd, gamma, dgamma, dbeta, rows)
    tl.store(grad + at, inner.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def batch_norm_relu(
    y: tl.tensor,
    half: tl.tensor,
    half_stride: tl.tensor,
    z: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    chunk, channel = _place(tl.program_id(0), channels, CHANNELS)
    row = chunk * ROWS + tl.arange(0, ROWS)[:, None]
    at, inside = row * channels + channel[None, :], row < rows
    scale = tl.load(half + channel).to(tl.float32)[None, :]
    bias = tl.load(half + half_stride + channel).to(tl.float32)[None, :]
    active = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * scale + bias
    tl.store(z + at, tl.where(active < 0, 0.0, active).to(z.dtype.element_ty), mask=inside)
