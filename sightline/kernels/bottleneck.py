"""A bottleneck of a ResNet in training as one operation and its gradient; called by models/resnet.py.

Statistics come out of the convolutions, batch norm and ReLU go into the next one, so that activations are read and
written half as often. Parameters, running statistics and checkpoints are those of the plain modules.
docs/why/kernels.md.
"""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sightline import kernels
from sightline.kernels import bottleneck_reference
from sightline.kernels.bottleneck_steps import Norm
from sightline.kernels.operation import operation, refuse_gradient

CHANNELS = 64  # whose multiples the kernels take
MEAN, RSTD, VARIANCE, SCALE, BIAS = range(5)  # rows of the statistics
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Fusable(nn.Module):
    """A block of three convolutions with batch norms and a shortcut; bottleneck_check.py lets it run fused."""

    conv1: nn.Conv2d
    bn1: nn.BatchNorm2d
    conv2: nn.Conv2d
    bn2: nn.BatchNorm2d
    conv3: nn.Conv2d
    bn3: nn.BatchNorm2d
    downsample: nn.Sequential | None
    is_fused = False

    def layers(self) -> tuple[list[nn.Conv2d], list[nn.BatchNorm2d]]:
        """Return convolutions and batch norms in order, the projection's last."""
        convs, norms = [self.conv1, self.conv2, self.conv3], [self.bn1, self.bn2, self.bn3]
        if self.downsample is not None:
            convs, norms = [*convs, self.downsample[0]], [*norms, self.downsample[1]]  # type: ignore[list-item]
        return convs, norms


def why_not_fusable(block: Fusable) -> str:
    """Return what about a block the operation does not have; "" if nothing."""
    convs, norms = block.layers()
    # Subclasses pad otherwise, share statistics between ranks, or are kept in fp32.
    if any(type(norm) is not nn.BatchNorm2d for norm in norms):
        return "batch norms are synchronised over ranks or kept in fp32"
    if any(type(conv) is not nn.Conv2d for conv in convs):
        return "convolutions pad as TensorFlow does or are kept in fp32"
    if any(conv.bias is not None or conv.groups != 1 or conv.dilation != (1, 1) for conv in convs):
        return "convolutions have a bias, groups or dilation"
    stride = convs[1].stride
    kinds = [(conv.kernel_size, conv.stride, conv.padding) for conv in convs]
    point, window = ((1, 1), (1, 1), (0, 0)), ((3, 3), stride, (1, 1))
    if kinds != [point, window, point, ((1, 1), stride, (0, 0))][: len(kinds)] or stride not in ((1, 1), (2, 2)):
        return "the stride is not in the 3x3 convolution"
    if any(conv.in_channels % CHANNELS or conv.out_channels % CHANNELS for conv in convs):
        return f"channels are not multiples of {CHANNELS}"
    first = norms[0]
    alike = all((norm.eps, norm.momentum) == (first.eps, first.momentum) for norm in norms)
    if not (alike and first.momentum and all(norm.affine and norm.track_running_stats for norm in norms)):
        return "batch norms differ, or lack parameters or statistics"
    return ""


