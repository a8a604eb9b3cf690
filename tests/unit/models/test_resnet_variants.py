"""ResNets beyond torchvision's v1.5: ResNeXt, v1, v2, TensorFlow's padding and initial weights, each against another
implementation or a reference of a few lines."""

import math

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional

from sightline.errors import UsageError
from sightline.models.resnet import Bottleneck, ResNetConfig, SameConv2d, SameMaxPool2d, same_padding
from sightline.parts import DataSpec


def build(classes: int = 10, **fields) -> nn.Module:
    spec = DataSpec(tuple(map(str, range(classes))), 3, (64, 64), (0.5,) * 3, (0.25,) * 3)
    return ResNetConfig(**fields).build(spec)


def filled(state: dict[str, torch.Tensor], **fields) -> nn.Module:
    """A network of ours with these weights; it draws none, which would take longer than all the rest."""
    with torch.device("meta"):
        model = build(**fields)
    model.load_state_dict(state, assign=True)
    return model


def with_statistics(model: nn.Module) -> nn.Module:
    for name, tensor in model.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(std=0.1)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def assert_same_logits(model: nn.Module, reference: nn.Module, *size: int) -> None:
    pixels = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(pixels), reference(pixels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("groups", "width"), [(32, 4), (1, 16)], ids=["resnext50_32x4d", "narrow"])
def test_groups_and_their_width_are_torchvisions(groups, width):
    torch.manual_seed(3)
    layers = (torchvision.models.resnet.Bottleneck, [3, 4, 6, 3])
    reference = torchvision.models.ResNet(*layers, num_classes=10, groups=groups, width_per_group=width)
    torch.manual_seed(3)
    model = build(depth=50, groups=groups, group_width=width)
    assert all(torch.equal(t, reference.state_dict()[key]) for key, t in model.state_dict().items())

    model.load_state_dict(with_statistics(reference).state_dict(), assign=True)
    assert_same_logits(model, reference, 32, 40)


def test_resnext101_32x4d_equals_timms():
    import timm

    reference = with_statistics(timm.create_model("resnext101_32x4d", num_classes=10))
    model = filled(reference.state_dict(), depth=101, groups=32, group_width=4)

    assert_same_logits(model, reference, 64, 64)


@pytest.mark.parametrize("depth", [18, 50])
def test_v2_equals_timms(depth):
    import timm

    reference = with_statistics(timm.create_model(f"resnetv2_{depth}", num_classes=10))
    state = {}
    for key, tensor in reference.state_dict().items():
        key = key.replace("stem.conv.", "conv1.").replace("downsample.conv.", "downsample.0.").replace("blocks.", "")
        for number in range(4):
            key = key.replace(f"stages.{number}.", f"layer{number + 1}.")
        key = key.replace("head.fc.", "fc.").replace(".norm", ".bn").replace("norm.", "bn_out.", not key.find("norm."))
        state[key] = tensor.flatten(1) if key == "fc.weight" else tensor

    model = filled(state, depth=depth, version="v2")

    assert_same_logits(model, reference, 64, 72)


def test_v1_strides_in_the_first_convolution():
    """Keras's six networks are compared in test_keras_weights.py; this is where the difference sits."""
    strides = {
        version: [(block.conv1.stride[0], block.conv2.stride[0]) for block in build(version=version, width=8).layer2]
        for version in ("v1", "v1.5")
    }

    assert strides == {"v1": [(2, 1)] + [(1, 1)] * 3, "v1.5": [(1, 2)] + [(1, 1)] * 3}


def test_keras_v2_strides_in_the_last_block_of_three_stages():
    model = build(version="v2_keras", width=8)

    found = [
        [block.conv2.stride[0] for block in stage] for stage in (model.layer1, model.layer2, model.layer3, model.layer4)
    ]

    assert found == [[1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 1, 1, 2], [1, 1, 1]]


def test_sizes_of_same_padding():
    assert same_padding(224, 7, 2) == (2, 3)
    assert [same_padding(size, 3, 2) for size in (112, 56, 28, 14)] == [(0, 1)] * 4
    assert same_padding(7, 3, 2) == (1, 1)
    assert same_padding(56, 1, 2) == (0, 0)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (15, 15), (16, 15), (2, 1)])
