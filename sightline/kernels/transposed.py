"""Transposed convolutions whose stride is their kernel, 2x2, as one matrix product; called by models/unet.py.

Each input pixel makes four outputs of its own. All five of a U-Net of 192 x 160 (batch 64, bf16) take 243 us forward
and 320 us backward by cuDNN on the H200, 136 and 251 us as products. A compiler makes the order of the outputs, and of
their gradients, a part of the concatenation that follows.
"""

import torch
from torch import Tensor, nn

from sightline.kernels.narrow import is_compiled_half


def applies(conv: nn.Module, x: Tensor) -> bool:
    """Return whether to use it: in a compiled step, in channels_last, not by a subclass that is kept in fp32."""
    is_square = type(conv) is nn.ConvTranspose2d and conv.kernel_size == conv.stride == (2, 2)
    return is_square and is_compiled_half(x) and x.is_contiguous(memory_format=torch.channels_last)


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """Return conv(x)."""
    if not applies(conv, x):
        return conv(x)
    assert isinstance(conv, nn.ConvTranspose2d)
    return multiplied(conv, x)


def multiplied(conv: nn.ConvTranspose2d, x: Tensor) -> Tensor:
    """Return conv(x) by a product of pixels (batch * height * width, channels) with (channels, 2 * 2 * outputs)."""
    batch, channels, height, width = x.shape
    taps = conv.weight.permute(0, 2, 3, 1).reshape(channels, -1).to(x.dtype)  # (channels, row, column, outputs)
    found = x.permute(0, 2, 3, 1).reshape(-1, channels) @ taps
    blocks = found.view(batch, height, width, 2, 2, -1).permute(0, 1, 3, 2, 4, 5)
    y = blocks.reshape(batch, 2 * height, 2 * width, -1).permute(0, 3, 1, 2)
    return y if conv.bias is None else y + conv.bias.to(y.dtype)[:, None, None]
