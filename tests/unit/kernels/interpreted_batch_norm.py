"""The Triton kernels of batch norm and of the stem's tail in Triton's interpreter on the CPU, against float64.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.kernels import batch_norm, batch_norm_triton, stem_tail, stem_tail_triton
from sightline.kernels.batch_norm_triton import Tiling

# An interpreted program takes milliseconds, so tiles are small here: chunks that are not full, channels that fill no
# block and several.
SHAPES = {
    (2, 3, 5, 7): Tiling(16, 4, 32, 3),
    (1, 24, 9, 4): Tiling(4, 16, 12, 3),
    (3, 33, 4, 3): Tiling(16, 32, 48, 1),
}
# Images, channels, height, width, rows and columns of padding before: torch's, and TensorFlow's SAME.
POOLS = [(1, 3, 6, 5, 1, 1), (2, 5, 3, 3, 1, 1), (1, 2, 4, 2, 0, 0), (1, 3, 5, 6, 1, 0), (1, 3, 4, 5, 0, 1)]
SMALL = stem_tail_triton.Tiling(2, 2, 4, 1)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """Take a CPU tensor for one of CUDA, as the interpreter does."""
    torch.manual_seed(0)
    ours = lambda x: x.dim() == 4 and x.is_contiguous(memory_format=batch_norm.LAYOUT)  # noqa: E731
    monkeypatch.setattr(batch_norm, "is_ours", ours)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype, memory_format=batch_norm.LAYOUT)


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3)
    for values in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(values)
    return norm


def affine_of(x: Tensor, norm: nn.BatchNorm2d, tiling: Tiling | None) -> tuple[Tensor, Tensor, Tensor]:
    given = (norm.running_mean, norm.running_var, norm.momentum, norm.eps)
    return batch_norm_triton.statistics(x, *given, tiling), norm.weight.detach(), norm.bias.detach()


def exact(norm: nn.BatchNorm2d, outer: Tensor, after, x: Tensor) -> list[Tensor]:
    """Result, gradients of x, weight and bias, and running statistics in float64; `norm` is changed."""
    norm.double()
    x = x.double().requires_grad_()
    y = after(norm(x))
    found = torch.autograd.grad(y, (x, norm.weight, norm.bias), outer.double())
    return [y.detach(), *found, norm.running_mean, norm.running_var]


def compare(found: list[Tensor], expected: list[Tensor], rtol: float = 1e-5, atol: float = 2e-5) -> None:
    names = ("result", "of x", "of weight", "of bias", "running mean", "running variance")
    for name, ours, theirs in zip(names, found, expected, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        pytest.param(*each, id=str(each[0]), marks=pytest.mark.slow if at else ())
        for at, each in enumerate(SHAPES.items())
    ],
)
def test_values_gradients_and_running_statistics_are_those_of_float64(shape, tiling, monkeypatch):
    monkeypatch.setattr(batch_norm_triton, "JOINED", (2, 16))  # the chunks take several rounds
    x, outer, norm = draw(*shape) + 3, draw(*shape), make_norm(shape[1])
    expected = exact(copy.deepcopy(norm), outer, functional.relu, x)
    affine = affine_of(x, norm, tiling)
    y = batch_norm_triton.apply(x, affine, tiling)
    inner, (of_bias, of_weight) = batch_norm_triton.backward(outer, x, affine, tiling)
    assert y.stride() == inner.stride() == x.stride()
    compare([y, inner, of_weight, of_bias, norm.running_mean, norm.running_var], expected)


def test_a_large_mean_costs_no_digits():
    """E[x^2] - E[x]^2 in fp32 would leave nothing of a deviation of 1 beside 1000, nor would sums around an outlier."""
    x, norm = draw(1, 3, 5, 4) + 1000, make_norm(3)
    x[:, :, 0, 0] -= 1000
    expected = exact(copy.deepcopy(norm), x, functional.relu, x)
    affine = affine_of(x, norm, Tiling(4, 4, 8, 3))
    compare([batch_norm_triton.apply(x, affine), *expected[1:]], expected, 1e-3, 1e-3)
    torch.testing.assert_close(norm.running_var.double(), expected[-1], rtol=1e-6, atol=0)


def run(function, x: Tensor, *more) -> list[Tensor]:
    """Result, gradients of all that learns, and running statistics of all norms."""
    torch.manual_seed(7)
    tensors = [t for t in (x, *more) if isinstance(t, Tensor)]
    norms = [norm for norm in more if isinstance(norm, nn.Module)]
    leaves = [t.detach().requires_grad_() for t in tensors]
    pairs = iter(leaves)
    y = function(*(next(pairs) if isinstance(t, Tensor) else t for t in (x, *more)))
    learnt = [*leaves, *(parameter for norm in norms for parameter in norm.parameters())]
    outer = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)  # in any layout
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    return [y.detach(), *torch.autograd.grad(y, learnt, outer), *buffers]


def same(function, plain, *given) -> list[Tensor]:
    """Check `function`, which takes the kernels, against `plain` in float64."""
    wide = [copy.deepcopy(each).double() if isinstance(each, nn.Module | Tensor) else each for each in given]
    expected, found = run(plain, *wide), run(function, *given)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=2e-5)
    return found


def test_the_ends_of_blocks_have_the_gradients_of_float64():
    x, other, norm, second = draw(1, 5, 4, 3), draw(1, 5, 4, 3) + 2, make_norm(5), make_norm(5)
    mix = draw(1, 5, 4, 3)
    same(batch_norm.norm_relu, lambda x, norm: norm(x).relu(), x, norm)

    def ours(x: Tensor, first: nn.BatchNorm2d, other: Tensor, second: nn.BatchNorm2d, third: nn.BatchNorm2d) -> Tensor:
        y, through = batch_norm.norm_add_relu(x, first, other, second)  # a projection
        assert through.stride() == (0,) * 4
        z, _ = batch_norm.norm_add_relu(y * mix + mix, third, y, through=through)
        return batch_norm.norm_add_relu(z * mix - mix, second, z)[0]

    def plain(x: Tensor, first: nn.BatchNorm2d, other: Tensor, second: nn.BatchNorm2d, third: nn.BatchNorm2d) -> Tensor:
        y = (first(x) + second(other)).relu()
        z = (third(y * mix + mix) + y).relu()
        return (second(z * mix - mix) + z).relu()

    same(ours, plain, x, norm, other, second, make_norm(5))


def test_a_plain_block_may_follow_one_of_the_kernels():
    """As where --train.fp32-ops names one norm of a stage."""
    x, other, norm, kept = draw(1, 2, 3, 2), draw(1, 2, 3, 2), make_norm(2), make_norm(2)
    kept.__class__ = type("BatchNorm2d", (nn.BatchNorm2d,), {})

    def ours(x: Tensor, norm: nn.BatchNorm2d, other: Tensor, kept: nn.BatchNorm2d) -> Tensor:
        y, through = batch_norm.norm_add_relu(x, norm, other)
        z, nothing = batch_norm.norm_add_relu(y * 2, kept, y, through=through)
        assert through is not None and nothing is None
        return z

    def plain(x: Tensor, norm: nn.BatchNorm2d, other: Tensor, kept: nn.BatchNorm2d) -> Tensor:
        y = (norm(x) + other).relu()
        return (kept(y * 2) + y).relu()

    same(ours, plain, x, norm, other, kept)


# By default rows unlike columns.
@pytest.mark.parametrize(
    ("images", "channels", "height", "width", "top", "left"),
    [pytest.param(*each, marks=() if each == POOLS[3] else pytest.mark.slow) for each in POOLS],
)
def test_the_stems_tail_is_that_of_float64(images, channels, height, width, top, left, monkeypatch):
    monkeypatch.setattr(stem_tail_triton, "make_tiling", lambda channels, sizes: SMALL)
    x, norm = draw(images, channels, height, width), make_norm(channels)
    same(stem_tail.norm_relu_pool, stem_tail.reference, x, norm, top, left)


def test_negative_and_zero_gains_pool_the_right_pixel():
    x, norm = draw(1, 4, 5, 4), make_norm(4)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-1.0, 0.0, 2.0, -0.5]))
        norm.bias.copy_(torch.tensor([0.5, -1.0, -9.0, 0.0]))  # two channels are all zeros after the ReLU
    y, inner, *_ = same(stem_tail.norm_relu_pool, stem_tail.reference, x, norm, 1, 1)
    assert y.any() and not y[:, 1:3].any() and not inner[:, 1:3].any()


# Rounded to the nearest: half a unit in the last place. The interpreter cuts bf16 off instead: a whole one.
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-11)], ids=["bf16", "fp16"])
def test_half_precision_is_rounded_once(dtype, rtol):
    x, norm = draw(1, 5, 6, 4, dtype=dtype), make_norm(5)
    affine = affine_of(x, norm, None)
    y = batch_norm_triton.apply(x, affine)
    wide = functional.batch_norm(x.double(), None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wide.relu().detach(), rtol=rtol, atol=1e-5)
    outer = draw(1, 5, 6, 4, dtype=dtype)
    inner, _ = batch_norm_triton.backward(outer, x, affine)
    leaf = x.double().requires_grad_()
    wide = functional.batch_norm(leaf, None, None, norm.weight.double(), norm.bias.double(), True, 0.0, norm.eps)
    (expected,) = torch.autograd.grad(wide.relu(), leaf, outer.double())
    torch.testing.assert_close(inner.double(), expected, rtol=rtol, atol=1e-5)


def test_what_is_not_finite_stays_so():
    """A NaN that a ReLU or a max-pool hid would let a broken step through."""
    for bad in (float("nan"), float("inf")):
        x, norm = draw(1, 2, 6, 6), make_norm(2)
        x[0, 1, 3, 3] = bad
        for y in (batch_norm.norm_relu(x, norm), stem_tail.norm_relu_pool(x, norm, 1, 1)):
            assert y[:, 1].isnan().all() and y[:, 0].isfinite().all()
        assert norm.running_mean[0].isfinite() and not norm.running_mean[1].isfinite()


@pytest.mark.slow
def test_the_operations_are_registered_as_torch_wants_them():
    """Schema, fake results with their strides, autograd and compilation, checked by torch itself."""
    x, norm = draw(1, 2, 3, 4), make_norm(2)
    given = (torch.rand(2, 2), norm.weight, norm.bias)
    torch.library.opcheck(batch_norm._statistics, (x, norm.running_mean, norm.running_var, 0.1, 1e-5))
    learnt = x.detach().requires_grad_()
    torch.library.opcheck(batch_norm._relu, (learnt, *given))
    torch.library.opcheck(batch_norm._add_relu, (learnt, *given, x, *given, None))
    torch.library.opcheck(
        batch_norm._add_relu, (learnt, *given, x, None, None, None, learnt[:1, :1, :1, :1].expand(x.shape))
    )
    known = tuple(t.detach() for t in given)
    torch.library.opcheck(batch_norm._gradient, (x, x, *known))
    torch.library.opcheck(batch_norm._gradient_of_sum, (x, x, x, x, *known, x, *known))
    torch.library.opcheck(stem_tail._operation, (learnt, *given, 1, 1))


@pytest.mark.slow
def test_a_compiled_network_computes_the_same():
    """Forward, backward and the update of running statistics, traced by AOTAutograd without a break."""

    def network(x: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d, third: nn.BatchNorm2d) -> Tensor:
        x = stem_tail.norm_relu_pool(x, first, 1, 1)
        y, through = batch_norm.norm_add_relu(batch_norm.norm_relu(x * 2, second), third, x)
        y, through = batch_norm.norm_add_relu(x + y, third, y, through=through)
        return batch_norm.norm_add_relu(x - y, third, x + y, second)[0]

    given = (draw(1, 3, 4, 6), make_norm(3), make_norm(3), make_norm(3))
    eager = run(network, *copy.deepcopy(given))
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager_default_partitioner")
    for ours, theirs in zip(run(compiled, *given), eager, strict=True):
        torch.testing.assert_close(ours, theirs)
