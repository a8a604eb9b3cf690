"""Convolutions that a compiled step computes in another way, on CUDA: as close to float64 as the plain ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

from sightline import kernels
from sightline.kernels import narrow, paired, transposed

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("fresh_cuda")]

# Heads of an SSD and of a U-Net, transposed and first convolutions of a U-Net; with a shape of the input.
CASES = [
    pytest.param(lambda: nn.Conv2d(64, 340, 3, padding=1), narrow, (8, 64, 38, 38), id="head of an SSD"),
    pytest.param(lambda: nn.Conv2d(32, 4, 1), narrow, (4, 32, 96, 80), id="head of a U-Net"),
    pytest.param(lambda: nn.ConvTranspose2d(64, 32, 2, 2), transposed, (4, 64, 48, 40), id="finest level"),
    pytest.param(lambda: nn.ConvTranspose2d(512, 512, 2, 2), transposed, (4, 512, 6, 5), id="deepest level"),
    pytest.param(lambda: nn.Conv2d(4, 32, 3, padding=1, bias=False), paired, (4, 4, 96, 80), id="first pairs"),
    pytest.param(lambda: nn.Conv2d(64, 32, 3, padding=1), paired, (4, 64, 48, 40), id="last pairs"),
]


def run(conv: nn.Module, module, x: Tensor, outer: Tensor) -> list[Tensor]:
    """Return the result and the gradients of x and of the parameters."""
    leaf = x.detach().requires_grad_()
    is_used = []

    def forward(leaf: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            is_used.append(module.applies(conv, leaf))
            return module.convolve(conv, leaf)

    torch._dynamo.reset()
    y = torch.compile(forward, fullgraph=True, dynamic=False)(leaf)
    assert is_used == [kernels.are_allowed()]  # else plain torch would be compared with itself
    return [y.detach(), *torch.autograd.grad(y, [leaf, *conv.parameters()], outer.to(y.dtype))]


@pytest.mark.parametrize(("make", "module", "shape"), CASES)
def test_results_and_gradients_are_those_of_float64(make, module, shape):
    conv = make().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    exact, leaf = copy.deepcopy(conv).double(), x.double().requires_grad_()
    y = exact(leaf)
    outer = torch.randn(y.shape, device="cuda").bfloat16().to(memory_format=torch.channels_last)
    expected = [y.detach(), *torch.autograd.grad(y, [leaf, *exact.parameters()], outer.double())]
    found = run(conv, module, x, outer)
    kernels.use("off")
    plain = run(conv, module, x, outer)
    for ours, theirs, true in zip(found, plain, expected, strict=True):
        assert ours.shape == true.shape
        error, usual = (float((each.double() - true).norm() / true.norm()) for each in (ours, theirs))
        assert error < max(1.2 * usual, 1e-3), f"{error} where plain torch has {usual}"