@pytest.mark.parametrize("kernel", [3, 7])
def test_same_padding_puts_the_odd_pixel_last(kernel, height, width):
    conv = SameConv2d(4, 6, kernel, stride=2, groups=2)
    x = torch.randn(2, 4, height, width)
    half = kernel // 2
    pads = {0: (half - 1, half), 1: (half, half)}  # of even and of odd sizes
    (top, bottom), (left, right) = pads[height % 2], pads[width % 2]

    padded = functional.pad(x, (left, right, top, bottom))
    expected = functional.conv2d(padded, conv.weight, conv.bias, stride=2, groups=2)

    torch.testing.assert_close(conv(x), expected)
    assert conv(x).shape[2:] == (math.ceil(height / 2), math.ceil(width / 2))


@pytest.mark.parametrize(("height", "width"), [(16, 16), (15, 15), (16, 15), (2, 1), (1, 2)])
def test_same_pool_ignores_what_it_pads(height, width):
    x = -torch.rand(2, 3, height, width) - 1
    pads = [same_padding(size, 3, 2) for size in (height, width)]
    padded = functional.pad(x, (*pads[1], *pads[0]), value=-math.inf)

    assert torch.equal(SameMaxPool2d()(x), functional.max_pool2d(padded, 3, 2))


@pytest.mark.parametrize("padding", ["same", "same_but_stem"])
@pytest.mark.parametrize("depth", [18, 50])
def test_a_network_with_same_padding_is_torchs_on_padded_input(depth, padding):
    """By hooks that pad by hand before torch's own layers with the padding taken out."""
    torch.manual_seed(0)
    model = with_statistics(build(depth=depth, width=8, padding=padding))
    reference = build(depth=depth, width=8)
    reference.load_state_dict(model.state_dict())
    for name, layer in reference.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.stride[0] == 2 and layer.kernel_size[0] > 1
        if strided and not (name == "conv1" and padding == "same_but_stem"):
            pads = (2, 3, 2, 3) if name == "conv1" else (0, 1, 0, 1)
            layer.padding = (0, 0)
            layer.register_forward_pre_hook(lambda m, x, pads=pads: functional.pad(x[0], pads))
        elif isinstance(layer, nn.MaxPool2d):
            layer.padding = 0
            layer.register_forward_pre_hook(lambda m, x: functional.pad(x[0], (0, 1, 0, 1), value=-math.inf))

    assert_same_logits(model, reference.eval(), 96, 64)
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        plain = build(depth=depth, width=8)
        plain.load_state_dict(model.state_dict())
        assert not torch.allclose(model(pixels), plain.eval()(pixels), atol=1e-3)


@pytest.mark.parametrize("padding", [pytest.param("same", marks=pytest.mark.slow), "same_but_stem"])
def test_padding_keeps_channels_last_and_one_graph(padding):
    model = build(depth=18, width=8, padding=padding).train().to(memory_format=torch.channels_last)
    pixels = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    kept = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, i, out: kept.append(out.is_contiguous(memory_format=torch.channels_last))
            )

    expected = model(pixels)

    assert len(kept) == 20 and all(kept)
    for module in model.modules():
        module._forward_hooks.clear()
    graph = torch.export.export(model, (pixels,), strict=False)
    torch.testing.assert_close(graph.module()(pixels), expected)


@pytest.mark.parametrize("fields", [{"version": "v2"}, {"version": "v2_keras"}, {"version": "v1", "bias": True}])
def test_every_parameter_learns(fields):
    model = build(depth=50, width=8, **fields).train()

    functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.tensor([0, 1, 2, 3])).backward()

    # A bias in front of a batch-norm gets the rounding error of a zero gradient.
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in still if not name.endswith(".bias")] == []


@pytest.mark.parametrize(
    ("init", "gain"), [pytest.param("he_truncated", 2, marks=pytest.mark.slow), ("variance_scaling", 1)]
)
def test_truncated_starts_have_tensorflows_deviation(init, gain):
    torch.manual_seed(0)
    model = build(depth=50, width=32, groups=32, group_width=8, init=init)

    for conv in (model.layer1[0].conv2, model.layer3[0].conv1, model.layer4[0].conv2, model.layer4[0].downsample[0]):
        fan_in = conv.kernel_size[0] ** 2 * conv.in_channels // conv.groups
        deviation = math.sqrt(gain / fan_in)
        weight = conv.weight.detach()
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
        assert abs(weight.mean().item()) < 0.02 * deviation
        assert weight.abs().max() <= 2 * deviation / 0.8796256
        assert weight.abs().max() > 1.95 * deviation / 0.8796256


