"""The kernels of instance norm with leaky ReLU on CUDA: as close to float64 as rounding allows, compiled, captured."""

import pytest
import torch
from torch import Tensor, nn

from sightline import kernels
from sightline.hardware import devices
from sightline.kernels import instance_norm, instance_norm_once_triton, instance_norm_triton
from sightline.kernels.instance_norm import instance_norm_leaky_relu

pytestmark = pytest.mark.device

EPS, SLOPE = 1e-5, 0.01
# Levels of a U-Net of 192 x 160 and of 56 x 40, odd sizes and channels, three dimensions.
SHAPES = [
    (64, 32, 192, 160),
    (64, 64, 96, 80),
    (64, 128, 48, 40),
    (64, 256, 24, 20),
    (64, 512, 12, 10),
    (64, 512, 6, 5),
    (64, 32, 56, 40),
    (64, 64, 28, 20),
    (64, 128, 14, 10),
    (64, 256, 7, 5),
    (3, 24, 101, 67),
    (2, 33, 45, 31),
    (5, 3, 200, 201),
    (1, 1, 3, 1),
    (2, 320, 8, 8, 8),
    (2, 32, 64, 64, 64),
    (3, 7, 5, 9, 11),
]


@pytest.fixture(autouse=True)
def device() -> torch.device:
    found = devices.select()
    if found.kind != "cuda":
        pytest.skip(f"written for cuda, this is {found.kind}")
    return found.torch_device


@pytest.fixture(params=["twice", "once"])
def _reads(request, monkeypatch) -> None:
    """Run the kernels of either kind; those that read once on shapes for which programs wait for each other."""
    place = torch.device("cuda", torch.cuda.current_device())
    if request.param == "once" and not instance_norm_once_triton.runs_at_once(place):
        pytest.skip(f"{torch.cuda.get_device_name()} does not run all programs of an image at once")
    trusted = [(place.index, dtype) for dtype in instance_norm.DTYPES] if request.param == "once" else []
    monkeypatch.setattr(instance_norm, "_trusted", tuple(trusted))


def draw(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fresh numbers at every run; pytest prints the seed of one that failed."""
    seed = torch.seed()
    print(f"torch.manual_seed({seed})")
    layout = instance_norm.LAYOUTS[len(shape)]
    x = (torch.randn(shape, device="cuda") * 2 + offset).to(dtype, memory_format=layout)
    outer = torch.randn(shape, device="cuda").to(dtype, memory_format=layout)
    weight, bias = torch.rand(shape[1], device="cuda") + 0.5, torch.randn(shape[1], device="cuda")
    # fp32 may see the other side of the leaky ReLU's bend than float64 where both are next to it: no gradient there.
    exact = instance_norm.reference(x.double(), weight.double(), bias.double(), EPS, SLOPE)
    return x, weight, bias, outer.masked_fill_(exact.abs() < 1e-4, 0.0)


def run(function, x: Tensor, weight: Tensor, bias: Tensor, outer: Tensor) -> list[Tensor]:
    """Result and gradients of x, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, EPS, SLOPE)
    return [y.detach(), *torch.autograd.grad(y, leaves, outer)]


def check(found: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor, outer: Tensor) -> None:
    expected = run(instance_norm.reference, *(t.double() for t in (x, weight, bias, outer)))
    # Half a unit in the last place of the type, and what fp32 statistics leave.
    rtol = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[x.dtype]
    torch.testing.assert_close(found[0].double(), expected[0], rtol=rtol, atol=2e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=rtol, atol=5e-5)
    elements = x.numel() / x.shape[1]
    for ours, theirs in zip(found[2:], expected[2:], strict=True):  # sums of this many numbers of about 1
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * elements**0.5 + 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("_reads")
def test_values_and_gradients_are_those_of_float64(shape, dtype):
    given = draw(shape, dtype)
    assert instance_norm.applies(given[0])
    found = run(instance_norm_leaky_relu, *given)
    assert [t.dtype for t in found] == [dtype, dtype, torch.float32, torch.float32]
    for image in found[:2]:
        assert image.stride() == given[0].stride()
    check(found, *given)


@pytest.mark.parametrize("shape", [(8, 32, 192, 160), (4, 256, 12, 10)], ids=str)
@pytest.mark.usefixtures("_reads")
def test_a_large_mean_costs_no_digits(shape):
    x, weight, bias, _ = draw(shape, torch.float32, offset=1000.0)
    exact = instance_norm.reference(x.double(), weight.double(), bias.double(), EPS, SLOPE)
    found = instance_norm_leaky_relu(x, weight, bias, EPS, SLOPE)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)  # x itself is known to 6e-5
    x.fill_(1000.0)
    found = instance_norm_leaky_relu(x, weight, bias, EPS, SLOPE)
    expected = nn.functional.leaky_relu(bias, SLOPE)[:, None, None].expand_as(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)  # a mean off by one in the last place, / sqrt(eps)


