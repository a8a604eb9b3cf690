"""The stem over blocks of pixels is the 7x7 convolution, values and gradients."""

import pytest
import torch
from torch.nn import functional

from sightline.kernels import stem


@pytest.mark.parametrize("before", [2, 3])
@pytest.mark.parametrize(("height", "width", "channels"), [(16, 16, 3), (32, 20, 1), (14, 26, 4)])
def test_it_is_the_convolution(before, height, width, channels):
    torch.manual_seed(before)
    pixels = torch.randn(2, channels, height, width, dtype=torch.float64).to(memory_format=torch.channels_last)
    weight = torch.randn(8, channels, 7, 7, dtype=torch.float64, requires_grad=True)
    expected = stem.reference(pixels, weight, before)
    assert expected.shape == (2, 8, height // 2, width // 2)
    found = stem.convolve(pixels, weight, before)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    outer = torch.randn_like(expected)
    (theirs,) = torch.autograd.grad(expected, weight, outer)
    (ours,) = torch.autograd.grad(found, weight, outer)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_reference_is_torchs_own():
    pixels, weight = torch.randn(1, 3, 18, 18), torch.randn(4, 3, 7, 7)
    torch.testing.assert_close(
        stem.reference(pixels, weight, 3), functional.conv2d(pixels, weight, stride=2, padding=3), rtol=1e-5, atol=1e-5
    )


def test_input_gradients_too():
    pixels = torch.randn(1, 3, 12, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 7, 7, dtype=torch.float64)
    (theirs,) = torch.autograd.grad(stem.reference(pixels, weight, 3).square().sum(), pixels)
    (ours,) = torch.autograd.grad(stem.convolve(pixels, weight, 3).square().sum(), pixels)
    torch.testing.assert_close(ours, theirs)


def test_it_applies_to_half_precision_on_cuda_alone():
    assert not stem.applies(torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16))
    assert not stem.applies(torch.zeros(1, 3, 8, 8))


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_the_device_it_is_as_close_to_float64_as_cudnn(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    pixels = torch.randn(4, 3, 224, 224, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 3, 7, 7, device="cuda", dtype=dtype) * 0.1
    assert stem.applies(pixels)
    exact = stem.reference(pixels.double(), weight.double(), 3)
    ours = (stem.convolve(pixels, weight, 3) - exact).abs().max()
    theirs = (stem.reference(pixels, weight, 3) - exact).abs().max()
    assert ours <= 1.5 * theirs + 1e-6
