"""Let the bottlenecks of a network that trains run fused, after a check against float64; called by engine/model.py.

The check runs blocks of the network through the operation, in its precision, with random numbers of its own, so that a
run's stay as they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline import kernels
from sightline.kernels import bottleneck, bottleneck_steps, cudnn, self_check
from sightline.kernels.ahead import compile_ahead
from sightline.kernels.bottleneck import Fusable
from sightline.kernels.self_check import Case, Draw, Limits

HAS_TRITON = find_spec("triton") is not None
# Images, height and width. Like those of a training step the rows are a multiple of 16, for which Triton compiles code
# of its own, but they do not fill the last chunk, and there are more chunks than are joined at once.
SIZE = (16, 25, 29)
# Four times the errors of plain fp16 on the same numbers (on a CPU: 5e-4, 6e-4, 1.8e-3). Statistics follow the scale
# that the next convolution reads in fp16, which moves them by up to 2e-4 here.
LIMITS = Limits(2e-3, 3e-3, 8e-3, 1e-3)


def choose(model: nn.Module, precision: str, deterministic: bool, channels_last: bool) -> str:
    """Let the bottlenecks of a network that trains run fused where they can; return a note for the user."""
    blocks = [module for module in model.modules() if isinstance(module, Fusable)]
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # Nobody expects them elsewhere, so nothing is said there.
    if not (blocks and kernels.are_allowed() and precision == "fp16" and place.type == "cuda"):
        return ""
    return decide(place, blocks, SIZE, _why_not(blocks, place.index, deterministic, channels_last))


def _why_not(blocks: list[Fusable], index: int | None, deterministic: bool, channels_last: bool) -> str:
    if deterministic:
        return "--train.deterministic needs equal bits, which their engines do not promise"
    if not channels_last:
        return "they need --run.channels-last"
    if not HAS_TRITON:
        return "Triton is not installed"
    return cudnn.unavailable_because(index) or next(filter(None, map(bottleneck.why_not_fusable, blocks)), "")


def decide(device: torch.device, blocks: Sequence[Fusable], size: tuple[int, int, int], reason: str = "") -> str:
    """Let blocks run fused on a device if no reason speaks against it and the operation is right there; return a note
    for the user."""
    if not reason:
        kinds = kinds_of(blocks)
        what = f"bottlenecks {', '.join(map(_name, kinds))} in float16 of {size}"
        reason = self_check.why_not(what, device, lambda: why_wrong(device, kinds, size))
    for block in blocks:
        block.is_fused = not reason
    if reason:
        return self_check.say_plain("bottlenecks run", reason)
    return (
        f"kernels: {len(blocks)} bottlenecks run fused, by cuDNN {torch.backends.cudnn.version()}; docs/why/kernels.md"
    )


def kinds_of(blocks: Sequence[Fusable]) -> list[Fusable]:
    """Return the smallest block for each kind of shortcut and stride, and for each way of tiling an inner width."""
    found: list[Fusable] = []
    seen: set[object] = set()
    for block in sorted(blocks, key=lambda block: block.conv3.out_channels * block.conv1.in_channels):
        width = math.gcd(block.conv1.out_channels, bottleneck_steps.WIDEST)
        kinds = {(block.downsample is None, block.conv2.stride), width}
        if not kinds <= seen:
            found.append(block)
            seen |= kinds
    return found


def _name(block: Fusable) -> str:
    channels = f"{block.conv1.in_channels}>{block.conv1.out_channels}>{block.conv3.out_channels}"
    return f"{channels}/{block.conv2.stride[0]}{'' if block.downsample is None else ' with a projection'}"


def why_wrong(device: torch.device, blocks: Sequence[Fusable], size: tuple[int, int, int]) -> str:
    """Return what the operation computes wrongly in blocks like these; "" if nothing.

    Also without engines: where one is not the faster, a pass of ours takes its place, and another shape has another
    winner.
    """
    draw = Draw(device, torch.float16)
    cases = [_case(block, draw, size) for block in blocks]
    with bottleneck_steps.without_engines():  # a choice of engines depends on what kernels compute
        compile_ahead([case.rehearse for case in cases], device)
    for case in cases:
        for engines in (bottleneck_steps.first_engines(), bottleneck_steps.without_engines()):
            with engines:
                if wrong := case.why_wrong(LIMITS):
                    return f"{case.name}: {wrong}"
    return ""


def _case(block: Fusable, draw: Draw, size: tuple[int, int, int]) -> Case:
    images, height, width = size
    block = copy.deepcopy(block).requires_grad_().train()
    x = draw.normal((images, block.conv1.in_channels, height, width), 0.0).relu_()
    y = _fill(block, draw, x)

    def ours(x: Tensor, block: Fusable) -> tuple[Tensor]:
        with torch.autocast(x.device.type, x.dtype):
            return (bottleneck.run(block, x),)

    return Case(
        f"a block {_name(block)}", ours, lambda x, block: (block(x),), [x], [block], [draw.normal(y.shape, 0.5)]
    )


@torch.no_grad()
def _fill(block: Fusable, draw: Draw, x: Tensor) -> Tensor:
    """Draw all parameters, and return the output of the block in float64.

    No value lies so close to a ReLU's bend that fp16 sees it on the other side: biases put the bend into a gap.
    """
    convs, norms = block.layers()

    def normed(number: int, x: Tensor) -> Tensor:
        conv, norm = convs[number], norms[number]
        weight = draw.normal(conv.weight.shape, 0.0) * (2 / conv.weight[0].numel()) ** 0.5  # rounded: float64 sees it
        conv.weight.copy_(weight)
        norm.weight.copy_(torch.rand(norm.num_features, generator=draw.generator) + 0.5)
        norm.weight[::3] *= -1
        y = functional.conv2d(x, weight.double(), None, conv.stride, conv.padding)
        return functional.batch_norm(y, None, None, norm.weight.double(), None, True, 0.0, norm.eps)

    wide = x.double()
    shortcut = wide if block.downsample is None else normed(3, wide)
    for number in range(3):
        wide = normed(number, wide) + (shortcut if number == 2 else 0)
        norms[number].bias.copy_(-_middle_of_gap(wide))
        wide = torch.relu(wide + norms[number].bias.view(1, -1, 1, 1))
    return wide


def _middle_of_gap(x: Tensor) -> Tensor:
    """Return the middle of the widest gap between values of each channel, leaving out a hundredth at both ends."""
    ordered = x.transpose(0, 1).flatten(1).sort(1).values
    few = ordered.shape[1] // 100
    inner = ordered[:, few : ordered.shape[1] - few]
    at = inner.diff(dim=1).argmax(1, keepdim=True)
    return (inner.gather(1, at) + inner.gather(1, at + 1))[:, 0] / 2