def test_glorot_starts_are_uniform_within_keras_limit():
    torch.manual_seed(0)
    model = build(classes=1000, depth=50, version="v1", bias=True, init="glorot", head_init="glorot")

    conv = model.layer3[0].conv2
    limit = math.sqrt(6 / (9 * 256 + 9 * 256))
    assert conv.weight.abs().max().item() == pytest.approx(limit, rel=1e-3) and conv.weight.abs().max() <= limit
    assert conv.weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
    limit = math.sqrt(6 / (2048 + 1000))
    assert model.fc.weight.abs().max().item() == pytest.approx(limit, rel=1e-3) and model.fc.weight.abs().max() <= limit
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))


def test_a_normal_head_has_a_deviation_of_a_hundredth():
    torch.manual_seed(0)
    head = build(classes=1001, depth=18, width=32, head_init="normal").fc

    assert head.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert head.weight.abs().max() > 0.035  # not cut
    assert not head.bias.any()


def test_batch_norms_take_momentum_and_eps_everywhere():
    for version in ("v1.5", "v2"):
        model = build(depth=18, width=8, version=version, bn_momentum=0.01, bn_eps=1.001e-5)
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert len(norms) in (17, 20) and {(m.momentum, m.eps) for m in norms} == {(0.01, 1.001e-5)}


def test_tensorflows_basic_networks_project_in_every_stage():
    model = build(depth=18, width=8, project_every_stage=True)

    assert model.layer1[0].downsample is not None and model.layer1[1].downsample is None


def test_v2_ends_move_the_first_norm_before_the_head():
    """Against the same blocks by hand: no norm and ReLU after the stem, both after the last stage."""
    model = build(depth=50, width=16, version="v2_ends", padding="same").eval()
    pixels = torch.randn(2, 3, 64, 64)
    x = model.maxpool(model.conv1(pixels))
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        x = stage(x)
    x = torch.relu(functional.batch_norm(x, model.bn_out.running_mean, model.bn_out.running_var, eps=1e-5))

    torch.testing.assert_close(model(pixels), model.fc(x.mean((2, 3))))
    plain = build(depth=50, width=16, padding="same").state_dict()
    assert set(plain) ^ set(model.state_dict()) == {
        f"{norm}.{name}"
        for norm in ("bn1", "bn_out")
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_zero_init_residual_works_for_resnext():
    model = build(depth=50, groups=32, group_width=4, zero_init_residual=True)

    blocks = [m for m in model.modules() if isinstance(m, Bottleneck)]
    assert len(blocks) == 16 and not any(block.bn3.weight.any() for block in blocks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "v3"}, "model.version='v3' is unknown; use one of v1, v1.5, v2, v2_keras"),
        ({"padding": "valid"}, "model.padding='valid' is unknown; use one of torch, same, same_but_stem"),
        ({"init": "zeros"}, "model.init='zeros' is unknown"),
        ({"head_init": "zeros"}, "model.head_init='zeros' is unknown"),
        ({"groups": 0}, "model.groups=0 must be at least 1"),
        ({"depth": 18, "groups": 32}, "depth=18 has basic blocks, use a depth of 50 or more"),
        ({"depth": 34, "group_width": 4}, "are for bottlenecks"),
        ({"width": 24, "group_width": 4}, "makes groups of 1.5 channels"),
        ({"width": 24, "group_width": 4}, "use a multiple of 16 for the width"),
        ({"project_every_stage": True}, "is for depth 18 and 34"),
        ({"depth": 18, "version": "v2_keras"}, "has bottlenecks only, not depth=18"),
        ({"version": "v2_keras", "padding": "same"}, "model.padding=same cannot be combined with version=v2_keras"),
        ({"version": "v2", "bias": True}, "model.bias is for v1 and v1.5"),
        ({"version": "v2", "zero_init_residual": True}, "a block that starts at 0 would stay at 0"),
        ({"bn_momentum": 0.0}, "model.bn_momentum=0.0 must be in (0, 1]"),
        ({"bn_momentum": 1.5}, "model.bn_momentum=1.5 must be in (0, 1]"),
        ({"bn_eps": 0.0}, "model.bn_eps=0.0 must be a finite number, above 0"),
        ({"bn_eps": math.nan}, "model.bn_eps=nan must be a finite number, above 0"),
    ],
)
def test_impossible_combinations_are_usage_errors(fields, message):
    with pytest.raises(UsageError) as error:
        ResNetConfig(**fields)

    assert message in str(error.value)