@pytest.mark.parametrize("shape", [(64, 32, 192, 160), (64, 512, 12, 10), (2, 33, 45, 31)], ids=str)
@pytest.mark.usefixtures("_reads")
def test_bits_repeat(shape):
    given = draw(shape, torch.bfloat16)
    first = run(instance_norm_leaky_relu, *given)
    for _ in range(3):
        for ours, before in zip(run(instance_norm_leaky_relu, *given), first, strict=True):
            assert torch.equal(ours, before)


class Block(nn.Module):
    """What the U-Net calls: a convolution, then this."""

    def __init__(self, channels_in: int, channels_out: int):
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.weight = nn.Parameter(torch.rand(channels_out) + 0.5)
        self.bias = nn.Parameter(torch.randn(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        return instance_norm_leaky_relu(self.convolution(x), self.weight, self.bias, EPS, SLOPE)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(4, 32), nn.AvgPool2d(2), Block(32, 64), Block(64, 24))
    return blocks.to("cuda", memory_format=torch.channels_last)


def images(size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 4, size, size, device="cuda").to(memory_format=torch.channels_last)


def aims(x: Tensor) -> Tensor:
    """What the outputs of `network` are multiplied with: a loss that the normalisation does not make flat."""
    torch.manual_seed(2)
    return torch.randn(len(x), 24, x.shape[2] // 2, x.shape[3] // 2, device="cuda")


def gradients(model: nn.Module, x: Tensor, aim: Tensor) -> list[Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    return [y.detach(), *torch.autograd.grad((y.float() * aim).sum(), list(model.parameters()))]


def check_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """As vectors: roundings of bf16 that differ early move gradients by a hundredth, single numbers by more."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        assert error < 0.1, f"{error} for {tuple(theirs.shape)}"


@pytest.mark.parametrize("size", [16, 96])  # small enough to be held whole, and not
def test_compiled_without_a_break_it_is_the_same(size, monkeypatch):
    calls = []
    for name in ("forward", "backward"):
        launch = getattr(instance_norm_triton, name)
        monkeypatch.setattr(
            instance_norm_triton,
            name,
            lambda *given, launch=launch, name=name: calls.append(name) or launch(*given),
        )
    model, x = network(), images(size)
    eager = gradients(model, x, aims(x))
    assert eager[0].dtype == torch.bfloat16 and eager[0].is_contiguous(memory_format=torch.channels_last)
    assert calls == ["forward"] * 3 + ["backward"] * 3  # autocast brings no copy in between that hides the layout
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model, fullgraph=True), x, aims(x))
    assert compiled[0].stride() == eager[0].stride()
    assert calls == (["forward"] * 3 + ["backward"] * 3) * 2
    check_close(compiled, eager)


def test_off_it_is_plain_torch_and_close():
    model, x = network(), images(96)
    ours = gradients(model, x, aims(x))
    kernels.use("off")
    try:
        assert not instance_norm.applies(x)
        check_close(ours, gradients(model, x, aims(x)))
    finally:
        kernels.use("auto")
    assert instance_norm.applies(x)


@pytest.mark.parametrize("size", [16, 96, 256])
@pytest.mark.usefixtures("_reads")
def test_a_captured_graph_repeats_it(size):
    model, x = network(), images(size)
    aim = aims(x)
    expected = gradients(model, x, aim)  # also compiles the kernels, which a capture must not
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(model, x, aim)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    still = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = gradients(model, still, aim)
    still.copy_(x)
    graph.replay()
    check_close(captured, expected)


def test_programs_that_wait_for_each_other_do_so_beside_other_work(monkeypatch):
    """Another stream keeps the GPU busy: programs of an image then start late, but they start."""
    place = torch.device("cuda", torch.cuda.current_device())
    if not instance_norm_once_triton.runs_at_once(place):
        pytest.skip(f"{torch.cuda.get_device_name()} does not run all programs of an image at once")
    monkeypatch.setattr(instance_norm, "_trusted", ((place.index, torch.bfloat16),))
    given = draw((64, 32, 192, 160), torch.bfloat16)
    expected = run(instance_norm_leaky_relu, *given)
    side, square = torch.cuda.Stream(), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            square @ square
        found = run(instance_norm_leaky_relu, *given)
    torch.cuda.synchronize()
    for ours, before in zip(found, expected, strict=True):
        assert torch.equal(ours, before)


def test_another_layout_takes_the_reference():
    x, weight, bias, outer = draw((2, 32, 24, 20), torch.bfloat16)
    x = x.contiguous()
    assert not instance_norm.applies(x)
    check(run(instance_norm_leaky_relu, x, weight, bias, outer), x, weight, bias, outer)


def test_gradients_may_come_in_any_layout():
    x, weight, bias, outer = draw((2, 32, 24, 20), torch.bfloat16)
    found = run(instance_norm_leaky_relu, x, weight, bias, outer.contiguous())
    for ours, theirs in zip(found, run(instance_norm_leaky_relu, x, weight, bias, outer), strict=True):
        assert torch.equal(ours, theirs)
