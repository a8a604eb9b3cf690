"""Check the kernels of batch norm and of the stem's tail against float64 before a network that trains uses them.

Called by engine/model.py. The check runs what the network will run: its precision, its tiles, its paddings; with random
numbers of its own, so that a run's stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline import kernels
from sightline.kernels import batch_norm, self_check, stem_tail
from sightline.kernels.ahead import compile_ahead
from sightline.kernels.batch_norm import HAS_TRITON
from sightline.kernels.self_check import OF_NORMS, PRECISIONS, Case, Draw

# Images, height and width. Like those of a training step the rows are a multiple of 16, for which Triton compiles code
# of its own, but fill neither the last tile nor the last chunk; the first size has more chunks than are joined at once.
SIZES = ((3, 111, 112), (1, 9, 16))
# Height, width, rows and columns of padding before: of ResNet-50 at 224 pixels, with tiles that are not full, and
# TensorFlow's SAME.
POOLS = ((112, 112, 1, 1), (37, 50, 1, 1))
SAME_POOLS = ((38, 50, 0, 0), (37, 50, 1, 0), (38, 49, 0, 1))


def choose(model: nn.Module, precision: str, channels_last: bool, batch: int, size: Sequence[int]) -> str:
    """Let batch norms that train run by the kernels if these are right here; return a note for the user if not.

    `batch` images of `size` are the largest input, which may be too small for the kernels in all layers.
    """
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    can_run = HAS_TRITON and channels_last and place.type == "cuda" and precision in PRECISIONS
    if not (norms and can_run and kernels.are_allowed() and not kernels.must_repeat()):
        return ""
    widest = max(norm.num_features for norm in norms)
    if batch * math.prod(size) * widest < batch_norm.LEAST:
        return ""
    channels = kinds_of([norm.num_features for norm in norms])
    pools = POOLS if any(type(module) is nn.MaxPool2d for module in model.modules()) else (*POOLS, *SAME_POOLS)
    return decide(place, PRECISIONS[precision], channels, SIZES, pools)


def decide(
    device: torch.device,
    dtype: torch.dtype,
    channels: Sequence[int],
    sizes: Sequence[tuple[int, int, int]],
    pools: Sequence[tuple[int, int, int, int]],
) -> str:
    """Let the kernels run on a device in a precision if they are right there, else in no case; return a note if not."""
    what = f"batch norm in {_name(dtype)}, {channels} channels, sizes {sizes}, pools {pools}"
    if reason := self_check.why_not(what, device, lambda: why_wrong(device, dtype, channels, sizes, pools)):
        batch_norm.turn_off()
        return self_check.say_plain("batch norm runs", reason)
    batch_norm.trust(device, dtype)
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kinds_of(channels: Sequence[int]) -> tuple[int, ...]:
    """Return the smallest number of channels for each way in which the kernels are compiled for some."""
    from sightline.kernels.batch_norm_triton import WIDE, choose_tiling

    smallest: dict[object, int] = {}
    for count in sorted(set(channels)):
        blocks = choose_tiling(1, count).channels, choose_tiling(1, count, widest=WIDE).channels
        smallest.setdefault((blocks, count % blocks[0] == 0, count % 16 == 0), count)
    return tuple(smallest.values())


def why_wrong(
    device: torch.device,
    dtype: torch.dtype,
    channels: Sequence[int],
    sizes: Sequence[tuple[int, int, int]],
    pools: Sequence[tuple[int, int, int, int]],
) -> str:
    """Return what the kernels compute wrongly; "" if nothing. The first channels have the first size, and the pools."""
    draw = _Draw(device, dtype)
    cases: list[tuple[int, Case]] = []
    for number, count in enumerate(channels):
        images, height, width = sizes[min(number, len(sizes) - 1)]
        cases += [(count, case) for case in _norm_cases(draw, (images, count, height, width))]
        if number == 0:
            cases += [(count, _pool_case(draw, (2, count, *pool[:2]), *pool[2:])) for pool in pools]
    compile_ahead([case.rehearse for _, case in cases], device)
    for count, case in cases:
        if wrong := case.why_wrong(OF_NORMS[dtype]):
            return f"{case.name} of {count} channels in {_name(dtype)}: {wrong}"
    return ""


class _Draw(Draw):
    def distinct(self, shape: tuple[int, int, int, int]) -> Tensor:
        """Return numbers of which no two in a 3x3 window are equal, in any precision: float64 pools the same."""
        images, channels, height, width = shape
        levels = torch.rand((images, channels, 9), generator=self.generator).argsort(2)
        at = torch.arange(height)[:, None] % 3 * 3 + torch.arange(width) % 3
        return self.laid(levels[:, :, at] * 0.5 - 2 + torch.rand(shape, generator=self.generator) * 0.4)

    def norm(self, channels: int) -> nn.BatchNorm2d:
        """Return a batch norm with random parameters, some of them negative, and running statistics."""
        norm = nn.BatchNorm2d(channels, momentum=0.3)
        with torch.no_grad():
            for values in (norm.weight, norm.bias, norm.running_mean):
                assert values is not None
                values.copy_(torch.randn(channels, generator=self.generator))
        return norm.to(self.device)


def _norm_cases(draw: _Draw, shape: tuple[int, int, int, int]) -> list[Case]:
    x, other, outer, second = (draw.normal(shape, mean) for mean in (1.0, 0.0, 0.5, 0.25))
    relu = functional.relu

    def linked(x: Tensor, through: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, ...]:
        return batch_norm.run_norm_add_relu(x, norm, other, through=through)

    def linked_plainly(x: Tensor, shortcut: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, ...]:
        y = relu(norm(x) + shortcut)
        return y, y

    def make(name: str, ours: Callable[..., tuple[Tensor, ...]], plain: Callable[..., tuple[Tensor, ...]]) -> Case:
        norms: list[nn.Module] = [draw.norm(shape[1]) for _ in range(2 if name.endswith("projection") else 1)]
        return Case(name, ours, plain, [x] if name == "norm + ReLU" else [x, other], norms, [outer])

    return [
        make("norm + ReLU", lambda x, a: (batch_norm.run_norm_relu(x, a),), lambda x, a: (relu(a(x)),)),
        make(
            "norm + shortcut + ReLU",
            lambda x, other, a: batch_norm.run_norm_add_relu(x, a, other)[:1],
            lambda x, other, a: (relu(a(x) + other),),
        ),
        make(
            "norm + shortcut + ReLU with a projection",
            lambda x, other, a, b: batch_norm.run_norm_add_relu(x, a, other, b)[:1],
            lambda x, other, a, b: (relu(a(x) + b(other)),),
        ),
        # The shortcut comes as `through`, and y's gradient by both ways.
        make("norm + shortcut + ReLU between blocks", linked, linked_plainly)._replace(outers=[outer, second]),
    ]


def _pool_case(draw: _Draw, shape: tuple[int, int, int, int], top: int, left: int) -> Case:
    x, norm = draw.distinct(shape), draw.norm(shape[1])
    outer = draw.normal((*shape[:2], -(-shape[2] // 2), -(-shape[3] // 2)), 0.5)
    return Case(
        f"the stem's tail, padded by {top} and {left},",
        lambda x, norm: (stem_tail.norm_relu_pool(x, norm, top, left),),
        lambda x, norm: (stem_tail.reference(x, norm, top, left),),
        [x],
        [norm],
        [outer],
    )
