"""Triton kernels of kernels/batch_norm.py for the end of a block: the gradient of relu(norm(x) + other).

One pass adds the gradients that come from both ways after the block, masks them and sums them up for the norm, or for
both norms if the shortcut is a projection. One pass applies the sums. See batch_norm_triton.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sightline.kernels.batch_norm_triton import (
    FUSED,
    JOINED,
    WIDE,
    Tiling,
    batch_norm_join_backward,
    choose_tiling,
    load_affine,
    load_offsets,
    place,
    rows_of,
)

SUM_TILE = 4096  # elements that a program reads at once of five or six tensors: faster here than 2048


def backward(
    grads: tuple[Tensor, Tensor | None],
    y: Tensor,
    x: Tensor,
    affine: tuple[Tensor, ...],
    other: Tensor | None,
    of_other: tuple[Tensor, ...],
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the gradients of x, of `other` if it is given because it was normalised too, and of the sum before the
    ReLU; and as (3, channels) in fp32 those of the bias, of the weight and of the other weight.

    `grads` are one or two gradients of the result y, which are added up.
    """
    rows, channels = rows_of(x), x.shape[1]
    sizes = tiling or choose_tiling(rows, channels, tile=SUM_TILE)
    sums = torch.empty((3, channels), dtype=torch.float32, device=x.device)
    parts = torch.empty((3, sizes.chunks, channels), dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x)
    blocks, given = triton.cdiv(channels, sizes.channels), 2 if other is None else 3
    first, second = grads
    with torch.cuda.device_of(x):
        batch_norm_reduce_sum[(blocks * sizes.chunks,)](
            first,
            first if second is None else second,
            y,
            x,
            *affine[:2],
            x if other is None else other,
            *(affine[:2] if other is None else of_other[:2]),
            grad,
            parts,
            rows,
            channels,
            sizes.chunks,
            sizes.length,
            HAS_SECOND=second is not None,
            HAS_OTHER=other is not None,
            **sizes.options(),
        )
        batch_norm_join_backward[(given * triton.cdiv(channels, JOINED[1]),)](
            parts, sums, channels, sizes.chunks, *JOINED, num_warps=4, **FUSED
        )
        sizes = tiling or choose_tiling(rows, channels, widest=WIDE)
        grad_x = torch.empty_like(x)
        grad_other = None if other is None else torch.empty_like(other)
        batch_norm_apply_sum[(sizes.programs(rows, channels),)](
            grad,
            x,
            *affine[:2],
            x if other is None else other,
            *(affine[:2] if other is None else of_other[:2]),
            *sums,
            grad_x,
            grad_x if grad_other is None else grad_other,
            rows,
            channels,
            HAS_OTHER=other is not None,
            **sizes.options(),
        )
    return grad_x, grad_other, grad, sums


@triton.jit
def batch_norm_reduce_sum(
    grad_y: tl.tensor,
    grad_second: tl.tensor,
    y: tl.tensor,
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    other: tl.tensor,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    grad: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    chunks: tl.tensor,
    length: tl.tensor,
    HAS_SECOND: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Write the gradient before the ReLU of a sum; sum it and its products with normalised x and `other` per chunk."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # last rows first, as in batch_norm_moments
    chunk, channel = place(program, channels, CHANNELS)
    known = channel < channels
    count = tl.minimum(rows - chunk * length, length).to(tl.int32)
    mean, rstd, _, _ = load_affine(statistics, weight, weight, channel, channels)
    other_mean, other_rstd, _, _ = load_affine(other_statistics, other_weight, other_weight, channel, channels)
    start = chunk * length * channels
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    dot = tl.zeros((ROWS, CHANNELS), tl.float32)
    other_dot = tl.zeros((ROWS, CHANNELS), tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        at, inside = row * channels + channel, (row < count) & known
        value = tl.load(grad_y + start + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_SECOND:
            value += tl.load(grad_second + start + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.where(tl.load(y + start + at, mask=inside, other=0.0).to(tl.float32) > 0, value, 0.0)
        rounded = value.to(grad.dtype.element_ty)
        tl.store(grad + start + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # the sums are those of what the next pass reads
        total += value
        dot += value * (tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32) - mean)
        if HAS_OTHER:
            other_dot += value * (tl.load(other + start + at, mask=inside, other=0.0).to(tl.float32) - other_mean)
    at = chunk * channels + channel
    tl.store(parts + at, tl.sum(total, 0), mask=known)
    tl.store(parts + chunks * channels + at, tl.sum(dot, 0) * rstd, mask=known)
    if HAS_OTHER:
        tl.store(parts + 2 * chunks * channels + at, tl.sum(other_dot, 0) * other_rstd, mask=known)


@triton.jit
def batch_norm_apply_sum(
    grad: tl.tensor,
    x: tl.tensor,
    statistics: tl.tensor,
    weight: tl.tensor,
    other: tl.tensor,
    other_statistics: tl.tensor,
    other_weight: tl.tensor,
    total: tl.tensor,
    dot: tl.tensor,
    other_dot: tl.tensor,
    grad_x: tl.tensor,
    grad_other: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    HAS_OTHER: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Write the gradients of x, and of `other` if it was normalised, from that of their sum."""
    part, channel = place(tl.program_id(0), channels, CHANNELS)
    first = part * ROWS
    row = tl.arange(0, ROWS)[:, None]
    inside = (row < rows - first) & (channel < channels)
    at = row * channels + channel
    value = tl.load(grad + first * channels + at, mask=inside, other=0.0).to(tl.float32)
    mean, rstd, gain, _ = load_affine(statistics, weight, weight, channel, channels)
    offset, factor = load_offsets(total, dot, rstd, gain, rows, channel, channels)
    found = tl.load(x + first * channels + at, mask=inside, other=0.0).to(tl.float32)
    result = value * gain - offset - (found - mean) * factor
    tl.store(grad_x + first * channels + at, result.to(grad_x.dtype.element_ty), mask=inside)
    if HAS_OTHER:
        mean, rstd, gain, _ = load_affine(other_statistics, other_weight, other_weight, channel, channels)
        offset, factor = load_offsets(total, other_dot, rstd, gain, rows, channel, channels)
        found = tl.load(other + first * channels + at, mask=inside, other=0.0).to(tl.float32)
        result = value * gain - offset - (found - mean) * factor
        tl.store(grad_other + first * channels + at, result.to(grad_other.dtype.element_ty), mask=inside)
