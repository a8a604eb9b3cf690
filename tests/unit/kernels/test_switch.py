"""--run.kernels turns every kernel off, and on again."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sightline import config, kernels
from sightline.engine.setup import set_up
from sightline.hardware import devices
from sightline.kernels import batch_norm, instance_norm, stem, stem_tail


@pytest.fixture(autouse=True)
def _kernels_as_before(monkeypatch):
    monkeypatch.setattr(batch_norm, "_trusted", ((0, torch.bfloat16),))  # as after a check on a GPU
    yield
    kernels.use("auto")
    devices.set_deterministic(False)


@pytest.mark.parametrize("kernel", [stem, stem_tail, batch_norm, instance_norm], ids=lambda kernel: kernel.__name__)
def test_off_is_off_for_every_kernel(kernel):
    if kernel is not stem:
        pytest.importorskip("triton")
    channels = 3 if kernel is stem else 32
    with FakeTensorMode():  # a CUDA tensor without values needs no CUDA
        x = torch.empty(64, channels, 64, 64, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
        given = (x, nn.BatchNorm2d(channels)) if kernel in (batch_norm, stem_tail) else (x,)
        assert kernel.applies(*given)
        kernels.use("off")
        assert not kernel.applies(*given)
        kernels.use("auto")
        assert kernel.applies(*given)


def test_short_work_waits_for_no_compiler():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x = torch.empty(64, 4, 64, 64, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
        for is_short, expected in ((True, False), (False, True)):
            with kernels.only_uncompiled(is_short):
                assert instance_norm.applies(x) == expected and stem.applies(x)
        with kernels.only_uncompiled(True), kernels.only_uncompiled(False):
            assert not kernels.may_compile()
        kernels.use("off")
        with kernels.only_uncompiled(False):
            assert not kernels.may_compile()


def test_batch_norm_is_plain_where_bits_must_repeat():
    pytest.importorskip("triton")
    with FakeTensorMode():
        x = torch.empty(64, 32, 64, 64, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
        assert batch_norm.applies(x, nn.BatchNorm2d(32)) and instance_norm.applies(x)
        set_up(*config.load("demo_classification", ["--train.deterministic", "--run.device=cpu"]))
        assert not batch_norm.applies(x, nn.BatchNorm2d(32)) and instance_norm.applies(x)


def test_a_run_says_which():
    for choice, expected in (("off", False), ("auto", True)):
        set_up(*config.load("demo_classification", [f"--run.kernels={choice}", "--run.device=cpu"]))
        assert kernels.are_allowed() == expected
