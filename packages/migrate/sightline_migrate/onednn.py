"""Which convolutions oneDNN's issue 6035 spoils on CPUs: a copy of what sightline/hardware/onednn.py has for it.

Copied because this package needs torch alone; a test holds both equal. The rule: docs/why/reliability.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ISSUE = "https://github.com/uxlfoundation/oneDNN/issues/6035"
BLOCK = 16  # input channels oneDNN handles at once with AVX-512; with AVX2 it is 8, and fewer layers are affected


def is_affected(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int] | str, groups: int
) -> bool:
    """Return whether oneDNN may write too far in the weight gradient of such a convolution.

    oneDNN copies the pixels that a stride leaves into a workspace with room for the channels that there are, and fills
    it as if there were a whole block of them. It does so only where the stride divides the size.
    """
    return (
        _is_narrow(weight.shape, stride, padding, groups)
        and input.shape[-2] % stride[0] == 0
        and input.shape[-1] % stride[1] == 0
        # A compiler chooses layouts by itself, and later.
        and (torch.compiler.is_compiling() or _is_channels_last(input) or _is_channels_last(weight))
    )


def _is_narrow(weight: Sequence[int], stride: Sequence[int], padding: Sequence[int] | str, groups: int) -> bool:
    return (
        groups == 1
        and weight[1] < BLOCK
        and tuple(weight[2:]) == (1, 1)
        and tuple(stride) != (1, 1)
        and (padding == "valid" or tuple(padding) == (0, 0))
    )


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether a tensor is channels_last; if input or weight is, torch brings both into this layout."""
    return tensor.layout == torch.strided and tensor.stride(-3) * tensor.shape[-3] <= tensor.stride(-1)


def subsampled(input: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the pixels that a 1x1 convolution with `stride` reads."""
    return input[..., :: stride[0], :: stride[1]]