def applies(block: Fusable, x: Tensor) -> bool:
    """Return whether to run `block` fused on `x`: chosen, in training, fp16 in channels_last."""
    if not (block.is_fused and block.training and kernels.are_allowed() and x.dtype == torch.float16):
        return False
    height, width = (-(-side // block.conv2.stride[0]) for side in x.shape[2:])
    # One value per channel has no variance; the plain modules say so.
    return len(x) * height * width > 1 and x.is_contiguous(memory_format=torch.channels_last)


def run(block: Fusable, x: Tensor) -> Tensor:
    """Return the block's output, and update its running statistics."""
    convs, norms = block.layers()
    weights = [conv.weight.to(x.dtype) for conv in convs]
    gammas, betas = [norm.weight for norm in norms], [norm.bias for norm in norms]
    found = _operation(x, weights, gammas, betas, convs[1].stride[0], norms[0].eps)
    _update_running(norms, found[6].detach())
    return found[0]


@torch.no_grad()
def _update_running(norms: list[nn.BatchNorm2d], stats: Tensor) -> None:
    sizes = [norm.num_features for norm in norms]
    running: Any = [norm.running_mean for norm in norms] + [norm.running_var for norm in norms]
    new = [*stats[MEAN].split(sizes), *stats[VARIANCE].split(sizes)]
    momentum = norms[0].momentum
    assert momentum is not None, "why_not_fusable() checks it"
    torch._foreach_lerp_(running, new, momentum)
    counts: Any = [norm.num_batches_tracked for norm in norms]
    torch._foreach_add_(counts, 1)


def _steps(x: Tensor) -> ModuleType:
    if not x.is_cuda:
        return bottleneck_reference
    from sightline.kernels import bottleneck_cudnn  # imports Triton, which takes a second

    return bottleneck_cudnn


def _columns(weights: list[Tensor]) -> list[slice]:
    """Return where each batch norm's channels stand in a row of the statistics."""
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + weight.shape[0])
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _laid(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


# Registered as torch operations, so that a compiler neither traces into them nor changes the layout of their inputs.
@operation("bottleneck", tags=(torch.Tag.needs_exact_strides,))
def _operation(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], betas: list[Tensor], stride: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output; one bit per value of it; the convolutions' outputs, the projection's last; statistics (5,
    channels of all); scale and bias of these as the next convolution reads them."""
    steps, at = _steps(x), _columns(weights)
    x, weights = _laid(x), [_laid(weight) for weight in weights]
    stats = torch.empty((5, at[-1].stop), dtype=gammas[0].dtype, device=x.device)
    half = torch.empty((2, at[-1].stop), dtype=x.dtype, device=x.device)

    def convolve(number: int, given: Tensor, step: int, below: int | None) -> Tensor:
        before = None if below is None else half[:, at[below]]
        y, sums = steps.convolve(given, weights[number], step, before)
        norm, own = (gammas[number], betas[number]), at[number]
        steps.finish(sums, norm, y.numel() // y.shape[1], eps, stats[:, own], half[:, own])
        return y

    y1 = convolve(0, x, 1, None)
    y2 = convolve(1, y1, stride, 0)
    y3 = convolve(2, y2, 1, 1)
    other = convolve(3, x, stride, None) if len(weights) == 4 else None
    scales = [(stats[SCALE, own], stats[BIAS, own]) for own in at]
    out, bits = steps.end(y3, scales[2], x if other is None else other, None if other is None else scales[3])
    return out, bits, y1, y2, y3, x.new_empty(0) if other is None else other, stats, half


@torch.library.register_fake(_operation)
def _(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], betas: list[Tensor], stride: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, _, height, width = x.shape
    sides = ((height - 1) // stride + 1, (width - 1) // stride + 1)

    def empty(channels: int, *sides: int) -> Tensor:
        return _laid(x.new_empty((batch, channels, *sides)))

    inner, last = weights[0].shape[0], weights[2].shape[0]
    total = _columns(weights)[-1].stop
    return (
        empty(last, *sides),
        x.new_empty((batch * sides[0] * sides[1], last // 8), dtype=torch.uint8),
        empty(inner, height, width),
        empty(inner, *sides),
        empty(last, *sides),
        empty(last, *sides) if len(weights) == 4 else x.new_empty(0),
        x.new_empty((5, total), dtype=gammas[0].dtype),
        x.new_empty((2, total)),
    )


@operation("bottleneck_backward", tags=(torch.Tag.needs_exact_strides,))
def _gradient(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    gammas: list[Tensor],
    betas: list[Tensor],
    saved: list[Tensor],
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, of three weights and the projection's, and of all betas and gammas (2, channels)."""
    steps, at = _steps(x), _columns(weights)
    bits, y1, y2, y3, other, stats, half = saved
    grad, x, weights = _laid(grad), _laid(x), [_laid(weight) for weight in weights]
    affine = torch.empty((2, at[-1].stop), dtype=stats.dtype, device=x.device)
    norms = [
        Norm(stats[MEAN, own], stats[RSTD, own], gamma, affine[1, own], affine[0, own])
        for own, gamma in zip(at, gammas, strict=True)
    ]
    shortcut, other_norm = (other, norms[3]) if len(weights) == 4 else (None, None)
    steps.end_sums(grad, bits, y3, norms[2], shortcut, other_norm)
    dy3, rest = steps.end_gradients(grad, bits, y3, norms[2], shortcut, other_norm)
    dy2, dw3 = steps.convolve_backward(dy3, weights[2], 1, y2, half[:, at[1]], norms[1], betas[1])
    dy1, dw2 = steps.convolve_backward(dy2, weights[1], stride, y1, half[:, at[0]], norms[0], betas[0])
    dw1 = steps.wgrad(dy1, weights[0], 1, x)
    dwp = x.new_empty(0)
    if len(weights) == 4:
        dwp = steps.wgrad(rest, weights[3], stride, x)
        rest = steps.dgrad(rest, weights[3], stride, x)
    return steps.add_dgrad(rest, dy1, weights[0]), dw1, dw2, dw3, dwp, affine


@torch.library.register_fake(_gradient)
def _(
    grad: Tensor,
    x: Tensor,
    weights: list[Tensor],
    gammas: list[Tensor],
    betas: list[Tensor],
    saved: list[Tensor],
    stride: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    like = [_laid(torch.empty_like(weight)) for weight in weights]
    last = like[3] if len(weights) == 4 else x.new_empty(0)
    affine = x.new_empty((2, _columns(weights)[-1].stop), dtype=saved[5].dtype)
    return _laid(torch.empty_like(x)), like[0], like[1], like[2], last, affine


refuse_gradient(_gradient)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, gammas, betas, ctx.stride, _ = inputs
    ctx.count = len(weights)
    ctx.save_for_backward(x, *weights, *gammas, *betas, *output[1:])
    ctx.set_materialize_grads(False)  # only the output has a gradient: do not fill zeros for the rest


def _differentiate(ctx: Any, grad: Tensor, *_: None) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    n = ctx.count
    weights, gammas, betas = rest[:n], rest[n : 2 * n], rest[2 * n : 3 * n]
    dx, *of_weights, affine = _gradient(grad, x, weights, gammas, betas, rest[3 * n :], ctx.stride)
    of_betas, of_gammas = (list(row.split([len(gamma) for gamma in gammas])) for row in affine.unbind())
    return dx, of_weights[:n], of_gammas, of_betas, None, None


torch.library.register_autograd(_operation, _differentiate, setup_context=_keep)
