"""Batch norm, ReLU and 3x3 max-pool of stride 2 after the first convolution, in training; called by models/resnet.py.

The largest tensor of the network: plain torch writes and reads it for each of the three, and its max-pool keeps eight
bytes of index per output. The kernels of stem_tail_triton.py read it three times, forward and backward together, and
write its gradient.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.kernels import batch_norm
from sightline.kernels.batch_norm import LAYOUT, OPTIONS
from sightline.kernels.operation import operation, refuse_gradient

MOST = 1 << 31  # the kernels index an image with 32 bits


def applies(x: Tensor, norm: nn.BatchNorm2d) -> bool:
    """Return whether the kernels can run: where those of batch norm can, on images that are not huge."""
    return batch_norm.applies(x, norm) and x[0].numel() < MOST


def norm_relu_pool(x: Tensor, norm: nn.BatchNorm2d, top: int, left: int) -> Tensor:
    """Return the 3x3 max-pool, stride 2, of relu(norm(x)), where the kernels apply.

    `top` and `left` are the padding before, 0 or 1. The output has half the height and width, rounded up.
    """
    return _operation(x, batch_norm.take_statistics(x, norm), norm.weight, norm.bias, top, left)[0]


def reference(x: Tensor, norm: nn.BatchNorm2d, top: int, left: int) -> Tensor:
    """Compute the same in plain torch. It pads with -inf, which never wins."""
    ends_early = not (top and left)  # without padding before, the last window of an even size hangs over the end
    return functional.max_pool2d(functional.relu(norm(x)), 3, 2, padding=(top, left), ceil_mode=ends_early)


@operation("norm_relu_pool", **OPTIONS)
def _operation(
    x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, top: int, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    from sightline.kernels import stem_tail_triton

    x = x.contiguous(memory_format=LAYOUT)
    return stem_tail_triton.forward(x, (statistics, weight, bias), top, left)


@torch.library.register_fake(_operation)
def _(
    x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, top: int, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1], (x.shape[2] + 1) // 2, (x.shape[3] + 1) // 2)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAYOUT)
    return y, torch.empty_like(y), torch.empty_like(y, dtype=torch.uint8)


@operation("norm_relu_pool_backward", **OPTIONS)
def _gradient(
    grad_y: Tensor,
    x: Tensor,
    winners: Tensor,
    places: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    top: int,
    left: int,
) -> tuple[Tensor, Tensor]:
    from sightline.kernels import stem_tail_triton

    grad_y, x = grad_y.contiguous(memory_format=LAYOUT), x.contiguous(memory_format=LAYOUT)
    winners, places = winners.contiguous(memory_format=LAYOUT), places.contiguous(memory_format=LAYOUT)
    return stem_tail_triton.backward(grad_y, x, winners, places, (statistics, weight, bias), top, left)


@torch.library.register_fake(_gradient)
def _(
    grad_y: Tensor,
    x: Tensor,
    winners: Tensor,
    places: Tensor,
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    top: int,
    left: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


refuse_gradient(_gradient)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, statistics, weight, bias, ctx.top, ctx.left = inputs
    _, winners, places = output
    ctx.save_for_backward(x, winners, places, statistics, weight, bias)
    ctx.mark_non_differentiable(winners, places)
    ctx.set_materialize_grads(False)  # they have no gradient: do not fill zeros for it


def _differentiate(ctx: Any, grad_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grad_x, grad_parameters = _gradient(grad_y, *ctx.saved_tensors, ctx.top, ctx.left)
    grad_bias, grad_weight = grad_parameters.unbind()
    return grad_x, None, grad_weight, grad_bias, None, None


torch.library.register_autograd(_operation, _differentiate, setup_context=_keep)
