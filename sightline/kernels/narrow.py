"""Convolutions whose number of outputs is not a multiple of 8, widened by outputs of zero; called by models/.

In half precision cuDNN's fast kernels need it: for 340 outputs it copies tensors to wider ones or takes slow kernels.
A head of 4 outputs on the H200 (64 x 32 x 192 x 160, bf16): 142 us forward, with 8 outputs 55.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline import kernels

MULTIPLE = 8
HALVES = (torch.bfloat16, torch.float16)


def is_compiled_half(x: Tensor) -> bool:
    """Return whether this is a compiled step on CUDA in half precision; exports are made on the CPU."""
    return kernels.are_allowed() and torch.compiler.is_compiling() and x.is_cuda and x.dtype in HALVES


def applies(conv: nn.Module, x: Tensor) -> bool:
    """Return whether to widen: in a compiled step, where cutting the result costs no pass of its own.

    Subclasses of nn.Conv2d pad otherwise or are kept in fp32, and run as they are.
    """
    is_plain = type(conv) is nn.Conv2d and conv.out_channels % MULTIPLE > 0 and conv.groups == 1
    return is_plain and is_compiled_half(x)


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """Return conv(x)."""
    if not applies(conv, x):
        return conv(x)
    assert isinstance(conv, nn.Conv2d)
    return widened(conv, x)


def widened(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return conv(x), computed with more outputs, which are cut off."""
    missing = -conv.out_channels % MULTIPLE
    weight = functional.pad(conv.weight, (0, 0, 0, 0, 0, 0, 0, missing)).contiguous(memory_format=torch.channels_last)
    assert not isinstance(conv.padding, str)
    found = functional.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation)[:, : conv.out_channels]
    return found if conv.bias is None else found + conv.bias.to(found.dtype)[:, None, None]
