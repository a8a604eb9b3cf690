"""--run.kernels turns every kernel off, and on again."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import config, kernels
from sightline.hardware.setup import set_up
from sightline.kernels import instance_norm, stem


@pytest.fixture(autouse=True)
def _kernels_as_before():
    yield
    kernels.use("auto")


@pytest.mark.parametrize(("kernel", "channels"), [(stem, 3), (instance_norm, 32)], ids=["stem", "instance_norm"])
def test_off_is_off_for_every_kernel(kernel, channels):
    if kernel is instance_norm:
        pytest.importorskip("triton")
    with FakeTensorMode():  # a CUDA tensor without values needs no CUDA
        x = torch.empty(2, channels, 8, 8, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
        assert kernel.applies(x)
        kernels.use("off")
        assert not kernel.applies(x)
        kernels.use("auto")
        assert kernel.applies(x)


def test_a_run_says_which():
    for choice, expected in (("off", False), ("auto", True)):
        set_up(*config.load("demo_classification", [f"--run.kernels={choice}", "--run.device=cpu"]))
        assert kernels.are_allowed() == expected
