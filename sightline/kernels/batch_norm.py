"""Batch norm with what follows it, ReLU or addition and ReLU, in training; called by models/resnet.py.

A compiler reads the ReLU's result again for its gradient; the kernels of batch_norm_triton.py compute its sign from the
convolution's output, which they read anyway. Everywhere else, and in evaluation, plain torch runs.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline import kernels
from sightline.kernels.operation import operation, refuse_gradient

HAS_TRITON = find_spec("triton") is not None

LAYOUT = torch.channels_last
# Elements: below, a pass takes 2 us or less on the H200, and two launches more cost what the kernels save.
LEAST = 1 << 22
OPTIONS: dict[str, Any] = {"tags": (torch.Tag.needs_exact_strides,)}
_trusted: tuple[tuple[int | None, torch.dtype], ...] = ()  # devices by index, with precisions
_is_off = False


def trust(device: torch.device, dtype: torch.dtype) -> None:
    """Let the kernels run on a device in a precision: batch_norm_check.py has found them right there."""
    global _trusted
    if not _is_off:
        _trusted = (*_trusted, (device.index, dtype))


def turn_off() -> None:
    """Keep the kernels out of this process from now on."""
    global _trusted, _is_off
    _trusted, _is_off = (), True


def norm_relu(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Return relu(norm(x))."""
    if not applies(x, norm):
        return functional.relu(norm(x), inplace=True)
    return run_norm_relu(x, norm)


