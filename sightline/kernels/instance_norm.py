"""Instance normalisation followed by leaky ReLU, as one operation; called by models/unet.py.

nn.InstanceNorm2d copies channels_last images to another layout and back: a third of all bytes that a U-Net step moves.
The kernels of instance_norm_triton.py read and write channels_last directly. For backward they keep only x and two
numbers per image and channel. torch.compile sees one operation and its gradient.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sightline import kernels
from sightline.kernels.operation import operation, refuse_gradient

HAS_TRITON = find_spec("triton") is not None

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_trusted: tuple[tuple[int | None, torch.dtype], ...] = ()  # devices by index, with precisions
_is_off = False


def trust(device: torch.device, dtype: torch.dtype) -> None:
    """Let the kernels that read once run on a device in a precision: instance_norm_check.py has found them right."""
    global _trusted
    _trusted = (*_trusted, (device.index, dtype))


def turn_off() -> None:
    """Keep all kernels of instance norm out of this process from now on."""
    global _is_off
    _is_off = True


def instance_norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """Return leaky_relu(instance_norm(x) * weight + bias) of x (n, C, H, W) or (n, C, D, H, W), in x's dtype."""
    if applies(x):
        return _operation(x, weight, bias, eps, slope)[0]
    return reference(x, weight, bias, eps, slope)


def applies(x: Tensor) -> bool:
    """Return whether the kernels can run: CUDA, channels_last, more than one pixel per image."""
    is_wanted = HAS_TRITON and kernels.may_compile() and not _is_off
    if not (is_wanted and x.is_cuda and x.dtype in DTYPES and x.dim() in LAYOUTS and x.numel() > 0):
        return False
    pixels = x.numel() // (x.shape[0] * x.shape[1])
    is_size_valid = pixels > 1 and pixels * x.shape[1] < 1 << 31  # the kernels index an image with 32 bits
    return is_size_valid and x.is_contiguous(memory_format=LAYOUTS[x.dim()])


def run_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> tuple[Tensor, Tensor]:
    """Return the result and statistics (2, images, channels), by the kernels that suit the shape."""
    from sightline.kernels import instance_norm_once_triton, instance_norm_triton

    if sizes := _sizes(x, instance_norm_once_triton.FORWARD):
        return instance_norm_once_triton.forward(x, weight, bias, eps, slope, sizes)
    return instance_norm_triton.forward(x, weight, bias, eps, slope)


def run_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of (bias, weight) per image, (2, images, channels)."""
    from sightline.kernels import instance_norm_once_triton, instance_norm_triton

    if sizes := _sizes(x, instance_norm_once_triton.BACKWARD):
        return instance_norm_once_triton.backward(grad_y, x, weight, bias, statistics, slope, sizes)
    return instance_norm_triton.backward(grad_y, x, weight, bias, statistics, slope)


def _sizes(x: Tensor, numbers: tuple[int, int, int, int]) -> Any:
    """Return how to read x once; None if it is read twice."""
    if (x.device.index, x.dtype) not in _trusted:
        return None
    from sightline.kernels import instance_norm_once_triton

    return instance_norm_once_triton.choose_sizes(len(x), x[0, 0].numel(), x.shape[1], numbers)


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """Compute the same in plain torch; statistics are fp32 even if x is in half precision."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = functional.instance_norm(x.to(wide), weight=weight.to(wide), bias=bias.to(wide), eps=eps)
    return functional.leaky_relu(normed, slope).to(x.dtype)


# Registered as torch operations, so that a compiler neither traces into them nor changes the layout of their inputs.
@operation("instance_norm_leaky_relu", tags=(torch.Tag.needs_exact_strides,))
def _operation(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous(memory_format=LAYOUTS[x.dim()])
    return run_forward(x, weight.contiguous(), bias.contiguous(), eps, slope)


@torch.library.register_fake(_operation)
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[0], x.shape[1]), dtype=torch.float32)


@operation("instance_norm_leaky_relu_backward", tags=(torch.Tag.needs_exact_strides,))
def _gradient(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    layout = LAYOUTS[x.dim()]
    grad_y, x = grad_y.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    return run_backward(grad_y, x, weight.contiguous(), bias.contiguous(), statistics, slope)


@torch.library.register_fake(_gradient)
def _(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[0], x.shape[1]), dtype=torch.float32)


refuse_gradient(_gradient)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.slope = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.set_materialize_grads(False)  # the statistics have no gradient: do not fill zeros for it


def _differentiate(ctx: Any, grad_y: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None, None]:
    x, weight, bias, statistics = ctx.saved_tensors
    grad_x, grad_parameters = _gradient(grad_y, x, weight, bias, statistics, ctx.slope)
    grad_bias, grad_weight = grad_parameters.sum(1).unbind()  # here, where a compiler can join it with other work
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None


torch.library.register_autograd(_operation, _differentiate, setup_context=_keep)
