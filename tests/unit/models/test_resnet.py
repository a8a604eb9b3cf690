"""ResNet against torchvision's: names, shapes, numbers, gradients, and the weights a seed gives."""

import dataclasses

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from sightline.errors import BadCheckpoint, UsageError
from sightline.models.resnet import Bottleneck, ResNet, ResNetConfig
from sightline.parts import DataSpec

DEPTHS = (18, 34, 50, 101, 152)
PUBLISHED_PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


def spec(classes: int = 1000, channels: int = 3) -> DataSpec:
    names = tuple(f"class {number}" for number in range(classes))
    return DataSpec(names, channels, size=(64, 64), mean=(0.5,) * channels, std=(0.25,) * channels)


def ours(depth: int, classes: int = 1000, **fields) -> ResNet:
    return ResNetConfig(depth=depth, **fields).build(spec(classes))


def theirs(depth: int, classes: int = 1000, **fields) -> nn.Module:
    return getattr(torchvision.models, f"resnet{depth}")(num_classes=classes, **fields)


def twins(depth: int, classes: int = 10) -> tuple[nn.Module, nn.Module]:
    """Torchvision's network with statistics of its own, and ours with its state dict."""
    torch.manual_seed(depth)
    reference = theirs(depth, classes)
    with torch.device("meta"):  # to be filled below
        model = ours(depth, classes)
    for name, buffer in reference.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    model.load_state_dict({key: tensor.clone() for key, tensor in reference.state_dict().items()}, assign=True)
    return reference, model


@pytest.mark.parametrize("depth", DEPTHS)
def test_names_and_shapes_are_torchvisions(depth):
    with torch.device("meta"):
        found, expected = ours(depth).state_dict(), theirs(depth).state_dict()

    assert [(key, t.shape, t.dtype) for key, t in found.items()] == [
        (key, t.shape, t.dtype) for key, t in expected.items()
    ]


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameter_counts_are_the_published_ones(depth):
    with torch.device("meta"):
        model = ours(depth)

    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[depth]


@pytest.mark.parametrize("depth", [34])
def test_logits_equal_torchvisions(depth):
    reference, model = twins(depth)
    pixels = torch.randn(2, 3, 96, 80)

    with torch.no_grad():
        torch.testing.assert_close(model.eval()(pixels), reference.eval()(pixels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [pytest.param(18, marks=pytest.mark.slow), 50])
def test_gradients_and_statistics_equal_torchvisions_in_training(depth):
    reference, model = twins(depth)
    pixels, labels = torch.randn(4, 3, 64, 64), torch.tensor([1, 3, 5, 7])

    for network in (reference, model):
        nn.functional.cross_entropy(network.train()(pixels), labels).backward()

    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
        )
    torch.testing.assert_close(dict(model.named_buffers()), dict(reference.named_buffers()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("depth", "fields"), [(18, {}), (50, {"zero_init_residual": True})])
def test_a_seed_gives_the_weights_torchvision_would_draw(depth, fields):
    torch.manual_seed(7)
    expected = theirs(depth, **fields).state_dict()
    torch.manual_seed(7)
    found = ours(depth, **fields).state_dict()

    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_zero_init_residual_makes_blocks_the_identity():
    block = next(m for m in ours(50, width=8, zero_init_residual=True).layer2[1:] if isinstance(m, Bottleneck)).eval()
    x = torch.rand(1, 64, 4, 4)

    assert torch.equal(block(x), x)


def test_width_scales_every_stage():
    model = ours(34, classes=3, width=16)

    assert model.conv1.out_channels == 16
    assert [stage[-1].conv2.out_channels for stage in (model.layer1, model.layer2, model.layer3, model.layer4)] == [
        16,
        32,
        64,
        128,
    ]
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_small_stem_keeps_the_resolution():
    sizes = {}
    for stem in ("7x7", "3x3"):
        model = ours(18, classes=4, width=8, stem=stem)
        model.layer1.register_forward_hook(lambda m, i, out, stem=stem: sizes.update({stem: tuple(out.shape[2:])}))
        model(torch.randn(2, 3, 32, 32))

    assert sizes == {"7x7": (8, 8), "3x3": (32, 32)}


def test_channels_and_classes_come_from_the_data():
    model = ResNetConfig(depth=18, width=8).build(spec(classes=5, channels=1))

    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 5)


def test_channels_last_is_kept_to_the_last_stage():
    model = ours(50, classes=4, width=8).to(memory_format=torch.channels_last)
    kept = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda m, i, out: kept.append(out.is_contiguous(memory_format=torch.channels_last))
            )

    model(torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last))

    assert len(kept) == 53
    assert all(kept)


def test_forward_is_one_graph_for_the_compiler():
    model = ours(50, classes=4, width=8).train()
    pixels = torch.randn(2, 3, 32, 32)

    graph = torch.export.export(model, (pixels,), strict=False)

    torch.testing.assert_close(graph.module()(pixels), model(pixels))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 20}, "model.depth=20 is unknown; use one of 18, 34, 50, 101, 152"),
        ({"width": 0}, "model.width=0 must be at least 1"),
        ({"stem": "5x5"}, "model.stem='5x5' is unknown; use one of 7x7, 3x3"),
    ],
)
def test_impossible_fields_are_usage_errors(fields, message):
    with pytest.raises(UsageError) as error:
        ResNetConfig(**fields)

    assert message in str(error.value)


def test_build_starts_from_weights_and_keeps_a_fresh_head(tmp_path):
    path = tmp_path / "start.safetensors"
    source = ours(18, classes=10, width=8)
    save_file(source.state_dict(), path)
    config = ResNetConfig(depth=18, width=8, weights=str(path))

    same, other = config.build(spec(10)), config.build(spec(3))
    same_note, other_note = config.start_from(same), config.start_from(other)

    assert all(torch.equal(t, source.state_dict()[key]) for key, t in same.state_dict().items())
    assert torch.equal(other.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    assert other.fc.weight.shape == (3, 64)
    assert "all 122 tensors" in same_note
    assert "the head starts at random: " in other_note
    with pytest.raises(BadCheckpoint):
        dataclasses.replace(config, depth=34).start_from(ours(34, classes=10, width=8))


def test_without_weights_there_is_no_note():
    assert ResNetConfig(depth=18, width=8).start_from(ours(18, classes=2, width=8)) == ""
