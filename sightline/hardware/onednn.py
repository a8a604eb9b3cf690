"""Avoid oneDNN's issue 6035: on CPUs the weight gradient of some convolutions is written past the end of its memory.

The engine calls `avoid` where a model is placed on a CPU; migrate, which replaces conv2d, has a copy of the rule.
The rule, what is left, and how to remove this file one day: docs/why/reliability.md.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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


def avoid(model: nn.Module) -> int:
    """Let affected convolutions of `model` drop pixels before they convolve; return how many may be affected.

    Modules stay the objects that they are, and so do names, parameters, and the methods of their own classes.
    """
    found = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d) and _may_be_affected(layer)]
    made: dict[type[nn.Conv2d], Any] = {}
    for layer in found:
        kind = type(layer)
        if kind not in made:
            bases = (_UnitStride,) if kind is nn.Conv2d else (kind, _UnitStride)
            # The name stays too: what is chosen by the name of a type, e.g. to be kept in fp32, is chosen as before.
            made[kind] = type(kind.__name__, bases, {"__module__": kind.__module__})
        layer.__class__ = made[kind]
    return len(found)


def _may_be_affected(layer: nn.Conv2d) -> bool:
    shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
    return _is_narrow(shape, layer.stride, layer.padding, layer.groups) and not isinstance(layer, _UnitStride)


class _UnitStride(nn.Conv2d):
    """Comes right before nn.Conv2d among the bases of a class, whose own methods then still come first."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_affected(input, weight, self.stride, self.padding, self.groups):
            return super()._conv_forward(input, weight, bias)
        return functional.conv2d(subsampled(input, self.stride), weight, bias)


def subsampled(input: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the pixels that a 1x1 convolution with `stride` reads."""
    return input[..., :: stride[0], :: stride[1]]


def probe() -> None:
    """End this process with 0 if a gradient that oneDNN would spoil is right; otherwise with 1, a signal, or never.

    For a process of its own: what is written lies megabytes behind the memory that it was meant for.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # where glibc says what it found
    torch.manual_seed(0)
    last = torch.channels_last
    images, outer = torch.randn(2, 4, 512, 512).to(memory_format=last), torch.randn(2, 8, 256, 256)
    weight = torch.randn(8, 4, 1, 1).to(memory_format=last).requires_grad_()
    functional.conv2d(images, weight, stride=2).backward(outer.to(memory_format=last))
    expected = torch.einsum("nihw,nohw->oi", subsampled(images, (2, 2)).double(), outer.double())
    assert weight.grad is not None
    is_right = torch.allclose(weight.grad[..., 0, 0].double(), expected, rtol=1e-3, atol=1e-2)
    sys.exit(0 if is_right else 1)
