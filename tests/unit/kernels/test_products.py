"""Convolutions that are computed in another way on CUDA: the same numbers, and only where a compiler is at work."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import kernels
from sightline.kernels import narrow, paired, transposed
from sightline.models.ssd import SsdConfig
from sightline.models.unet import UnetConfig
from sightline.parts import DataSpec


def gradients(function, conv: nn.Module, x: torch.Tensor, outer: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = function(conv, x)
    return [y.detach(), *torch.autograd.grad(y, [x, *conv.parameters()], outer)]


@pytest.mark.parametrize(
    ("conv", "ours"),
    [
        pytest.param(nn.Conv2d(5, 4, 1), narrow.widened, id="head of a U-Net"),
        pytest.param(nn.Conv2d(8, 20, 3, padding=1), narrow.widened, id="head of an SSD"),
        pytest.param(nn.Conv2d(8, 3, 3, 2, bias=False), narrow.widened, id="without bias"),
        pytest.param(nn.ConvTranspose2d(6, 3, 2, 2), transposed.multiplied, id="transposed"),
        pytest.param(nn.ConvTranspose2d(6, 3, 2, 2, bias=False), transposed.multiplied, id="transposed without bias"),
        pytest.param(nn.Conv2d(4, 3, 3, padding=1), paired.of_pairs, id="pairs"),
        pytest.param(nn.Conv2d(5, 6, 3, padding=1, bias=False), paired.of_pairs, id="pairs without bias"),
    ],
)
def test_results_and_gradients_are_those_of_the_convolution(conv, ours):
    conv = conv.double().to(memory_format=torch.channels_last)
    x = torch.randn(2, conv.in_channels, 5, 8, dtype=torch.float64).to(memory_format=torch.channels_last)
    outer = torch.randn_like(conv(x))
    expected = gradients(lambda conv, x: conv(x), conv, x, outer)
    for found, other in zip(gradients(ours, conv, x, outer), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_a_compiled_step_multiplies_and_widens_unless_kernels_are_off(choice):
    """As Dynamo sees it, on CUDA that is not here."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    kernels.use(choice)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            up, head = (make(8, 4, 2, 2, dtype=torch.bfloat16) for make in (nn.ConvTranspose2d, nn.Conv2d))
            x = torch.empty(2, 8, 6, 6, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
            conv = nn.Conv2d(8, 16, 3, padding=1, dtype=torch.bfloat16)
            pairs = [(transposed, up), (narrow, head), (paired, conv)]
            each = lambda x: [module.convolve(layer, x) for module, layer in pairs]  # noqa: E731
            found = torch.compile(each, fullgraph=True, backend=keep)(x)
            assert not any(module.applies(layer, x) for module, layer in pairs)  # eagerly they would cost passes
    finally:
        kernels.use("auto")
    assert [tuple(y.shape) for y in found] == [(2, 4, 12, 12), (2, 4, 3, 3), (2, 16, 6, 6)]
    called = [str(node.target) for node in graphs[0].graph.nodes]
    is_ours = choice == "auto"
    assert any("matmul" in name for name in called) == any("pad" in name for name in called) == is_ours
    assert any("cat" in name for name in called) == is_ours
    assert any("conv_transpose2d" in name for name in called) != is_ours


def test_a_unet_with_products_answers_the_same(monkeypatch):
    model = UnetConfig(width=4, deep_supervision=True, aux_heads=1).build(DataSpec(tuple("abc"), 4, (16, 16), (), ()))
    model, image = model.double(), torch.randn(2, 4, 16, 16, dtype=torch.float64)
    model, image = (each.to(memory_format=torch.channels_last) for each in (model, image))
    expected = model(image)
    seen: list[nn.Module] = []
    for module in (narrow, transposed):
        monkeypatch.setattr(module, "applies", lambda conv, x: seen.append(conv) or True)
    in_pairs: list[torch.Tensor] = []
    monkeypatch.setattr(paired, "is_compiled_half", lambda x: in_pairs.append(x) or True)
    for found, other in zip(model(image), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert len(in_pairs) == 8  # all convolutions of 3x3 except two with a stride
    assert seen == [*(up.transposed for up in model.decoder), *model.heads]


def test_an_ssd_with_wider_heads_answers_the_same(monkeypatch):
    model = SsdConfig(depth=18, width=8).build(DataSpec(tuple("abcd"), 3, (64, 64), (), ())).double()
    pixels = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = model(pixels)
    seen: list[int] = []
    monkeypatch.setattr(narrow, "applies", lambda conv, x: seen.append(conv.out_channels) or True)
    for found, other in zip(model(pixels), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert seen == [head.out_channels for head in model.heads] and any(count % 8 for count in seen)
