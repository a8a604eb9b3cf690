"""Check the kernels of instance norm against float64 before a network that trains uses them; called by engine/model.py.

Random numbers of its own, so that a run's stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from sightline import kernels
from sightline.kernels import instance_norm, self_check
from sightline.kernels.ahead import compile_ahead
from sightline.kernels.gradients import gradients
from sightline.kernels.instance_norm import HAS_TRITON
from sightline.kernels.self_check import OF_NORMS, PRECISIONS, Draw

EPS, SLOPE = 1e-5, 0.01
# Images, height and width, per number of channels: held by one program; read once; split finely because there are few
# images, and large enough to be read once with a single channel. Rows are a multiple of 16, for which Triton compiles
# code of its own, and fill no last chunk.
SIZES = ((3, 6, 8), (40, 80, 93), (2, 160, 205))


def choose(model: nn.Module, precision: str, channels_last: bool, shapes: Sequence[tuple[int, ...]] = ()) -> str:
    """Let instance norms run by the kernels if these are right here; return a note for the user if not. Those for
    `shapes`, what norms get in a step, are compiled side by side then: the step would do it one after another."""
    norms = [module for module in model.modules() if isinstance(module, _InstanceNorm)]
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    can_run = HAS_TRITON and channels_last and place.type == "cuda" and precision in PRECISIONS
    if not (norms and can_run and kernels.are_allowed()):
        return ""
    dtype = PRECISIONS[precision]
    note = decide(place, dtype, kinds_of([norm.num_features for norm in norms]), SIZES)
    if shapes and not note:
        compile_ahead([partial(_rehearse, place, dtype, shape) for shape in dict.fromkeys(shapes)], place)
    return note


def _rehearse(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Run the kernels as a step does, on memory as it is."""
    layout = instance_norm.LAYOUTS[len(shape)]
    x = torch.empty(shape, dtype=dtype, device=device, memory_format=layout).requires_grad_()
    weight, bias = (torch.ones(shape[1], device=device, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        y = instance_norm.instance_norm_leaky_relu(x, weight, bias, EPS, SLOPE)
    gradients((y,), (x, weight, bias), (torch.empty_like(y),))


def kinds_of(channels: Sequence[int]) -> tuple[int, ...]:
    """Return few channels for each way in which the kernels are compiled for some.

    Blocks have 64 channels, or 32 with a last one that may not be full. 480 channels in float64 would take gigabytes.
    """
    few = {count if count <= 32 else 64 if count % 64 == 0 else 32 + count % 32 for count in channels}
    return tuple(sorted(few))


def decide(
    device: torch.device, dtype: torch.dtype, channels: Sequence[int], sizes: Sequence[tuple[int, int, int]]
) -> str:
    """Let the kernels run on a device in a precision if they are right there, else in no case; return a note if not."""
    what = f"instance norm in {dtype}, {channels} channels, sizes {sizes}"
    if reason := self_check.why_not(what, device, lambda: why_wrong(device, dtype, channels, sizes)):
        instance_norm.turn_off()
        return self_check.say_plain("instance norm runs", reason)
    from sightline.kernels import instance_norm_once_triton  # imports Triton, which takes a second

    if instance_norm_once_triton.runs_at_once(device):
        instance_norm.trust(device, dtype)
    return ""


def why_wrong(
    device: torch.device, dtype: torch.dtype, channels: Sequence[int], sizes: Sequence[tuple[int, int, int]]
) -> str:
    """Return what the kernels compute wrongly; "" if nothing."""
    from sightline.kernels import instance_norm_once_triton as once
    from sightline.kernels import instance_norm_triton as twice

    draw = Draw(device, dtype)
    is_at_once = once.runs_at_once(device)

    def run(x: Tensor, outer: Tensor, weight: Tensor, bias: Tensor) -> list[tuple[Tensor, ...]]:
        _, count, height, width = x.shape
        # As for a large batch: narrow networks have few programs here, and enough of them in a step.
        given = (once.LEAST_PROGRAMS, height * width, count)
        sizes_of = [once.choose_sizes(*given, numbers) for numbers in (once.FORWARD, once.BACKWARD)]
        y, statistics = twice.forward(x, weight, bias, EPS, SLOPE)
        found: list[tuple[Tensor, ...]] = [(y, *twice.backward(outer, x, weight, bias, statistics, SLOPE))]
        if sizes_of[0] is not None:
            y, statistics = once.forward(x, weight, bias, EPS, SLOPE, sizes_of[0], is_at_once)
        back = (outer, x, weight, bias, statistics, SLOPE)
        if sizes_of[1] is not None:
            found.append((y, *once.backward(*back, sizes_of[1], is_at_once)))
        elif sizes_of[0] is not None:
            found.append((y, *twice.backward(*back)))
        return found

    cases = []
    for count in channels:
        for images, height, width in sizes:
            x, outer = (draw.normal((images, count, height, width), mean) for mean in (3.0, 0.5))
            weight, bias = (torch.randn(count, generator=draw.generator).to(device) for _ in range(2))
            cases.append((x, outer, weight, bias))
    compile_ahead([partial(run, *case) for case in cases], device)
    for x, outer, weight, bias in cases:
        expected = _exact(x, weight, bias, outer)
        with self_check.poisoned_memory():
            found = run(x, outer, weight, bias)
        for ours in found:
            if wrong := self_check.why_wrong(_errors(ours, expected, OF_NORMS[dtype][:3])):
                return f"instance norm of {'x'.join(map(str, x.shape))} in {dtype}: {wrong}"
    return ""


def _exact(x: Tensor, weight: Tensor, bias: Tensor, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, the gradient of x, and those of bias and weight, by float64."""
    with torch.enable_grad():
        leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        y = instance_norm.reference(leaves[0], leaves[1], leaves[2], EPS, SLOPE)
        of_x, of_weight, of_bias = gradients((y,), leaves, (outer.double(),))
    return y.detach(), of_x, torch.stack((of_bias, of_weight))


def _errors(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], limits: tuple[float, ...]
) -> list[tuple[str, float, float]]:
    names = ("the result", "the gradient of the input", "the gradient of the parameters")
    return [
        (name, self_check.relative_error(ours.double(), theirs), limit)
        for name, ours, theirs, limit in zip(names, (*found[:2], found[2].sum(1)), expected, limits, strict=True)
    ]
