"""The steps of kernels/bottleneck.py in plain torch, in any precision: what bottleneck_cudnn.py must compute.

Used on devices without kernels, which is in tests: a network runs its plain modules there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn import grad as gradients

from sightline.kernels.bottleneck_steps import Norm


def convolve(x: Tensor, weight: Tensor, stride: int, half: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the convolution of `x`, or of relu(x * scale + bias), with its sums and sums of squares per channel."""
    y = functional.conv2d(x if half is None else activate(x, half), weight, None, stride, weight.shape[2] // 2)
    wide = _wide(y)
    return _laid(y), torch.stack([wide.sum((0, 2, 3)), wide.square().sum((0, 2, 3))])


def finish(sums: Tensor, norm: tuple[Tensor, Tensor], count: int, eps: float, stats: Tensor, half: Tensor) -> None:
    """Turn sums into `stats` (mean, 1 / deviation, unbiased variance, scale, bias) and `half` (scale, bias in x's
    precision)."""
    mean = sums[0] / count
    variance = (sums[1] / count - mean * mean).clamp(min=0)
    rstd = (variance + eps).rsqrt()
    scale = norm[0] * rstd
    bias = norm[1] - mean * scale
    stats.copy_(torch.stack([mean, rstd, variance * (count / (count - 1)), scale, bias]))
    half[0] = scale
    half[1] = norm[1] - mean * half[0]  # of the rounded scale, whose error would move the channel by its mean


def end(y: Tensor, norm: tuple[Tensor, Tensor], shortcut: Tensor, other: tuple[Tensor, Tensor] | None) -> list[Tensor]:
    """Return relu(y * scale + bias + shortcut) and one bit per value: is it positive? `other` scales the shortcut."""
    value = (
        y * _along(norm[0]) + _along(norm[1]) + (shortcut * _along(other[0]) + _along(other[1]) if other else shortcut)
    )
    rows = (value > 0).permute(0, 2, 3, 1).reshape(-1, y.shape[1] // 8, 8)
    bits = (rows * (1 << torch.arange(8, device=y.device))).sum(2)
    return [_laid(torch.relu(value).to(y.dtype)), bits.to(torch.uint8)]


def end_sums(grad: Tensor, bits: Tensor, y: Tensor, norm: Norm, shortcut: Tensor | None, other: Norm | None) -> None:
    """Compute the gradients of gamma and beta of the last batch norm and, where there is one, the projection's."""
    passed = _passed(grad, bits)
    for x, each in ((y, norm), (shortcut, other)):
        if x is not None and each is not None:
            each.dbeta.copy_(passed.sum((0, 2, 3)))
            each.dgamma.copy_((passed * (x - _along(each.mean)) * _along(each.rstd)).sum((0, 2, 3)))


def end_gradients(
    grad: Tensor, bits: Tensor, y: Tensor, norm: Norm, shortcut: Tensor | None, other: Norm | None
) -> list[Tensor]:
    """Return the gradients of y and of the shortcut's convolution; without a projection that of the shortcut itself."""
    passed = _passed(grad, bits)
    rest = passed if shortcut is None or other is None else _behind_norm(passed, shortcut, other)
    return [_laid(_behind_norm(passed, y, norm).to(y.dtype)), _laid(rest.to(y.dtype))]


def convolve_backward(
    dy: Tensor, weight: Tensor, stride: int, y: Tensor, half: Tensor, norm: Norm, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of y and of the weight, where dy is that of convolution(relu(norm(y))); fill `norm`'s."""
    active = activate(y, half)
    passed = _wide(_dgrad(dy, weight, stride, active)).where(active > 0, 0)
    norm.dbeta.copy_(passed.sum((0, 2, 3)))
    norm.dgamma.copy_((passed * (y - _along(norm.mean)) * _along(norm.rstd)).sum((0, 2, 3)))
    return _laid(_behind_norm(passed, y, norm).to(y.dtype)), wgrad(dy, weight, stride, active)


def wgrad(dy: Tensor, weight: Tensor, stride: int, x: Tensor) -> Tensor:
    """Return the gradient of the weight of a convolution of `x`."""
    found = gradients.conv2d_weight(x, weight.shape, dy, stride, weight.shape[2] // 2)
    return _laid(found)


def dgrad(dy: Tensor, weight: Tensor, stride: int, x: Tensor) -> Tensor:
    """Return the gradient of the input `x` of a convolution."""
    return _laid(_dgrad(dy, weight, stride, x))


def add_dgrad(dx: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Add the gradient of the input of a 1x1 convolution to `dx`."""
    return dx + _dgrad(dy, weight, 1, dx)


def activate(y: Tensor, half: Tensor) -> Tensor:
    """Return relu(y * scale + bias)."""
    return torch.relu(y * _along(half[0]) + _along(half[1]))


def _dgrad(dy: Tensor, weight: Tensor, stride: int, x: Tensor) -> Tensor:
    return gradients.conv2d_input(x.shape, weight, dy, stride, weight.shape[2] // 2)


def _passed(grad: Tensor, bits: Tensor) -> Tensor:
    """Return the gradient where the ReLU passed it."""
    batch, channels, height, width = grad.shape
    is_set = (bits[:, :, None].int() >> torch.arange(8, device=bits.device)) & 1
    passes = is_set.view(batch, height, width, channels).permute(0, 3, 1, 2) != 0
    return _wide(grad).where(passes, 0)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _behind_norm(grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Return the gradient of a batch norm's input `x` from that of its output."""
    count = x.numel() // x.shape[1]
    centred = (x - _along(norm.mean)) * _along(norm.rstd)
    inner = grad - _along(norm.dbeta / count) - centred * _along(norm.dgamma / count)
    return inner * _along(norm.gamma * norm.rstd)


def _along(row: Tensor) -> Tensor:
    return row.view(1, -1, 1, 1)


def _laid(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)
