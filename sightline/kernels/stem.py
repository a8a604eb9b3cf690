"""The first convolution of a ResNet, 7x7 with stride 2, in a form that suits tensor cores; called by models/resnet.py.

Three channels leave tensor cores idle: cuDNN pads them to eight and still computes 49 taps, so that the stem took a
fourteenth of a ResNet-50 step (batch 256, bf16, H200). Here 2x2 pixels become 16 channels, and the convolution a 4x4
with stride 1. The same products are summed in another order, so results agree up to rounding.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sightline import kernels

SIDE = 8  # side of the computed window: 7 and a row of zeros, so that it starts at an even pixel
CHANNELS = 4  # 3 and a plane of zeros, so that 2x2 pixels make 16 channels


def applies(pixels: Tensor) -> bool:
    """Return whether to use it: half precision on CUDA. Elsewhere plain torch is as fast, or exact bits matter more."""
    sides_are_even = pixels.shape[2] % 2 == 0 and pixels.shape[3] % 2 == 0
    is_half = pixels.dtype in (torch.bfloat16, torch.float16)
    return kernels.are_allowed() and pixels.is_cuda and is_half and pixels.shape[1] <= 4 and sides_are_even


def convolve(pixels: Tensor, weight: Tensor, before: int, bias: Tensor | None = None) -> Tensor:
    """Return conv2d(pixels, weight, bias, stride=2) of (batch, channels, height, width) with (out, channels, 7, 7).

    `before` is the padding above and left: 2 for TensorFlow's SAME, 3 for torch's. The output has half the input's
    height and width.
    """
    batch, channels, height, width = pixels.shape
    shift = before % 2  # the window starts this many pixels before that of the plain convolution
    front, back = before + shift, SIDE - 2 - before - shift
    # (batch, height + 6, width + 6, CHANNELS): the memory order of channels_last, so that this is one pass.
    padded = functional.pad(pixels.permute(0, 2, 3, 1), (0, CHANNELS - channels, front, back, front, back))
    blocks = padded.reshape(batch, height // 2 + 3, 2, width // 2 + 3, 2, CHANNELS).permute(0, 1, 3, 2, 4, 5)
    stacked = blocks.reshape(batch, height // 2 + 3, width // 2 + 3, 4 * CHANNELS).permute(0, 3, 1, 2)
    edge = (shift, 1 - shift)
    taps = functional.pad(weight, (*edge, *edge, 0, CHANNELS - channels))  # (out, CHANNELS, 8, 8)
    taps = taps.reshape(len(weight), CHANNELS, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4)
    taps = taps.reshape(len(weight), 4 * CHANNELS, 4, 4)
    return functional.conv2d(stacked, taps.contiguous(memory_format=torch.channels_last), bias)


def reference(pixels: Tensor, weight: Tensor, before: int) -> Tensor:
    """Compute the same as `convolve` in plain torch."""
    around = (before, SIDE - 3 - before)
    return functional.conv2d(functional.pad(pixels, (*around, *around)), weight, stride=2)
