"""Convolutions that oneDNN's weight gradients spoil: which they are, and what else stays. See tests/faults/, too."""

import copy
import os
import resource

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline.hardware import devices, onednn
from sightline_migrate import onednn as onednn_of_migrate


class Standardised(nn.Conv2d):
    """A layer with a weight of its own making, as some networks have."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.std(), bias)


def network() -> nn.Sequential:
    """Narrow strided layers as they come: plain, derived, parametrized."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1, 2), Standardised(8, 12, 1, 2, padding="valid"), nn.Conv2d(12, 4, 1, (1, 2))]
    torch.nn.utils.parametrizations.weight_norm(layers[2])
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(memory_format=torch.channels_last)


def objects(model: nn.Module) -> dict[str, int]:
    """The identity of every module and parameter."""
    return {name: id(each) for name, each in [*model.named_modules(), *model.named_parameters()]}


def test_a_model_stays_what_it_is():
    model = network()
    before = objects(model)
    names, text = list(model.state_dict()), repr(model)
    x = images(16, 16)
    with torch.no_grad():  # what oneDNN spoils is the weight gradient alone
        expected = model(x)

    assert onednn.avoid(model) == 3
    assert onednn.avoid(model) == 0  # once is enough
    assert objects(model) == before
    assert (list(model.state_dict()), repr(model)) == (names, text)
    assert isinstance(model[1], Standardised)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 8, 1, 2),
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(3, 8, 3, 2),
        nn.Conv2d(3, 8, (1, 2), 2),
        nn.Conv2d(3, 8, 1, 2, padding=1),
        nn.Conv2d(4, 8, 1, 2, groups=2),
        nn.Conv1d(3, 8, 1, 2),
        nn.Conv3d(3, 8, 1, 2),
        nn.ConvTranspose2d(3, 8, 1, 2),
    ],
    ids=str,
)
def test_unaffected_layers_are_left_alone(layer: nn.Module):
    kind = type(layer)
    assert onednn.avoid(nn.Sequential(layer)) == 0
    assert type(layer) is kind


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [(torch.channels_last, ((15, 15), (15, 16), (16, 15))), (torch.contiguous_format, ((16, 16), (2, 64)))],
)
def test_sizes_and_layouts_that_are_not_affected_keep_their_bits(layout: torch.memory_format, sizes):
    plain, layer = (nn.Conv2d(3, 20, 1, 2).to(memory_format=layout) for _ in range(2))
    layer.load_state_dict(plain.state_dict())
    onednn.avoid(nn.Sequential(layer))
    for size in sizes:
        found = []
        for each in (plain, layer):
            x = images(*size).contiguous(memory_format=layout).requires_grad_()
            y = each(x)
            (y * y).sum().backward()
            found.append([y, x.grad, *(parameter.grad.clone() for parameter in each.parameters())])
            each.zero_grad()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_models_are_changed_on_the_cpu_alone():
    cpu = devices.place(network(), devices.select("cpu"), channels_last=False)
    elsewhere = devices.place(network(), devices.replace(devices.KINDS["mps"], kind="meta"), channels_last=False)
    assert onednn.avoid(cpu) == 0
    assert onednn.avoid(elsewhere) == 3
    assert functional.conv2d is torch.conv2d  # torch is what it was


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.01, 1)])
def test_the_probe_compares_a_gradient_with_sums_over_all_pixels(factor: float, code: int, monkeypatch):
    """With a convolution that writes nowhere else; `factor` makes its gradient wrong."""
    asked = []

    def convolved(x: Tensor, weight: Tensor, stride: int) -> Tensor:
        assert x.is_contiguous(memory_format=torch.channels_last) and weight.shape[1] < onednn.BLOCK and stride == 2
        assert x.shape[2] * x.shape[3] >= 512**2, "less is not seen to be spoiled"
        return torch.einsum("nihw,oi->nohw", x[..., ::stride, ::stride], weight[..., 0, 0] * factor)

    monkeypatch.setattr(functional, "conv2d", convolved)
    monkeypatch.setattr(onednn.resource, "setrlimit", lambda *limit: asked.append(limit))
    monkeypatch.setattr(onednn.os, "dup2", lambda opened, place: asked.append((os.fstat(opened).st_rdev, place)))
    before = torch.random.get_rng_state()
    with pytest.raises(SystemExit) as ended:
        onednn.probe()
    torch.random.set_rng_state(before)
    assert ended.value.code == code
    assert asked == [(resource.RLIMIT_CORE, (0, 0)), (os.stat(os.devnull).st_rdev, 2)]


@pytest.mark.parametrize(
    ("size", "stride", "affected"),
    [
        ((8, 9), (2, 3), True), ((9, 8), (2, 3), False), ((8, 8), (2, 3), False), ((9, 9), (2, 3), False),
        ((8, 9), (1, 3), True), ((9, 9), (2, 1), False), ((8, 9), (1, 1), False),
    ],
)  # fmt: skip
def test_a_stride_must_divide_its_own_side(size: tuple[int, int], stride: tuple[int, int], affected: bool):
    x, weight = images(*size), torch.zeros(8, 3, 1, 1)
    for module in (onednn, onednn_of_migrate):
        assert module.is_affected(x, weight, stride, (0, 0), 1) is affected
        assert module.is_affected(x, weight, stride, "valid", 1) is affected
        assert not module.is_affected(x, weight, stride, (0, 1), 1) and not module.is_affected(
            x, weight, stride, "same", 1
        )
        assert module.subsampled(x, stride).shape[-2:] == (-(-size[0] // stride[0]), -(-size[1] // stride[1]))
