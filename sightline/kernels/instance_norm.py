"""Instance normalisation followed by leaky ReLU, as one operation; called by models/unet.py."""

import torch
from torch import Tensor
from torch.nn import functional


def instance_norm_leaky_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """leaky_relu(instance_norm(x) * weight + bias) of (n, C, H, W) or (n, C, D, H, W), in x's type."""
    return reference(x, weight, bias, eps, slope)


def applies(x: Tensor) -> bool:
    """Whether a kernel stands in for the reference."""
    return False


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float, slope: float) -> Tensor:
    """The same as torch says it; statistics in fp32 also where x is in half precision."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = functional.instance_norm(x.to(wide), weight=weight.to(wide), bias=bias.to(wide), eps=eps)
    return functional.leaky_relu(normed, slope).to(x.dtype)
