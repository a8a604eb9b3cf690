"""Classifiers by name, against torchvision."""

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from sightline.errors import UsageError
from sightline.models.arch import ArchConfig, names
from sightline.models.resnet import ResNet
from sightline.parts import DataSpec

SPEC = DataSpec(("a", "b", "c"), 3, (64, 64), (0.5,) * 3, (0.25,) * 3)


def test_every_classifier_of_torchvision_has_its_name():
    known = set(torchvision.models.list_models(module=torchvision.models))
    assert known <= set(names()) and len(known) > 70


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_resnets_are_ours_and_equal(arch):
    torch.manual_seed(1)
    ours = ArchConfig(arch=arch).build(SPEC)
    torch.manual_seed(1)
    theirs = torchvision.models.get_model(arch, num_classes=3)
    assert isinstance(ours, ResNet)
    pictures = torch.randn(2, 3, 64, 64)
    assert torch.allclose(ours.eval()(pictures), theirs.eval()(pictures), atol=1e-5)


@pytest.mark.parametrize("arch", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet", "squeezenet1_1"])
def test_others_are_torchvisions_and_give_plain_logits_in_training(arch):
    model = ArchConfig(arch=arch).build(SPEC)
    assert not isinstance(model, ResNet)
    assert model.train()(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def test_starting_weights_are_loaded_and_the_head_may_differ(tmp_path):
    source = ArchConfig(arch="mobilenet_v3_small").build(SPEC)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    config = ArchConfig(arch="mobilenet_v3_small", weights=str(tmp_path / "w.safetensors"))
    model = config.build(SPEC)
    config.start_from(model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), source.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch": "resnet_50"}, "did you mean resnet50"),
        ({"arch": "vgg11", "zero_init_residual": True}, "not for vgg11"),
    ],
)
def test_impossible_names_are_usage_errors(fields, message):
    with pytest.raises(UsageError, match=message):
        ArchConfig(**fields)
