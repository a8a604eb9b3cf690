"""3x3 convolutions with few outputs, computed for two neighbouring pixels at once; called by models/unet.py.

In channels_last two pixels of 32 channels lie in memory as one pixel of 64. cuDNN's kernels make tiles of 64 outputs or
more, so a convolution with 32 leaves half of a tile empty. As one of pairs it fills the tile, with a kernel a third of
which is zeros. No value is copied: input and output are views.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.kernels.narrow import is_compiled_half

MOST_INPUTS, MOST_OUTPUTS = 64, 32
MULTIPLE = 4  # of inputs, so that a pair has 8: in half precision the fast kernels read 16 bytes


def applies(conv: nn.Module, x: Tensor) -> bool:
    """Return whether to use it: in a compiled step, in channels_last, not by a subclass that is kept in fp32."""
    if type(conv) is not nn.Conv2d or conv.groups > 1 or conv.padding_mode != "zeros":
        return False
    is_same_size = conv.kernel_size == (3, 3) and conv.stride == conv.padding == conv.dilation == (1, 1)
    is_small = conv.in_channels <= MOST_INPUTS and conv.out_channels <= MOST_OUTPUTS
    if not (is_same_size and is_small and conv.in_channels % MULTIPLE == 0 and x.shape[3] % 2 == 0):
        return False
    return is_compiled_half(x) and x.is_contiguous(memory_format=torch.channels_last)


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """Return conv(x)."""
    if not applies(conv, x):
        return conv(x)
    assert isinstance(conv, nn.Conv2d)
    return of_pairs(conv, x)


def of_pairs(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Return conv(x) by a convolution of pairs (batch, 2 * channels, height, width / 2)."""
    batch, channels, height, width = x.shape
    pairs = x.permute(0, 2, 3, 1).reshape(batch, height, width // 2, 2 * channels).permute(0, 3, 1, 2)
    # Output 2j + q reads input 2(j + k - 1) + p with column 2k + p - q - 1 of the kernel. With two columns of zeros on
    # either side, these are columns p - q + 1, p - q + 3 and p - q + 5.
    wide = functional.pad(conv.weight, (2, 2))
    rows = [torch.cat([wide[..., p - q + 1 : p - q + 6 : 2] for p in (0, 1)], dim=1) for q in (0, 1)]
    weight = torch.cat(rows).contiguous(memory_format=torch.channels_last)
    found = functional.conv2d(pairs, weight, padding=1)
    y = found.permute(0, 2, 3, 1).reshape(batch, height, width, -1).permute(0, 3, 1, 2)
    return y if conv.bias is None else y + conv.bias.to(y.dtype)[:, None, None]
