"""Classifiers by name, against torchvision."""

import re
from dataclasses import replace

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from sightline.errors import UsageError
from sightline.models.arch import OURS, ArchConfig, names
from sightline.models.resnet import ResNet
from sightline.parts import DataSpec

SPEC = DataSpec(("a", "b", "c"), 3, (64, 64), (0.5,) * 3, (0.25,) * 3)


def test_every_classifier_of_torchvision_has_its_name():
    known = set(torchvision.models.list_models(module=torchvision.models))
    assert known <= set(names()) and len(known) > 70


@pytest.mark.parametrize("arch", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet", "squeezenet1_1"])
def test_others_are_torchvisions_and_give_plain_logits_in_training(arch):
    model = ArchConfig(arch=arch).build(SPEC)
    assert not isinstance(model, ResNet)
    assert model.train()(torch.randn(2, 3, 64, 64)).shape == (2, 3)


@pytest.mark.parametrize(
    ("arch", "parameters"),
    [
        ("resnet50_tf", 25_559_081),
        ("resnet50_tf1", 25_559_081),
        ("resnext101_32x4d", 44_179_753),
        ("resnext101_32x4d_tf", 44_179_753),
        ("resnext101v2_32x4d_tf", 44_179_753 - 2 * 64 + 2 * 2048),  # a norm of the head's size, none after the stem
    ],
)
def test_parameters_with_a_background_class_are_those_of_the_originals(arch, parameters):
    with torch.device("meta"):
        model = ArchConfig(arch=arch).build(replace(SPEC, classes=tuple(map(str, range(1001)))))

    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("arch", "size"),
    [
        ("keras_resnet50", 23_587_712),
        ("keras_resnet101", 42_658_176),
        ("keras_resnet152", 58_370_944),
        ("keras_resnet50v2", 23_564_800),
        ("keras_resnet101v2", 42_626_560),
        ("keras_resnet152v2", 58_331_648),
    ],
)
def test_sizes_without_the_head_are_those_of_keras(arch, size):
    with torch.device("meta"):
        state = ArchConfig(arch=arch).build(SPEC).state_dict()

    counted = [key for key in state if not key.startswith("fc.") and not key.endswith("num_batches_tracked")]
    assert sum(state[key].numel() for key in counted) == size


def test_groups_of_resnext101_grow_with_the_stages():
    with torch.device("meta"):
        model = ArchConfig(arch="resnext101_32x4d_tf").build(SPEC)

    widths = [stage[0].conv2.weight.shape[1] for stage in (model.layer1, model.layer2, model.layer3, model.layer4)]
    assert widths == [4, 8, 16, 32]
    assert {stage[0].conv2.groups for stage in (model.layer1, model.layer4)} == {32}


@pytest.mark.parametrize("arch", ["resnet18_tf", "resnet50v2_tf1", "keras_resnet50v2", "resnext50v2_32x4d_tf"])
def test_networks_of_the_originals_run(arch):
    with torch.device("meta"):
        model = ArchConfig(arch=arch).build(SPEC)

        assert isinstance(model, ResNet) and model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_every_name_of_ours_is_a_valid_config_of_its_depth():
    for name, config in OURS.items():
        assert str(config.depth) in name
        assert ArchConfig(arch=name).arch == name


def test_starting_weights_are_loaded_and_the_head_may_differ(tmp_path):
    source = ArchConfig(arch="mobilenet_v3_small").build(SPEC)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    config = ArchConfig(arch="mobilenet_v3_small", weights=str(tmp_path / "w.safetensors"))
    model = config.build(SPEC)
    config.start_from(model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), source.state_dict().values(), strict=True)
    )


def test_a_replaced_head_is_as_small_as_torch_draws_it(tmp_path):
    """MobileNet's is small anyway; EfficientNet's grows as classes become fewer: 0.58 for three of them."""
    file = tmp_path / "given.safetensors"
    for arch, features in (("efficientnet_b0", 1280), ("mobilenet_v3_small", 1024)):
        source = ArchConfig(arch=arch).build(replace(SPEC, classes=("a", "b", "c", "d")))
        save_file(source.state_dict(), file)
        heads = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            model = ArchConfig(arch=arch, weights=str(file)).build(SPEC)
            assert ArchConfig(arch=arch, weights=str(file)).load_weights(model).note
            heads.append(model.classifier[-1].weight.detach())
        assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
        assert 0.95 < heads[0].abs().max() * features**0.5 <= 1
        torch.manual_seed(1)
        plain = torchvision.models.get_model(arch, num_classes=3)
        drawn = torch.empty_like(heads[0]).uniform_(-(features**-0.5), features**-0.5)
        assert torch.equal(heads[0], drawn) and plain  # nothing else was drawn again
        torch.nn.init.constant_(model.classifier[-1].weight, torch.nan)  # as `evaluate RECIPE --weights` looks for it
        ArchConfig(arch=arch, weights=str(file)).load_weights(model)
        assert model.classifier[-1].weight.isnan().all()
        same = ArchConfig(arch=arch, weights=str(file)).build(replace(SPEC, classes=("x", "y", "z", "w")))
        ArchConfig(arch=arch, weights=str(file)).load_weights(same)
        assert torch.equal(same.classifier[-1].weight, source.classifier[-1].weight)  # one that fits is loaded


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch": "resnet_50"}, "did you mean resnet50"),
        ({"arch": "vgg11", "zero_init_residual": True}, "not for vgg11"),
        ({"arch": "keras_resnet50v2", "zero_init_residual": True}, "is for v1 and v1.5"),
    ],
)
def test_impossible_names_are_usage_errors(fields, message):
    with pytest.raises(UsageError, match=message):
        ArchConfig(**fields).build(SPEC)


def old_densenet(name: str) -> str:
    """As torchvision's published files name its layers."""
    return re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", name)


@pytest.mark.parametrize(
    ("arch", "options", "written"),
    [
        ("densenet121", {}, old_densenet),
        ("googlenet", {"init_weights": False, "aux_logits": True}, str),
        pytest.param("mnasnet0_5", {}, str, marks=pytest.mark.slow),
    ],
)
def test_published_files_of_torchvision_load_as_torchvision_loads_them(tmp_path, arch, options, written):
    """Old names, auxiliary heads that our network lacks, and a network whose own loader asks for a version."""
    source = torchvision.models.get_model(arch, weights=None, **options)
    torch.save({written(name): tensor for name, tensor in source.state_dict().items()}, tmp_path / "w.pth")
    config = ArchConfig(arch=arch, weights=str(tmp_path / "w.pth"))
    model = config.build(SPEC)

    note = config.start_from(model)

    assert f"the head starts at random: 1000 classes there, {len(SPEC.classes)} here" in note
    assert ("of aux1., aux2. are not used" in note) == (arch == "googlenet")
    ours, theirs = model.state_dict(), source.state_dict()
    same = [name for name in ours if torch.equal(ours[name], theirs[name])]
    assert len(ours) - len(same) == 2, "all but the head's weight and bias"
