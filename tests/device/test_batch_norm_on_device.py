"""The kernels of batch norm and of the stem's tail on CUDA: as close to float64 as rounding allows, in a whole step."""

import copy
import os

# cuBLAS repeats its bits only with this, and only if it is set before CUDA is initialised.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline import kernels
from sightline.hardware import devices
from sightline.kernels import batch_norm, stem_tail
from sightline.models.resnet import ResNetConfig
from sightline.models.ssd import SsdConfig
from sightline.parts import DataSpec

pytestmark = pytest.mark.device

# Layers of ResNet-50 and SSD, odd sizes and channels, one image, few pixels.
SHAPES = [
    (64, 64, 56, 56),
    (32, 256, 56, 56),
    (64, 512, 28, 28),
    (64, 1024, 14, 14),
    (64, 2048, 7, 7),
    (8, 128, 38, 38),
    (1, 64, 9, 5),
    (3, 24, 101, 67),
    (2, 33, 45, 31),
    (1, 3, 200, 201),
    (1, 100, 3, 5),
    (300, 8, 1, 1),
]
# ... and rows and columns of padding before the pool.
POOLS = [
    (32, 64, 112, 112, 1, 1),
    (8, 64, 150, 150, 1, 1),
    (8, 64, 150, 150, 0, 0),
    (4, 64, 75, 113, 1, 1),
    (2, 64, 33, 40, 1, 0),
    (2, 32, 40, 33, 0, 1),
    (3, 24, 17, 9, 1, 1),
    (1, 96, 30, 21, 1, 1),
    (1, 7, 2, 3, 1, 1),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAMES = ["bf16", "fp16", "fp32"]


@pytest.fixture(autouse=True)
def device() -> torch.device:
    found = devices.select()
    if found.kind != "cuda":
        pytest.skip(f"written for cuda, this is {found.kind}")
    return found.torch_device


def draw(shape: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * 2 + offset).to(dtype, memory_format=torch.channels_last)


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, momentum=0.3).cuda()
    for values in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(values)
    return norm


@pytest.fixture(autouse=True)
def _fresh_numbers(monkeypatch):
    """At every run; pytest prints the seed of one that failed. Small tensors take the kernels too."""
    print(f"torch.manual_seed({torch.seed()})")
    monkeypatch.setattr(batch_norm, "LEAST", 1)
    monkeypatch.setattr(batch_norm, "_trusted", tuple((torch.cuda.current_device(), dtype) for dtype in DTYPES))


