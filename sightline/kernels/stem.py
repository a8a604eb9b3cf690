"""The 7x7 convolution of stride 2 that opens a ResNet, in a form that tensor cores like; called by models/resnet.py.

Three channels leave tensor cores idle: cuDNN pads them to eight and still computes 49 taps, which made the stem a
fourteenth of a ResNet-50 step (batch 256, bf16, H200). Blocks of 2x2 pixels become channels here: a 4x4 convolution
of stride 1 over 16 channels. The same products are summed in another order, so results agree to rounding.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sightline import kernels

SIDE = 8  # the window as it is computed: 7 and a row of zeros, so that it starts at an even pixel
CHANNELS = 4  # 3 and a plane of zeros, so that a block of 2x2 pixels is 16 channels


def applies(pixels: Tensor) -> bool:
    """In half precision on CUDA; elsewhere the plain convolution is as fast, or bits are worth more."""
    sides_are_even = pixels.shape[2] % 2 == 0 and pixels.shape[3] % 2 == 0
    is_half = pixels.dtype in (torch.bfloat16, torch.float16)
    return kernels.are_allowed() and pixels.is_cuda and is_half and pixels.shape[1] <= 4 and sides_are_even


def convolve(pixels: Tensor, weight: Tensor, before: int, bias: Tensor | None = None) -> Tensor:
    """conv2d(pixels, weight, bias, stride=2) of (batch, channels, height, width) with (out, channels, 7, 7).

    `before` rows of zeros come above and left, 2 as TensorFlow's SAME or 3 as torch's padding; as many output pixels
    as half the input's.
    """
    batch, channels, height, width = pixels.shape
    shift = before % 2  # the window starts this many pixels earlier than that of the plain convolution
    front, back = before + shift, SIDE - 2 - before - shift
    # (batch, height + 6, width + 6, CHANNELS): as pixels lie in memory with channels_last, so that this is one pass.
    padded = functional.pad(pixels.permute(0, 2, 3, 1), (0, CHANNELS - channels, front, back, front, back))
    blocks = padded.reshape(batch, height // 2 + 3, 2, width // 2 + 3, 2, CHANNELS).permute(0, 1, 3, 2, 4, 5)
    stacked = blocks.reshape(batch, height // 2 + 3, width // 2 + 3, 4 * CHANNELS).permute(0, 3, 1, 2)
    edge = (shift, 1 - shift)
    taps = functional.pad(weight, (*edge, *edge, 0, CHANNELS - channels))  # (out, CHANNELS, 8, 8)
    taps = taps.reshape(len(weight), CHANNELS, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4)
    taps = taps.reshape(len(weight), 4 * CHANNELS, 4, 4)
    return functional.conv2d(stacked, taps.contiguous(memory_format=torch.channels_last), bias)


def reference(pixels: Tensor, weight: Tensor, before: int) -> Tensor:
    """What `convolve` computes, as torch says it."""
    around = (before, 5 - before)
    return functional.conv2d(functional.pad(pixels, (*around, *around)), weight, stride=2)
