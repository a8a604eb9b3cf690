"""Instance normalisation followed by leaky ReLU, as one operation; called by models/unet.py.

nn.InstanceNorm2d copies channels_last pictures into another layout and back, a third of all bytes that a step of the
U-Net moves. The kernels of instance_norm_triton.py read and write them as they lie, and keep only x and two numbers
per picture and channel for backward. torch.compile sees one operation and its gradient.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sightline import kernels

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    from sightline.kernels import instance_norm_triton

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def instance_norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """leaky_relu(instance_norm(x) * weight + bias) of (n, C, H, W) or (n, C, D, H, W), in x's type."""
    if applies(x):
        return _operation(x, weight, bias, eps, slope)[0]
    return reference(x, weight, bias, eps, slope)


def applies(x: Tensor) -> bool:
    """On CUDA, for pictures that lie in channels_last and have more than one pixel."""
    is_wanted = HAS_TRITON and kernels.are_allowed()
    if not (is_wanted and x.is_cuda and x.dtype in DTYPES and x.dim() in LAYOUTS and x.numel() > 0):
        return False
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    is_held = pixels > 1 and pixels * x.shape[1] < 1 << 31  # the kernels count within a picture in 32 bits
    return is_held and x.is_contiguous(memory_format=LAYOUTS[x.dim()])


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """The same as torch says it; statistics in fp32 also where x is in half precision."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = functional.instance_norm(x.to(wide), weight=weight.to(wide), bias=bias.to(wide), eps=eps)
    return functional.leaky_relu(normed, slope).to(x.dtype)


# Operations of torch's own registry, so that a compiler neither looks inside nor changes the layout they are given.
@torch.library.custom_op("sightline::instance_norm_leaky_relu", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _operation(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=LAYOUTS[x.dim()])
    return instance_norm_triton.forward(x, weight.contiguous(), bias.contiguous(), eps, slope)


@_operation.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[0], x.shape[1]), dtype=torch.float32)


@torch.library.custom_op(
    "sightline::instance_norm_leaky_relu_backward", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def _gradient(
    outer: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    layout = LAYOUTS[x.dim()]
    outer, x = outer.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    return instance_norm_triton.backward(outer, x, weight.contiguous(), bias.contiguous(), statistics, slope)


@_gradient.register_fake
def _(
    outer: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.slope = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.set_materialize_grads(False)  # the statistics are never differentiated: no zeros for them


def _differentiate(ctx: Any, outer: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
    x, weight, bias, statistics = ctx.saved_tensors
    inner, of_parameters = _gradient(outer, x, weight, bias, statistics, ctx.slope)
    of_bias, of_weight = of_parameters.unbind()
    return inner, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None, None


_operation.register_autograd(_differentiate, setup_context=_keep)