def plain(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return functional.relu(norm(x))


def run(function, x: Tensor, others: list[Tensor], norms: list[nn.BatchNorm2d], outer: Tensor) -> list[list[Tensor]]:
    """Return the result, the gradients of inputs, those of parameters, and the running statistics."""
    leaves = [t.detach().requires_grad_() for t in (x, *others)]
    y = function(*leaves, *norms)
    parameters = [p for norm in norms for p in norm.parameters()]
    found = torch.autograd.grad(y, [*leaves, *parameters], outer.to(y.dtype))
    return [
        [y.detach()],
        list(found[: len(leaves)]),
        list(found[len(leaves) :]),
        [b for norm in norms for b in norm.buffers()],
    ]


@torch.no_grad()
def beside_the_bend(function, inputs: list[Tensor], norms: list[nn.BatchNorm2d]) -> Tensor:
    """Return where the result is barely positive."""
    y = function(*inputs, *copy.deepcopy(norms))
    return (y > 0) & (y < 1e-5)


def check(ours, exact, x: Tensor, others: list[Tensor], norms: list[nn.BatchNorm2d], outer: Tensor) -> None:
    wide = [t.double() for t in others], [copy.deepcopy(norm).double() for norm in norms]
    # In bf16 some 10 values of a channel are equal. If they lie on the bend, all of them may be on its other side than
    # in float64 (1 channel of 20,000), which moves the sum of a channel visibly: no gradient there.
    one_sided = beside_the_bend(ours, [x, *others], norms) | beside_the_bend(exact, [x.double(), *wide[0]], wide[1])
    outer = outer.masked_fill(one_sided, 0.0)
    expected = run(exact, x.double(), *wide, outer.double())
    found = run(ours, x, others, norms, outer)
    assert found[0][0].dtype == x.dtype and found[0][0].is_contiguous(memory_format=torch.channels_last)
    assert all(grad.is_contiguous(memory_format=torch.channels_last) for grad in found[1])
    # As vectors: beside a bend, fp32 may see its other side than float64 does, and one gradient of thousands is lost.
    limit_of = {torch.bfloat16: (4e-3, 8e-3), torch.float16: (1e-3, 3e-3), torch.float32: (1e-5, 3e-3)}[x.dtype]
    for part, limit in ((0, limit_of[0]), (1, limit_of[1]), (2, 1e-3)):
        for mine, theirs in zip(found[part], expected[part], strict=True):
            assert mine.isfinite().all()
            size = theirs.norm().clamp(min=1e-3 * theirs.numel() ** 0.5 if part else 1e-9)
            assert float((mine.double() - theirs).norm() / size) < limit
    for mine, theirs in zip(found[3], expected[3], strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_and_relu_are_those_of_float64(shape, dtype):
    x, norm = draw(shape, dtype, 1.0), make_norm(shape[1])
    assert batch_norm.applies(x, norm)
    check(batch_norm.norm_relu, plain, x, [], [norm], draw(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ends_of_blocks_are_those_of_float64(shape, dtype):
    """A projection, then a block whose shortcut goes past it; its sum is that of half precision in both."""

    def ours(x: Tensor, other: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
        return batch_norm.norm_add_relu(x, first, other, second)[0]

    def ours_alone(x: Tensor, other: Tensor, first: nn.BatchNorm2d) -> Tensor:
        return batch_norm.norm_add_relu(x, first, other)[0]

    x, other, outer = draw(shape, dtype, 1.0), draw(shape, dtype), draw(shape, dtype)
    norms = [make_norm(shape[1]), make_norm(shape[1])]
    check(ours, lambda x, other, a, b: functional.relu(a(x) + b(other)), x, [other], norms, outer)
    check(ours_alone, lambda x, other, a: functional.relu(a(x) + other), x, [other], norms[:1], outer)


def test_gradients_of_both_ways_are_added():
    x, other = draw((8, 64, 14, 14), torch.float32), draw((8, 64, 14, 14), torch.float32)

    def ours(x: Tensor, other: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
        y, through = batch_norm.norm_add_relu(x, first, other)
        return batch_norm.norm_add_relu(y * 0.5, second, y, through=through)[0]

    def exact(x: Tensor, other: Tensor, first: nn.BatchNorm2d, second: nn.BatchNorm2d) -> Tensor:
        y = functional.relu(first(x) + other)
        return functional.relu(second(y * 0.5) + y)

    check(ours, exact, x, [other], [make_norm(64), make_norm(64)], draw((8, 64, 14, 14), torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", POOLS, ids=str)
def test_the_stems_tail_is_that_of_float64(shape, dtype):
    *size, top, left = shape
    x, norm = draw(tuple(size), dtype, 1.0), make_norm(size[1])
    assert stem_tail.applies(x, norm)
    exact = stem_tail.reference(x.double(), copy.deepcopy(norm).double(), top, left)
    found = stem_tail.norm_relu_pool(x, copy.deepcopy(norm), top, left)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2**-10, atol=2e-5)
    if dtype == torch.float32:  # equal neighbours of half precision win elsewhere than in float64
        outer = torch.randn_like(found)
        check(
            lambda x, norm: stem_tail.norm_relu_pool(x, norm, top, left),
            lambda x, norm: stem_tail.reference(x, norm, top, left),
            x,
            [],
            [norm],
            outer,
        )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=NAMES[:2])
def test_gradients_of_the_stems_tail_go_to_the_pixels_that_won(dtype):
    x, norm = draw((8, 64, 37, 50), dtype, 1.0), make_norm(64)
    statistics = batch_norm.take_statistics(x, copy.deepcopy(norm))
    y, winners, places = stem_tail._operation(x, statistics, norm.weight, norm.bias, 1, 1)
    outer = torch.randn_like(y)
    found = torch.autograd.grad(y, (norm.weight, norm.bias), outer)
    leaf = x.double().requires_grad_()
    wide = copy.deepcopy(norm).double()
    active = functional.relu(wide(leaf))
    rows, columns = torch.meshgrid(torch.arange(19, device="cuda"), torch.arange(25, device="cuda"), indexing="ij")
    place = places.long().clamp(max=8)  # 9: no value of the window is positive, and no gradient goes anywhere
    at = (2 * rows - 1 + place // 3).clamp(0, 36) * 50 + (2 * columns - 1 + place % 3).clamp(0, 49)
    assert torch.equal(
        x.flatten(2).gather(2, at.flatten(2))[places.flatten(2) < 9], winners.flatten(2)[places.flatten(2) < 9]
    )
    chosen = active.flatten(2).gather(2, at.flatten(2)) * (places.flatten(2) < 9)
    expected = torch.autograd.grad(chosen, (leaf, wide.weight, wide.bias), outer.double().flatten(2))
    ours = stem_tail._gradient(outer, x, winners, places, statistics, norm.weight.detach(), norm.bias.detach(), 1, 1)
    limit = 4e-3 if dtype == torch.bfloat16 else 1e-3
    assert float((ours[0].double() - expected[0]).norm() / expected[0].norm()) < limit
    for mine, theirs in zip(found, expected[1:], strict=True):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-3


def test_bits_repeat():
    x, other, norm = draw((64, 64, 56, 56), torch.bfloat16), draw((64, 64, 56, 56), torch.bfloat16), make_norm(64)

    def ours(x: Tensor, other: Tensor, first: nn.BatchNorm2d) -> Tensor:
        y = batch_norm.norm_add_relu(batch_norm.norm_relu(x, first), first, other)[0]
        return stem_tail.norm_relu_pool(y, first, 1, 1)

    outer = draw((64, 64, 28, 28), torch.bfloat16)
    first = run(ours, x, [other], [copy.deepcopy(norm)], outer)
    for _ in range(3):
        again = run(ours, x, [other], [copy.deepcopy(norm)], outer)
        for part, part_before in zip(again, first, strict=True):
            assert all(torch.equal(mine, before) for mine, before in zip(part, part_before, strict=True))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    spec = DataSpec(tuple(map(str, range(10))), 3, (96, 96), (0.5,) * 3, (0.2,) * 3)
    configs = {
        "resnet50": ResNetConfig(),
        "same": ResNetConfig(depth=18, padding="same"),
        "v2": ResNetConfig(version="v2"),
        "ssd": SsdConfig(),
    }
    return configs[name].build(spec).to("cuda", memory_format=torch.channels_last)


def step_of(model: nn.Module, x: Tensor, dtype: torch.dtype, function=None) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cuda", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        y = (model if function is None else function)(x)
    outputs = y[:2] if isinstance(y, tuple) else (y,)
    torch.manual_seed(2)
    loss = sum((out.double() * torch.randn(out.shape, device="cuda", dtype=torch.float64)).mean() for out in outputs)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return loss.detach(), dict(zip(names, grads, strict=True)) | dict(model.named_buffers())


def error(found: dict[str, Tensor], exact: dict[str, Tensor], names: list[str]) -> float:
    square = sum(float((found[name].double() - exact[name].double()).norm() ** 2) for name in names)
    return (square / sum(float(exact[name].double().norm() ** 2) for name in names)) ** 0.5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES)
@pytest.mark.parametrize("name", ["resnet50", "same", "v2", "ssd"])
def test_a_whole_network_is_as_close_to_float64_as_the_plain_one(name, dtype, compiled, monkeypatch):
    if compiled and (name != "resnet50" or dtype != torch.bfloat16):
        pytest.skip("compiled once")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = build(name)
    x = torch.randn(16, 3, 96, 96, device="cuda").to(memory_format=torch.channels_last)
    wide = copy.deepcopy(model).double()
    _, exact = step_of(wide, x.double(), torch.float64)
    ours, others = copy.deepcopy(model), copy.deepcopy(model)
    torch._dynamo.reset()
    _, found = step_of(ours, x, dtype, torch.compile(ours, fullgraph=True) if compiled else None)
    kernels.use("off")
    try:
        torch._dynamo.reset()
        _, plainly = step_of(others, x, dtype)
    finally:
        kernels.use("auto")
    grads = [n for n, _ in model.named_parameters()]
    # In fp32 a few values beside a bend decide about the error of the plain one too.
    limit = 1.2 * error(plainly, exact, grads) + (1e-2 if dtype == torch.float32 else 0)
    assert error(found, exact, grads) < limit
    means = [n for n in exact if n.endswith(("running_mean", "running_var"))]
    assert error(found, exact, means) < 1.2 * error(plainly, exact, means) + 1e-5
    for counter in (n for n in exact if n.endswith("num_batches_tracked")):
        assert int(found[counter]) == 1


def test_evaluation_and_other_norms_take_plain_torch():
    x, norm = draw((2, 64, 8, 8), torch.bfloat16), make_norm(64)
    assert batch_norm.applies(x, norm) and stem_tail.applies(x, norm)
    for other in (x.contiguous(), x.double(), x.cpu()):
        assert not batch_norm.applies(other, norm)
    assert not batch_norm.applies(x, norm.eval())
    norm.train().__class__ = type("BatchNorm2d", (nn.BatchNorm2d,), {})
    assert not batch_norm.applies(x, norm)