def run_norm_relu(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Do what `norm_relu` does, by the kernels."""
    return _relu(x, take_statistics(x, norm), norm.weight, norm.bias)


def norm_add_relu(
    x: Tensor,
    norm: nn.BatchNorm2d,
    other: Tensor,
    other_norm: nn.BatchNorm2d | None = None,
    through: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return relu(norm(x) + other), the end of a block, and its `through`; `other` is normalised if it has a norm.

    The result y goes two ways: into the next block's convolution and past it. `through` stands for the second way: an
    empty tensor whose gradient comes back apart from y's, so that one kernel adds and masks both. Hand it to the call
    that has y as `other`. It is None where the kernels do not apply.
    """
    is_other_ours = is_ours(other) if other_norm is None else applies(other, other_norm)
    if not (applies(x, norm) and is_other_ours and other.dtype == x.dtype):  # all gradients of y then come by y itself
        shortcut = other if other_norm is None else other_norm(other)
        return functional.relu(norm(x).add_(shortcut), inplace=True), None
    return run_norm_add_relu(x, norm, other, other_norm, through)


def run_norm_add_relu(
    x: Tensor,
    norm: nn.BatchNorm2d,
    other: Tensor,
    other_norm: nn.BatchNorm2d | None = None,
    through: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `norm_add_relu` does, by the kernels."""
    given = (x, take_statistics(x, norm), norm.weight, norm.bias, other if through is None else other.detach())
    if other_norm is None:
        return _add_relu(*given, None, None, None, through)
    return _add_relu(*given, take_statistics(other, other_norm), other_norm.weight, other_norm.bias, None)


def applies(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Return whether the kernels can run: training on CUDA in channels_last, on a tensor that is not small.

    Norms over several ranks and norms kept in fp32 are subclasses, and run as they are.
    """
    is_plain = type(norm) is nn.BatchNorm2d and norm.training and norm.momentum is not None
    return is_plain and norm.affine and norm.track_running_stats and is_ours(x) and x.numel() > x.shape[1]


def is_ours(x: Tensor) -> bool:
    """Return whether the kernels can read `x`, are to, and were found right in its precision."""
    if not HAS_TRITON or not kernels.are_allowed() or kernels.must_repeat():
        return False
    is_fit = x.is_cuda and (x.device.index, x.dtype) in _trusted and x.dim() == 4
    return is_fit and x.numel() >= LEAST and x.is_contiguous(memory_format=LAYOUT)


def take_statistics(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """Return (2, channels), mean and 1 / deviation of the batch, and update the running statistics of `norm`."""
    assert norm.num_batches_tracked is not None and norm.momentum is not None
    norm.num_batches_tracked.add_(1)
    return _statistics(x.detach(), norm.running_mean, norm.running_var, norm.momentum, norm.eps)


# Triton is imported by the first call, which takes a second that evaluation need not wait for.
# Registered as torch operations, so that a compiler neither traces into them nor changes the layout of their inputs.
# An operation with a gradient may not change its inputs, so the statistics are one of their own. The gradients of the
# others include the way through the statistics.
@operation("batch_norm_statistics", mutates_args=("running_mean", "running_var"), **OPTIONS)
def _statistics(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> Tensor:
    from sightline.kernels import batch_norm_triton

    return batch_norm_triton.statistics(x.contiguous(memory_format=LAYOUT), running_mean, running_var, momentum, eps)


@torch.library.register_fake(_statistics)
def _(x: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


@operation("batch_norm_relu", **OPTIONS)
def _relu(x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from sightline.kernels import batch_norm_triton

    return batch_norm_triton.apply(x.contiguous(memory_format=LAYOUT), (statistics, weight, bias))


@torch.library.register_fake(_relu)
def _(x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x)


@operation("batch_norm_add_relu", **OPTIONS)
def _add_relu(
    x: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    other: Tensor,
    other_statistics: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    through: Tensor | None,
) -> tuple[Tensor, Tensor]:
    from sightline.kernels import batch_norm_triton

    x, other = x.contiguous(memory_format=LAYOUT), other.contiguous(memory_format=LAYOUT)
    of_other = None
    if other_statistics is not None and other_weight is not None and other_bias is not None:
        of_other = (other_statistics, other_weight, other_bias)
    y = batch_norm_triton.apply_and_add(x, (statistics, weight, bias), other, of_other)
    return y, x.new_zeros(1).expand(x.shape)


@torch.library.register_fake(_add_relu)
def _(
    x: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    other: Tensor,
    other_statistics: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    through: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_zeros(1).expand(x.shape)


@operation("batch_norm_relu_backward", **OPTIONS)
def _gradient(grad_y: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from sightline.kernels import batch_norm_triton

    grad_y, x = grad_y.contiguous(memory_format=LAYOUT), x.contiguous(memory_format=LAYOUT)
    return batch_norm_triton.backward(grad_y, x, (statistics, weight, bias))


@torch.library.register_fake(_gradient)
def _(grad_y: Tensor, x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


refuse_gradient(_gradient)


@operation("batch_norm_add_relu_backward", **OPTIONS)
def _gradient_of_sum(
    grad_y: Tensor,
    grad_through: Tensor | None,
    y: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    other: Tensor | None,
    other_statistics: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from sightline.kernels import batch_norm_sum_triton

    second = None if grad_through is None else grad_through.contiguous(memory_format=LAYOUT)
    grads, affine = (grad_y.contiguous(memory_format=LAYOUT), second), (statistics, weight, bias)
    y, x = y.contiguous(memory_format=LAYOUT), x.contiguous(memory_format=LAYOUT)
    if other is None or other_statistics is None or other_weight is None or other_bias is None:
        grad_x, _, grad, sums = batch_norm_sum_triton.backward(grads, y, x, affine, None, ())
        return grad_x, grad, sums
    of_other = (other_statistics, other_weight, other_bias)
    other = other.contiguous(memory_format=LAYOUT)
    grad_x, grad_other, _, sums = batch_norm_sum_triton.backward(grads, y, x, affine, other, of_other)
    assert grad_other is not None
    return grad_x, grad_other, sums


@torch.library.register_fake(_gradient_of_sum)
def _(
    grad_y: Tensor,
    grad_through: Tensor | None,
    y: Tensor,
    x: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    other: Tensor | None,
    other_statistics: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), x.new_empty((3, x.shape[1]), dtype=torch.float32)


refuse_gradient(_gradient_of_sum)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
    x, statistics, weight, bias = ctx.saved_tensors
    grad_x, grad_parameters = _gradient(grad_y, x, statistics, weight, bias)
    grad_bias, grad_weight = grad_parameters.unbind()
    return grad_x, None, grad_weight, grad_bias


def _keep_with_result(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    *of_x, other, other_statistics, other_weight, other_bias, through = inputs
    ctx.is_normed, ctx.goes_through = other_statistics is not None, through is not None
    of_other = (other, other_statistics, other_weight, other_bias) if ctx.is_normed else ()
    ctx.save_for_backward(output[0], *of_x, *of_other)
    ctx.set_materialize_grads(False)  # nothing may follow past the last block of a stage


def _differentiate_sum(ctx: Any, grad_y: Tensor | None, grad_through: Tensor | None) -> tuple[Tensor | None, ...]:
    y, *saved = ctx.saved_tensors
    if grad_y is None:
        grad_y, grad_through = grad_through, None
    assert grad_y is not None
    if len(saved) == 4:
        saved += [None] * 4
    grad_x, grad_other, (grad_bias, grad_weight, grad_other_weight) = _gradient_of_sum(grad_y, grad_through, y, *saved)
    of_x = (grad_x, None, grad_weight, grad_bias)
    if ctx.is_normed:
        return *of_x, grad_other, None, grad_other_weight, grad_bias.clone(), None  # no gradient in two places
    if ctx.goes_through:
        return *of_x, None, None, None, None, grad_other
    return *of_x, grad_other, None, None, None, None


torch.library.register_autograd(_relu, _differentiate, setup_context=_keep)
torch.library.register_autograd(_add_relu, _differentiate_sum, setup_context=_keep_with_result)
