"""A bottleneck as one operation: its algebra against the plain modules in float64, and which blocks have it.

What its kernels compute is in interpreted_bottleneck.py, which test_instance_norm.py runs.
"""

import copy

import pytest
import torch
from torch import nn

from sightline.kernels import bottleneck
from sightline.models import norm as sync
from sightline.models.resnet import Bottleneck, ResNet, ResNetConfig

# (channels in, stride, projection): a block inside a stage, the first of a later stage, the first of the network.
BLOCKS = {"identity": (64, 1, False), "strided": (32, 2, True), "first": (16, 1, True)}


def make_block(kind: str, width: int = 16) -> Bottleneck:
    torch.manual_seed(1)
    channels, stride, project = BLOCKS[kind]
    block = Bottleneck(ResNetConfig(), channels * width // 16, width, stride, project)
    for norm in block.layers()[1]:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return block.double().to(memory_format=torch.channels_last).train()


def draw(block: Bottleneck) -> torch.Tensor:
    x = torch.randn(3, block.conv1.in_channels, 7, 6, dtype=torch.double)  # odd and even sides
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("kind", BLOCKS)
def test_output_gradients_and_running_statistics_are_those_of_the_modules(kind):
    plain = make_block(kind)
    fused = copy.deepcopy(plain)
    x = draw(plain)
    also_x = x.detach().clone().requires_grad_()
    for _ in range(2):  # running statistics move twice
        expected, found = plain(x), bottleneck.run(fused, also_x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    outer = torch.randn_like(expected)
    expected.backward(outer)
    found.backward(outer)
    torch.testing.assert_close(also_x.grad, x.grad, rtol=1e-10, atol=1e-12)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for (name, one), (_, other) in zip(plain.named_parameters(), fused.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-11, msg=name)
    for (name, one), (_, other) in zip(plain.named_buffers(), fused.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", ["strided", pytest.param("identity", marks=pytest.mark.slow)])
def test_a_compiler_takes_the_operation_as_one(kind):
    plain = make_block(kind).float()
    fused, x = copy.deepcopy(plain), draw(plain).detach().float().requires_grad_()
    step = torch.compile(lambda x: bottleneck.run(fused, x), fullgraph=True, backend="aot_eager_default_partitioner")
    expected, found = plain(x), step(x)
    outer = torch.randn_like(expected)
    wanted = [x, *plain.parameters()]
    for one, other in zip(
        torch.autograd.grad(expected, wanted, outer),
        torch.autograd.grad(found, [x, *fused.parameters()], outer.contiguous()),  # gradients may come in any layout
        strict=True,
    ):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.bn2.running_var, plain.bn2.running_var)
    assert fused.bn3.num_batches_tracked == 1


@pytest.mark.slow
def test_the_operation_is_registered_as_torch_wants_it():
    block = make_block("strided")
    convs, norms = block.layers()
    given = [[conv.weight for conv in convs], [norm.weight for norm in norms], [norm.bias for norm in norms], 2, 1e-5]
    torch.library.opcheck(bottleneck._operation, (draw(block), *given))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ResNetConfig(), ""),
        (ResNetConfig(depth=101), ""),
        (ResNetConfig(version="v1"), "stride"),
        (ResNetConfig(groups=32, group_width=4), "groups"),
        (ResNetConfig(bias=True), "bias"),
        (ResNetConfig(padding="same"), "TensorFlow"),
        (ResNetConfig(width=32), "multiples of 64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_plain_bottlenecks_are_fused(config, said):
    with torch.device("meta"):
        model = ResNet(config, classes=10, channels=3)
    reasons = {bottleneck.why_not_fusable(m) for m in model.modules() if isinstance(m, Bottleneck)} - {""}
    assert reasons == set() if not said else all(said in reason for reason in reasons) and reasons


def test_norms_that_are_no_longer_plain_are_not_fused():
    block = make_block("identity", width=64)
    assert bottleneck.why_not_fusable(block) == ""
    block.bn2.__class__ = type("BatchNorm2d", (sync.SyncBatchNorm, nn.BatchNorm2d), {})
    assert "synchronised" in bottleneck.why_not_fusable(block)
    block = make_block("identity", width=64)
    block.bn3.momentum = None
    assert "differ" in bottleneck.why_not_fusable(block)
