"""Modules that stay in fp32 under autocast."""

import copy
from typing import NamedTuple

import pytest
import torch
import torchvision
from torch import nn

from sightline.hardware import devices
from sightline.hardware.precision import autocast, keep_fp32

CPU = devices.select("cpu")
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def model_of(blocks: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [blocks] * 4, num_classes=5).eval()


def dtypes(model: nn.Module, *paths: str) -> dict[str, torch.dtype]:
    """Return the output type of each module in one pass under bf16."""
    seen: dict[str, torch.dtype] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(lambda _m, _i, out, path=path: seen.update({path: out.dtype}))
        for path in paths
    ]
    with autocast(CPU, "bf16"):
        model(IMAGE)
    for hook in hooks:
        hook.remove()
    return seen


PATHS = ("conv1", "bn1", "layer3.0.conv1", "layer4.0.conv1", "layer4.1.bn2", "fc")


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        ([], set()),
        (["BatchNorm2d"], {"bn1", "layer4.1.bn2"}),
        (["fc"], {"fc"}),
        (["layer4.*"], {"layer4.0.conv1", "layer4.1.bn2"}),
        (["layer4"], {"layer4.0.conv1", "layer4.1.bn2"}),  # all that it calls is kept too
        (["Conv*", "fc"], {"conv1", "bn1", "layer3.0.conv1", "layer4.0.conv1", "layer4.1.bn2", "fc"}),
    ],
)
def test_by_type_by_path_and_by_pattern(patterns: list[str], kept: set[str]):
    model = model_of()
    assert keep_fp32(model, patterns, CPU) == []
    # A batch-norm gives the type it gets: after a kept convolution that is fp32 too.
    assert {path for path, dtype in dtypes(model, *PATHS).items() if dtype == torch.float32} == kept


def test_names_that_move_nothing_come_back():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])  # never called itself

        def forward(self, x):
            return self.layers[0](x).relu().mean()

    model = Own()
    wanted = ["relu", "mean", "Linear", "layers", "MatMul", "relu"]
    assert keep_fp32(model, wanted, CPU) == ["relu", "mean", "layers", "MatMul"]


def test_a_kept_model_is_the_model_of_no_autocast():
    plain, kept = model_of(), model_of()
    assert keep_fp32(kept, ["ResNet"], CPU) == []
    with autocast(CPU, "bf16"):
        assert torch.equal(kept(IMAGE), plain(IMAGE).float()) is False
        assert torch.equal(kept(IMAGE.bfloat16().float()), kept(IMAGE.bfloat16()))
        out = kept(IMAGE)
    assert torch.equal(out, plain(IMAGE))


def test_names_types_and_copies_stay():
    plain, kept = model_of(), model_of()
    keep_fp32(kept, ["BatchNorm2d", "fc"], CPU)
    assert list(kept.state_dict()) == list(plain.state_dict()) and repr(kept) == repr(plain)
    assert isinstance(kept.fc, nn.Linear) and isinstance(kept.bn1, nn.BatchNorm2d)
    assert all(parameter.dtype == torch.float32 for parameter in kept.parameters())
    # A copy, such as the average of weights, must run on its own weights.
    other = copy.deepcopy(kept)
    nn.init.zeros_(other.fc.weight)
    nn.init.zeros_(other.fc.bias)
    with autocast(CPU, "bf16"):
        assert other(IMAGE).abs().max() == 0 < kept(IMAGE).abs().max()
    assert dtypes(other, "fc") == {"fc": torch.float32}


# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_torch_compile_sees_one_graph(backend):
    model = model_of(blocks=1)
    keep_fp32(model, ["BatchNorm2d", "layer4.*", "fc"], CPU)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with autocast(CPU, "bf16"):
        out, expected = compiled(IMAGE), model(IMAGE)
    assert out.dtype == torch.float32 and torch.equal(out, expected)
    out.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


class Pair(NamedTuple):
    """Whose constructor takes its fields singly."""

    left: torch.Tensor
    right: torch.Tensor


def test_other_inputs_than_one_tensor():
    class Sum(nn.Module):
        def forward(self, several, *, scale, count):
            assert not torch.is_autocast_enabled("cpu") and count.dtype == torch.int64
            return sum(several) * scale["by"]

    model = nn.ModuleDict({"sum": Sum()})
    assert keep_fp32(model, ["Sum"], CPU) == []
    half = torch.ones(2, dtype=torch.bfloat16)
    with autocast(CPU, "bf16"):
        out = model["sum"]([half, half], scale={"by": half}, count=torch.tensor(3))
        named = model["sum"](Pair(half, half), scale={"by": half}, count=torch.tensor(3))
    assert out.dtype == torch.float32 and out.tolist() == [2.0, 2.0]
    assert named.dtype == torch.float32 and named.tolist() == [2.0, 2.0]
