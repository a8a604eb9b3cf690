"""The Triton kernels of instance norm as Triton's interpreter runs them on the CPU, against float64.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import pytest
import torch
from torch import Tensor

from sightline.kernels import instance_norm, instance_norm_once_triton, instance_norm_triton
from sightline.kernels.instance_norm_once_triton import Sizes
from sightline.kernels.instance_norm_triton import Tiling

EPS, SLOPE = 1e-5, 0.01
# Odd sizes, channels that fill no block and several, three dimensions. A chunk more than 16 takes a second round of
# joining. An interpreted program takes milliseconds: every chunk of 8 pixels and block of channels is one.
SHAPES = [(2, 3, 5, 7), (1, 24, 9, 4), (1, 33, 6, 5), (1, 128, 3, 2), (2, 5, 3, 4, 2), (1, 2, 17, 8)]
SLOW = pytest.mark.slow
SMALL = (1, 3, 5, 4)  # three chunks, the last one of them half full
TILINGS = {
    "whole": lambda rows: None,  # all shapes here are small
    "chunks": lambda rows: Tiling(32, 4, 2, -(-rows // 8), 4),
    "one chunk": lambda rows: Tiling(256, 16, -(-rows // 16), 1, 4),
    "once": lambda rows: Sizes(32, 4, 2, -(-rows // 8), 4),
}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=instance_norm.LAYOUTS[x.dim()])


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(shape))
    x, outer = channels_last(torch.randn(shape).to(dtype)), channels_last(torch.randn(shape).to(dtype))
    return x, torch.rand(shape[1]) + 0.5, torch.randn(shape[1]), outer


def exact(x: Tensor, weight: Tensor, bias: Tensor, outer: Tensor) -> tuple[Tensor, ...]:
    """Result and gradients of x, weight and bias in float64."""
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = instance_norm.reference(*leaves, EPS, SLOPE)
    return (y.detach(), *torch.autograd.grad(y, leaves, outer.double()))


def launched(
    x: Tensor, weight: Tensor, bias: Tensor, outer: Tensor, tiling: Tiling | Sizes | None
) -> tuple[Tensor, ...]:
    """Programs that wait for each other would wait forever where one runs after the other: two launches instead."""
    if isinstance(tiling, Sizes):
        y, statistics = instance_norm_once_triton.forward(x, weight, bias, EPS, SLOPE, tiling, is_together=False)
        inner, sums = instance_norm_once_triton.backward(
            outer, x, weight, bias, statistics, SLOPE, tiling, is_together=False
        )
        return y, inner, *sums.sum(1).flip(0)
    y, statistics = instance_norm_triton.forward(x, weight, bias, EPS, SLOPE, tiling)
    inner, sums = instance_norm_triton.backward(outer, x, weight, bias, statistics, SLOPE, tiling)
    return y, inner, *sums.sum(1).flip(0)  # sums are those of bias and weight


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], rtol: float, atol: float) -> None:
    for name, ours, theirs in zip(("result", "of x", "of weight", "of bias"), found, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


# By default one shape of each number of dimensions, and in chunks the one with a second round.
BY_DEFAULT = {"whole": [(2, 3, 5, 7)], "chunks": [(2, 5, 3, 4, 2), (1, 2, 17, 8)], "one chunk": [(2, 3, 5, 7)]}
BY_DEFAULT |= {"once": [(2, 5, 3, 4, 2)]}


@pytest.mark.parametrize(
    ("shape", "tiling_for"),
    [
        pytest.param(
            shape,
            tiling_for,
            id=f"{shape}-{name}",
            marks=() if shape in BY_DEFAULT[name] else pytest.mark.slow,
        )
        for shape in SHAPES
        for name, tiling_for in TILINGS.items()
    ],
)
def test_values_and_gradients_are_those_of_float64(shape, tiling_for):
    given = draw(shape)
    found = launched(*given, tiling_for(given[0][0, 0].numel()))
    assert found[0].is_contiguous(memory_format=instance_norm.LAYOUTS[len(shape)])
    assert found[1].is_contiguous(memory_format=instance_norm.LAYOUTS[len(shape)])
    compare(found, exact(*given), 1e-5, 2e-5)


@pytest.mark.parametrize(
    "tiling_for",
    [
        pytest.param(tiling, id=name, marks=() if name in ("chunks", "once") else SLOW)
        for name, tiling in TILINGS.items()
    ],
)
def test_a_large_mean_costs_no_digits(tiling_for):
    """E[x^2] - E[x]^2 in fp32 would leave nothing of a deviation of 1 beside 1000, nor would sums around an outlier."""
    x, weight, bias, outer = draw(SMALL)
    x += 1000
    x[:, :, 0, 0] -= 1000
    x[:, 1, 0, 0] += 1000
    found = launched(x, weight, bias, outer, tiling_for(20))
    compare(found, exact(x, weight, bias, outer), 1e-3, 1e-3)


@pytest.mark.parametrize(
    "tiling_for",
    [pytest.param(TILINGS["whole"], id="whole"), pytest.param(TILINGS["chunks"], id="chunks", marks=SLOW)],
)
def test_a_constant_image_gives_the_bias(tiling_for):
    x, weight, bias, outer = draw(SMALL)
    x.fill_(3.0)
    found = launched(x, weight, bias, outer, tiling_for(20))
    expected = torch.where(bias > 0, bias, bias * SLOPE)[None, :, None, None].expand_as(x)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-6)
    compare(found, exact(x, weight, bias, outer), 1e-5, 1e-3)  # gradients of x are up to 1 / sqrt(eps) = 316


# Rounded to the nearest: half a unit in the last place. The interpreter cuts bf16 off instead: a whole one.
HALVES = {"bf16": (torch.bfloat16, 2**-7), "fp16": (torch.float16, 2**-11)}


@pytest.mark.parametrize(
    ("tiling", "half"),
    [
        ("whole", "bf16"),
        ("chunks", "fp16"),
        pytest.param("whole", "fp16", marks=SLOW),
        pytest.param("chunks", "bf16", marks=SLOW),
    ],
)
def test_half_precision_is_rounded_once(tiling, half):
    tiling_for, (dtype, error) = TILINGS[tiling], HALVES[half]
    given = draw(SMALL, dtype)
    found = launched(*given, tiling_for(20))
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32]
    expected = exact(*given)
    compare(found[:2] + expected[2:], expected, error, 1e-5)
    compare(expected[:2] + found[2:], expected, 1e-5, 2e-5)


def test_any_slope():
    x, weight, bias, outer = draw((1, 4, 5, 5))
    for slope in (0.0, 0.2, 1.0):
        y, statistics = instance_norm_triton.forward(x, weight, bias, EPS, slope)
        inner, _ = instance_norm_triton.backward(outer, x, weight, bias, statistics, slope)
        wide = x.double().requires_grad_()
        expected = instance_norm.reference(wide, weight, bias, EPS, slope)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            inner.double(), torch.autograd.grad(expected, wide, outer.double())[0], rtol=1e-5, atol=1e-5
        )


def parameters(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.slow  # two seconds; the compiled step below takes the operation through the same registration
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 5, 3, 4, 5)], ids=str)
def test_the_operation_is_registered_as_torch_wants_it(shape):
    """Schema, fake result with its strides, autograd and compilation, checked by torch itself."""
    x, weight, bias, outer = draw(shape)
    torch.library.opcheck(instance_norm._operation, (x.requires_grad_(), *parameters(weight, bias), EPS, SLOPE))
    statistics = torch.rand(2, *shape[:2])
    torch.library.opcheck(instance_norm._gradient, (outer, x.detach(), weight.detach(), bias.detach(), statistics, 0.1))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)], ids=["eager", "compiled"])
def test_autograd_takes_the_operation_as_one_and_keeps_the_layout(compiled):
    x, weight, bias, outer = draw((2, 3, 5, 7), torch.bfloat16)
    step = instance_norm._operation
    if compiled:
        backend = "aot_eager_default_partitioner"
        step = torch.compile(lambda *given: instance_norm._operation(*given), fullgraph=True, backend=backend)
    leaves = (x.requires_grad_(), *parameters(weight, bias))
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = step(*leaves, EPS, SLOPE)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(y, leaves, outer.contiguous())  # gradients may come in any layout
    assert found[0].dtype == torch.bfloat16 and found[0].is_contiguous(memory_format=torch.channels_last)
    assert [t.dtype for t in found[1:]] == [torch.float32, torch.float32]
    compare((y.detach(), *found), exact(x, weight, bias, outer), 2**-7, 1e-4)


def test_second_derivatives_are_refused():
    x, weight, bias, outer = draw((2, 3, 5, 7))
    y, _ = instance_norm._operation(x.requires_grad_(), weight, bias, EPS, SLOPE)
    (inner,) = torch.autograd.grad(y, x, outer, create_graph=True)
    with pytest.raises(RuntimeError, match="instance_norm_leaky_relu_backward"):
        inner.sum().backward()
