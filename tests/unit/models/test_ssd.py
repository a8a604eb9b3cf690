"""The detector against torchvision's trunk, TensorFlow's own numbers, counts by hand, and impulses for its windows."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sightline.errors import BadCheckpoint, UsageError
from sightline.models.resnet import ResNetConfig
from sightline.models.ssd import Ssd, SsdConfig, feature_sizes
from sightline.parts import DataSpec

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "tf_checkpoint"


def spec(classes: int = 80, size: int = 300) -> DataSpec:
    return DataSpec(tuple(map(str, range(classes))), 3, (size, size), (0.5,) * 3, (0.25,) * 3)


def build(classes: int = 80, size: int = 300, **fields) -> Ssd:
    torch.manual_seed(0)
    return SsdConfig(**fields).build(spec(classes, size))


def with_statistics(model: nn.Module) -> nn.Module:
    for name, tensor in model.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(std=0.1)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def count(parameters) -> int:
    return sum(p.numel() for p in parameters)


# The network


@pytest.mark.parametrize("padding", ["torch", "same"])
def test_sizes_and_counts_are_the_published_ones(padding):
    with torch.device("meta"):
        model = build(padding=padding)
        logits, offsets, anchors = model(torch.empty(2, 3, 300, 300))

    assert (logits.shape, offsets.shape, anchors.shape) == ((2, 8732, 81), (2, 8732, 4), (8732, 4))
    assert feature_sizes(300) == [38, 19, 10, 5, 3, 1]
    assert count(model.parameters()) == 19_972_534
    assert count(model.trunk.parameters()) == 8_170_304
    assert count(model.extras.parameters()) == 3_574_400
    shares = [head.weight.numel() * 81 // 85 + head.bias.numel() * 81 // 85 for head in model.heads]
    assert sum(shares) == 7_840_638
    assert count(model.heads.parameters()) - sum(shares) == 387_192
    layers = Counter(type(layer).__name__.replace("Stem", "").replace("Same", "") for layer in model.trunk.modules())
    assert (layers["Conv2d"], layers["BatchNorm2d"]) == (29, 29)


@pytest.mark.parametrize("depth", [pytest.param(18, marks=pytest.mark.slow), 34])
def test_the_trunk_is_torchvisions_without_the_third_stride(depth, tmp_path):
    torch.manual_seed(1)
    reference = with_statistics(torchvision.models.get_model(f"resnet{depth}", num_classes=5))
    save_file(reference.state_dict(), tmp_path / "resnet.safetensors")
    for layer in (reference.layer3[0].conv1, reference.layer3[0].downsample[0]):
        layer.stride = (1, 1)
    model = build(depth=depth)
    note = SsdConfig(depth=depth, weights=str(tmp_path / "resnet.safetensors")).start_from(model)

    pixels = torch.randn(1, 3, 100, 100)
    x = reference.maxpool(reference.relu(reference.bn1(reference.conv1(pixels))))
    expected = reference.layer3(reference.layer2(reference.layer1(x)))

    torch.testing.assert_close(model.eval().trunk(pixels), expected, rtol=1e-5, atol=1e-5)
    assert expected.shape == (1, 256, 13, 13)
    assert " of layer4., fc. are not used" in note


def test_scores_and_boxes_come_in_the_order_of_the_anchors():
    """Two separate convolutions per level and a loop over cells and anchors, as the original lays them out."""
    model = with_statistics(build(classes=5, size=80, width=4))
    pixels = torch.randn(2, 3, 80, 80)
    with torch.no_grad():
        logits, offsets, anchors = model(pixels)
        x = model.trunk(pixels)
        features = [x]
        for level in model.extras:
            x = torch.relu(level.conv2(torch.relu(level.conv1(x))))
            features.append(x)
    at = 0
    for head, x, per_cell in zip(model.heads, features, (4, 6, 6, 6, 4, 4), strict=False):
        weight, bias = head.weight.view(per_cell, 10, -1, 3, 3), head.bias.view(per_cell, 10)
        scores, boxes = (
            nn.functional.conv2d(x, weight[:, part].flatten(0, 1), bias[:, part].flatten(), padding=1)
            for part in (slice(0, 6), slice(6, 10))
        )
        for row in range(x.shape[2]):
            for column in range(x.shape[3]):
                for anchor in range(per_cell):
                    ours = logits[:, at], offsets[:, at]
                    theirs = (
                        scores[:, anchor * 6 : anchor * 6 + 6, row, column],
                        boxes[:, anchor * 4 : anchor * 4 + 4, row, column],
                    )
                    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
                    at += 1
    assert at == len(anchors) == logits.shape[1]


def test_anchors_are_the_golden_ones_and_not_in_checkpoints():
    model = build(width=1)

    torch.testing.assert_close(model.anchors[0], torch.tensor([0.0133333, 0.0133333, 0.07, 0.07]), atol=1e-6, rtol=0)
    torch.testing.assert_close(model.anchors[-1], torch.tensor([0.5, 0.5, 1.0, 0.6151829]), atol=1e-6, rtol=0)
    assert "anchors" not in model.state_dict()
    assert "anchors" in dict(model.named_buffers())


@pytest.mark.parametrize("padding", ["torch", "same"])
def test_levels_have_as_many_cells_as_the_network_computes(padding):
    for size in (1, 2, 7, 23, 48, 75, 101, 147, 203):
        model, found = build(classes=1, size=size, width=1, depth=18, padding=padding).eval(), []
        for head in model.heads:
            head.register_forward_pre_hook(lambda _, inputs, found=found: found.append(tuple(inputs[0].shape[2:])))
        logits, _, anchors = model(torch.zeros(1, 3, size, size))
        assert found == [(cells, cells) for cells in feature_sizes(size)] and logits.shape[1] == len(anchors), size


@pytest.mark.parametrize(
    ("size", "cells"), [(128, [16, 8, 4, 2]), (256, [32, 16, 8, 4, 2]), (512, [64, 32, 16, 8, 6, 4]), (8, [1, 1, 1, 1])]
)
def test_other_sizes_of_image(size, cells):
    """Fewer levels where no cell would be left. Anchors spread over the image, and keep their share of it."""
    model = build(classes=3, size=size, width=2).eval()
    per_cell = (4, 6, 6, 6, 4, 4)[: len(cells)]

    logits, offsets, anchors = model(torch.randn(1, 3, size, size))

    assert feature_sizes(size) == cells
    counts = [n * n * each for n, each in zip(cells, per_cell, strict=True)]
    assert logits.shape == (1, sum(counts), 4)
    assert offsets.shape == (1, sum(counts), 4)
    sides = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87)[: len(cells)]
    for level, (centres, side) in enumerate(zip(anchors.split(counts), sides, strict=True)):
        stride = 8 * 2**level / size if level < 4 else 1 / cells[level]
        expected = (torch.arange(cells[level]) + 0.5).mul(stride).clamp(max=1)
        torch.testing.assert_close(centres[:, 0].unique(), expected.unique())
        assert centres[0, 2:].tolist() == pytest.approx([side, side])


def windows(padding: str) -> dict[str, list[int]]:
    """First and last pixel that the output in the second row and column sees, per strided layer."""
    model = build(width=1, padding=padding)
    found = {}
    layers = {"pool": (model.trunk.maxpool, 150), "stem": (model.trunk.conv1, 300)}
    layers |= {f"block{n + 7}": (model.extras[n].conv2, size) for n, size in enumerate((38, 19, 10))}
    for name, (layer, size) in layers.items():
        channels = 1 if name == "pool" else layer.in_channels
        if name != "pool":
            nn.init.ones_(layer.weight)
        seen = []
        for place in range(12 if name == "stem" else 8):
            impulse = torch.zeros(1, channels, size, size)
            impulse[..., place, place] = 1
            rest = torch.zeros_like(impulse)
            if (layer(impulse) - layer(rest))[..., 1, 1].abs().sum() > 0:
                seen.append(place)
        found[name] = [seen[0], seen[-1]]
    return found


def test_same_padding_shifts_three_windows_by_a_pixel():
    torchs, same = windows("torch"), windows("same")

    blocks = {"block7": [1, 3], "block8": [1, 3], "block9": [1, 3]}
    assert torchs == {"pool": [1, 3], "stem": [0, 5]} | blocks  # the stem's begins a pixel before the image
    assert same == torchs | {"pool": [2, 4], "block7": [2, 4], "block9": [2, 4]}


# Start


def test_tensorflows_start():
    model = build(width=16)

    for name, layer in model.trunk.named_modules():
        if isinstance(layer, nn.Conv2d):
            deviation = math.sqrt(1 / layer.weight[0].numel())
            assert layer.weight.abs().max() <= 2 * deviation / 0.87962566 + 1e-6
            if layer.weight.numel() > 5000:
                assert layer.weight.std().item() == pytest.approx(deviation, rel=0.05)
        elif isinstance(layer, nn.BatchNorm2d):
            is_last = name.endswith(".bn2")
            assert torch.equal(layer.weight, torch.full_like(layer.weight, 0.0 if is_last else 1.0)), name
            assert not layer.bias.any()
    for layer in model.extras.modules():
        if isinstance(layer, nn.Conv2d):
            fans = layer.weight[0].numel() + layer.weight[:, 0].numel()
            assert_uniform(layer.weight, math.sqrt(6 / fans))
            assert not layer.bias.any()


def assert_uniform(weight: torch.Tensor, bound: float) -> None:
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.98 * bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize("init", ["tf", "torch"])
def test_heads_start_as_two_convolutions_would(init):
    model = build(width=8, init=init)

    for head, per_cell in zip(model.heads, (4, 6, 6, 6, 4, 4), strict=True):
        weight = head.weight.view(per_cell, 85, *head.weight.shape[1:])
        for part in (weight[:, :81], weight[:, 81:]):
            alone = nn.Conv2d(head.in_channels, part.shape[0] * part.shape[1], 3)
            fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(alone.weight)
            assert_uniform(part, math.sqrt(6 / (fan_in + fan_out)))
        assert head.bias.any().item() == (init == "torch")


def test_torchs_start_is_torchvisions_for_the_trunk():
    trunk = build(width=32, init="torch").trunk

    for layer in trunk.modules():
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 5000:
            deviation = math.sqrt(2 / (layer.out_channels * layer.kernel_size[0] ** 2))
            assert layer.weight.std().item() == pytest.approx(deviation, rel=0.05)
        elif isinstance(layer, nn.BatchNorm2d):
            assert layer.weight.min() == 1


def test_freezing_takes_four_layers_out_of_training_but_not_their_statistics():
    model = build(classes=3, size=32, width=2, freeze="first_block")

    sum(x.sum() for x in model(torch.randn(2, 3, 32, 32))[:2]).backward()

    without = {name for name, p in model.named_parameters() if p.grad is None}
    stem = {"conv1.weight", "bn1.weight", "bn1.bias"}
    assert without == {f"trunk.{place}{name}" for place in ("", "layer1.0.") for name in stem}
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == without
    assert model.trunk.bn1.running_mean.any()
    assert all(p.requires_grad for p in build(width=1).parameters())


def test_the_momentum_reaches_every_batch_norm():
    model = build(width=1, bn_momentum=0.3)
    assert {m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)} == {0.3}


# How it runs


def test_bf16_is_close():
    model = build(classes=20, size=128, width=16).train()
    pixels = torch.randn(4, 3, 128, 128).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 21, (4, len(model.anchors)))

    def loss() -> torch.Tensor:
        logits, offsets, _ = model(pixels)
        return nn.functional.cross_entropy(logits.float().transpose(1, 2), labels) + offsets.float().abs().mean()

    full = loss()
    with torch.autocast("cpu", torch.bfloat16):
        half = loss()

    assert half.item() == pytest.approx(full.item(), rel=0.02)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_outputs_are_put_together_by_one_copy_each_in_channels_last():
    model = build(classes=3, size=64, width=2).to(memory_format=torch.channels_last).eval()
    pixels = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)

    with torch.no_grad(), Operations() as seen:
        logits, offsets, _ = model(pixels)

    assert seen.names["cat"] == 2
    assert not seen.names["clone"] + seen.names["copy_"] + seen.names["_to_copy"]
    assert logits.is_contiguous()
    assert offsets.is_contiguous()


# The other padding gives the same graph without the pads.
@pytest.mark.parametrize("padding", [pytest.param("torch", marks=pytest.mark.slow), "same"])
# Dynamo finds what breaks a graph; what AOTAutograd makes of it costs as much again.
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager_default_partitioner", marks=pytest.mark.slow)])
def test_it_compiles_as_one_graph(backend, padding):
    model = build(classes=3, size=64, depth=18, width=2, padding=padding)
    pixels = torch.randn(2, 3, 64, 64)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = compiled(pixels), model(pixels)

    torch.testing.assert_close(ours, theirs)


# Weights


@pytest.mark.parametrize("name", ["trunk", "trunk.index"])
def test_a_checkpoint_of_tensorflow_gives_tensorflows_features(name):
    config = SsdConfig(width=2, padding="same", weights=str(GOLDEN / name))
    model = config.build(spec())
    golden = json.loads((GOLDEN / "trunk.json").read_text())

    note = config.start_from(model)

    assert note == f"trunk: loaded all 145 tensors of {GOLDEN / 'trunk.index'}"
    for size, shape in golden["shapes"].items():
        pixels = torch.arange(int(size) ** 2 * 3, dtype=torch.float64).mul(0.37).sin().float()
        found = model.eval().trunk(pixels.reshape(1, int(size), int(size), 3).permute(0, 3, 1, 2))
        expected = torch.tensor(golden["features"][size]).reshape(shape).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_tensorflow_under_torchs_padding_is_reported():
    config = SsdConfig(width=2, padding="torch", weights=str(GOLDEN / "trunk"))
    assert config.start_from(config.build(spec())).endswith("made with padding=same, this network has padding=torch")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("trunk", {"width": 4}, r"does not fit the model: conv1.weight 2x3x7x7 in the file, 4x3x7x7 in the model"),
        (
            "object",
            {},
            r"object.index lacks 145 of the 145 tensors of this trunk, conv2d/kernel first \(it holds _CHECKPOINTABLE_",
        ),
        ("missing", {}, r"missing does not exist; check the path"),
    ],
)
def test_other_checkpoints_of_tensorflow_are_refused(name, fields, message):
    config = SsdConfig(**{"width": 2, "weights": str(GOLDEN / name), **fields})
    model = config.build(spec())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}

    with pytest.raises(BadCheckpoint, match=message):
        config.start_from(model)

    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("key", ["layer3.5.bn2.running_var", "layer3.0.downsample.0.weight", "conv1.weight"])
def test_a_trunk_with_a_missing_tensor_is_refused(tmp_path, key):
    state = ResNetConfig(depth=34, width=4).build(spec(2)).state_dict()
    del state[key]
    save_file(state, tmp_path / "resnet.safetensors")
    config = SsdConfig(width=4, weights=str(tmp_path / "resnet.safetensors"))

    with pytest.raises(BadCheckpoint, match=f"missing: {key}"):
        config.start_from(config.build(spec()))


def test_a_whole_detector_loads_and_heads_of_other_classes_stay_fresh(tmp_path):
    donor = with_statistics(build(classes=7, size=64, width=2, init="torch"))
    torch.save({"model": donor.state_dict()}, tmp_path / "ssd.pth")
    config = SsdConfig(width=2, weights=str(tmp_path / "ssd.pth"))

    same = config.build(spec(7, 64))
    assert config.start_from(same) == f"loaded all {len(donor.state_dict())} tensors of {tmp_path / 'ssd.pth'}"
    assert all(torch.equal(same.state_dict()[key], tensor) for key, tensor in donor.state_dict().items())

    other = config.build(spec(9, 64))
    fresh = other.heads[0].weight.clone()
    assert "the head starts at random: 7 classes there, 9 here" in config.start_from(other)
    assert torch.equal(other.heads[0].weight, fresh)
    assert torch.equal(other.extras[2].conv2.weight, donor.extras[2].conv2.weight)


def test_without_weights_nothing_is_loaded():
    assert SsdConfig(width=1).start_from(build(width=1)) == ""


# What users can get wrong


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depth": 50}, "model.depth=50 is unknown; use one of 18, 34"),
        ({"padding": "valid"}, "model.padding='valid' is unknown; use one of torch, same"),
        ({"init": "he"}, "model.init='he' is unknown"),
        ({"freeze": "all"}, "model.freeze='all' is unknown"),
        ({"width": 0}, "model.width=0 must be at least 1"),
        ({"bn_momentum": 0.0}, r"model.bn_momentum=0.0 must be in \(0, 1\]; .* TensorFlow's 0.9"),
        ({"steps": (8.0, 16.0)}, "model.steps has 2 entries; expected 6, for 6 levels"),
        ({"scales": (1.0,) * 6}, "model.scales has 6 entries; expected 7, for 6 levels and one more"),
        ({"scales": (1.0,) * 6 + (-1.0,)}, r"model.scales=.* must be a finite number, above 0; pixels of a 300 image"),
        ({"ratios": ("2",) * 5}, "model.ratios has 5 entries; expected 6"),
        (
            {"ratios": ("2",) * 5 + ("2;3",)},
            "model.ratios='2' '2' '2' '2' '2' '2;3' must be numbers above 0 with commas",
        ),
        ({"ratios": ("0",) * 6}, "must be numbers above 0"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        SsdConfig(**fields)


def test_an_image_without_pixels_has_no_levels():
    with pytest.raises(UsageError, match="an image of 0 pixels has no levels; 300 is the published size"):
        feature_sizes(0)


def test_images_must_be_square():
    with pytest.raises(UsageError, match="square images, got 300x200"):
        SsdConfig().build(replace(spec(), size=(300, 200)))


def test_the_anchor_table_is_the_users():
    table = {"ratios": ("", "2", "2", "2", "2", "2"), "scales": (30.0, 60.0, 99.0, 153.0, 207.0, 261.0, 315.0)}
    model = build(classes=3, width=1, **table, steps=(4.0, 16.0, 32.0, 64.0, 100.0, 300.0))

    assert len(model.anchors) == 2 * 38**2 + 4 * (19**2 + 10**2 + 5**2 + 3**2 + 1)
    assert model.anchors[0].tolist() == pytest.approx([2 / 300, 2 / 300, 0.1, 0.1])
