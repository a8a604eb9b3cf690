"""Convolutions whose weight gradients oneDNN spoils, in scripts that know CUDA only: against float64, or to the bit."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sightline_migrate.reporting import record

Start = Callable[..., Any]
Run = Callable[..., Any]
LAST = torch.channels_last
DROPPED = "pixels skipped by the stride are dropped first: oneDNN issue 6035"

SCRIPT = """
import copy
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.main = nn.Conv2d(channels, out, 3, 2, 1)
        self.shortcut = nn.Conv2d(channels, out, 1, 2)

    def forward(self, x):
        return torch.relu(self.main(x) + self.shortcut(x))

torch.manual_seed(0)
model = nn.Sequential(Block(3, 5), Block(5, 7), nn.Flatten(), nn.LazyLinear(2))
model(torch.zeros(1, 3, 128, 128))
exact = copy.deepcopy(model).double()
model = model.to("cuda", memory_format=torch.channels_last)
x = torch.randn(4, 3, 128, 128)
for _ in range(3):
    model.zero_grad()
    model(x.to("cuda", memory_format=torch.channels_last)).sum().backward()
exact(x.double()).sum().backward()
for (name, found), wanted in zip(model.named_parameters(), exact.parameters()):
    worst = (found.grad.cpu() - wanted.grad).abs().max() / wanted.grad.abs().max()
    assert worst < 1e-4, f"{name}: off by {worst:.2g}"
print("trained")
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(),
    reason="needs an x86 CPU and a torch with oneDNN, whose bug it is",
)
def test_a_script_with_narrow_strided_layers_trains(run_script: Run):
    done = run_script(SCRIPT, "--target", "cpu", env={"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert "trained" in done.stdout
    assert f"torch.nn.functional.conv2d --> {DROPPED}" in done.stderr and "script.py:13" in done.stderr


def gradient(x: Tensor, weight: Tensor, call: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """The output and the gradients of both."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = call(x, weight)
    y.square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def tensors(
    channels: int, size: tuple[int, int] = (16, 16), kernel: int = 1, layout: torch.memory_format = LAST
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(20, channels, kernel, kernel)
    return torch.randn(2, channels, *size).to(memory_format=layout), weight.to(memory_format=layout)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: functional.conv2d(x, w, stride=2),
        lambda x, w: functional.conv2d(x, w, None, (2, 2), "valid"),
        lambda x, w: functional.conv2d(input=x, weight=w, stride=[2], padding=[0]),
        lambda x, w: torch.conv2d(x, w, None, [1, 2], [0, 0], [1, 1], 1),
    ],
)
def test_every_spelling_gives_the_gradients_of_float64(on_cpu: Start, call: Callable[[Tensor, Tensor], Tensor]):
    x, weight = tensors(3)
    wanted = gradient(x.double(), weight.double(), call)
    on_cpu()
    found = gradient(x, weight, call)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)
    assert [each.what for each in record.records.values()] == [DROPPED]


UNAFFECTED = {
    "stride 1": (3, {}, {}),
    "16 channels": (16, {}, {"stride": 2}),
    "3x3": (3, {"kernel": 3}, {"stride": 2}),
    "padding": (3, {}, {"stride": 2, "padding": 1}),
    "a size that the stride does not divide": (3, {"size": (15, 16)}, {"stride": 2}),
    "contiguous": (3, {"layout": torch.contiguous_format}, {"stride": 2}),
}


@pytest.mark.parametrize("case", UNAFFECTED)
def test_others_keep_their_bits_and_are_not_told(on_cpu: Start, case: str):
    channels, shape, options = UNAFFECTED[case]
    x, weight = tensors(channels, **shape)
    wanted = gradient(x, weight, lambda x, w: functional.conv2d(x, w, **options))
    on_cpu()
    found = gradient(x, weight, lambda x, w: functional.conv2d(x, w, **options))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not record.records


class Net(nn.Module):
    """A layer, and the function by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1, 2)
        self.weight = nn.Parameter(torch.randn(2, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(self.layer(x), self.weight, stride=2)


@pytest.mark.parametrize(
    "make",
    [
        torch.jit.script,
        pytest.param(lambda net: torch.jit.trace(net, torch.zeros(1, 3, 8, 8)), marks=pytest.mark.slow),
        torch.fx.symbolic_trace,
        pytest.param(lambda net: torch.compile(net, backend="aot_eager"), marks=pytest.mark.slow),
    ],
    ids=["script", "trace", "fx", "compile"],
)
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_programs_made_of_a_model_compute_the_same(on_cpu: Start, make: Callable[[nn.Module], Any]):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3, 16, 16)
    wanted = net(x)
    on_cpu()
    torch.testing.assert_close(make(net)(x), wanted)
