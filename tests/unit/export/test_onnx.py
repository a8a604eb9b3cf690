"""Operations that Sightline writes into ONNX in its own way, against float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sightline.export.formats import onnx
from sightline.kernels.instance_norm import instance_norm_leaky_relu

pytest.importorskip("onnxscript", reason="needs the extra export: onnx, onnxscript, onnxruntime")
pytest.importorskip("onnxruntime", reason="needs the extra export")


class Norm(nn.Module):
    names = ("out",)

    def __init__(self, sides: tuple[int, ...]):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([0.5]))
        self.sides = sides

    def forward(self, image: Tensor) -> tuple[Tensor]:
        return (instance_norm_leaky_relu(image, self.weight, self.bias, 1e-3, 0.1),)

    def random_input(self, items: int) -> Tensor:
        draws = torch.Generator().manual_seed(items)
        return torch.randn(items, 1, *self.sides, generator=draws) * 2 + 3


@pytest.mark.parametrize("sides", [(64, 64, 64), pytest.param((20, 24), marks=pytest.mark.slow)])
def test_an_instance_norm_of_many_voxels_is_as_exact_as_one_of_few(sides: tuple[int, ...], tmp_path: Path):
    """The operation of onnxruntime is 1.6e-6 off for 64^3 voxels, and 2.5e-5 for 128^3."""
    norm = Norm(sides).eval().requires_grad_(False)
    onnx.write(norm, "{}", tmp_path / "norm.onnx")
    image = norm.random_input(3)
    [found] = onnx.load(tmp_path / "norm.onnx")(image)
    [expected] = norm.double()(image.double())
    assert found.shape == image.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
