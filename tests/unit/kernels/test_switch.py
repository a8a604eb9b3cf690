"""--run.kernels turns every kernel off, and on again."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import config, kernels
from sightline.hardware.setup import set_up
from sightline.kernels import batch_norm, instance_norm, stem, stem_tail


@pytest.fixture(autouse=True)
def _kernels_as_before():
    yield
    kernels.use("auto")


@pytest.mark.parametrize("kernel", [stem, stem_tail, batch_norm, instance_norm], ids=lambda kernel: kernel.__name__)
def test_off_is_off_for_every_kernel(kernel):
    if kernel is not stem:
        pytest.importorskip("triton")
    channels = 3 if kernel is stem else 32
    with FakeTensorMode():  # a CUDA tensor without values needs no CUDA
        x = torch.empty(2, channels, 8, 8, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
        given = (x, nn.BatchNorm2d(channels)) if kernel in (batch_norm, stem_tail) else (x,)
        assert kernel.applies(*given)
        kernels.use("off")
        assert not kernel.applies(*given)
        kernels.use("auto")
        assert kernel.applies(*given)


def test_a_run_says_which():
    for choice, expected in (("off", False), ("auto", True)):
        set_up(*config.load("demo_classification", [f"--run.kernels={choice}", "--run.device=cpu"]))
        assert kernels.are_allowed() == expected
