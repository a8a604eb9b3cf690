"""The U-Net with a classifier as its way down, against torchvision, timm and the published number of parameters."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models._manipulate import adapt_input_conv
from torch import nn

from sightline.errors import BadCheckpoint, UsageError
from sightline.models.config import EncoderUnetConfig
from sightline.models.encoder_unet import adapted
from sightline.parts import DataSpec

LITE0 = Path(__file__).resolve().parents[3] / "../shared/data/weights/tf_efficientnet_lite0.safetensors"


def spec_of(classes: int = 3, channels: int = 3) -> DataSpec:
    names = tuple(f"class{n}" for n in range(classes))
    return DataSpec(names, channels, (64, 64), (0.5,) * channels, (0.2,) * channels)


def saved(model: nn.Module, path: Path) -> str:
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, path)
    return str(path)


def randomised(model: nn.Module) -> nn.Module:
    """Also statistics of batch-norms, which all begin alike."""
    torch.manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.5 if "var" in name else torch.randn_like(tensor) * 0.1)
    return model.eval()


def test_it_has_as_many_parameters_as_the_published_network():
    """segmentation_models_pytorch's Unet("resnet34") for one class has 24,436,369."""
    model = EncoderUnetConfig().build(spec_of(classes=1))
    assert sum(parameter.numel() for parameter in model.parameters()) == 24_436_369


@torch.no_grad()
@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_the_way_down_is_that_of_torchvision(name: str, tmp_path: Path):
    import torchvision

    theirs = randomised(torchvision.models.get_model(name, weights=None))
    config = EncoderUnetConfig(arch=name, weights=saved(theirs, tmp_path / "a.safetensors"))
    model = config.build(spec_of()).eval()
    loaded = config.load_weights(model)
    assert loaded.note.startswith("encoder: loaded ") and "2 of fc. are not used" in loaded.note
    assert {row.state for row in loaded.tensors} == {"loaded", "unused"}
    image = torch.randn(2, 3, 64, 96)
    x, features = theirs.relu(theirs.bn1(theirs.conv1(image))), []
    features.append(x)
    x = theirs.maxpool(x)
    for stage in (theirs.layer1, theirs.layer2, theirs.layer3, theirs.layer4):
        features.append(x := stage(x))
    torch.testing.assert_close(model.encoder(image), features)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["test_resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_efficientnet", "test_convnext"))],
)
def test_weights_of_timm_fit_its_networks_without_their_head(name: str, tmp_path: Path):
    theirs = randomised(timm.create_model(name))
    config = EncoderUnetConfig(arch=f"timm:{name}", weights=saved(theirs, tmp_path / "a.safetensors"))
    model = config.build(spec_of()).eval()
    loaded = config.load_weights(model)
    assert not [row.name for row in loaded.tensors if row.state in ("at random", "kept")]
    image = torch.randn(1, 3, 64, 64)
    expected = theirs.forward_intermediates(image, intermediates_only=True)
    found = model.encoder(image)
    torch.testing.assert_close(found[-1], expected[-1])
    assert model(image).shape == (1, 3, 64, 64)


@torch.no_grad()
def test_images_of_any_size_are_filled_up_with_the_mean_colour():
    model = randomised(EncoderUnetConfig(arch="resnet18", width=8).build(spec_of()))
    image = torch.randn(1, 3, 45, 70)
    filled = torch.zeros(1, 3, 64, 96)
    filled[:, :, :45, :70] = image
    torch.testing.assert_close(model(image), model(filled)[:, :, :45, :70])
    assert model(torch.randn(1, 3, 1, 1)).shape == (1, 3, 1, 1)


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_the_first_convolution_is_adapted_as_timm_does(channels: int):
    weight = torch.randn(8, 3, 7, 7)
    torch.testing.assert_close(adapted(weight, channels), adapt_input_conv(channels, weight))


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 4])
def test_a_grey_image_is_seen_alike_in_any_number_of_channels(channels: int, tmp_path: Path):
    rgb = EncoderUnetConfig(arch="resnet18", width=8)
    donor = randomised(rgb.build(spec_of()))
    config = EncoderUnetConfig(arch="resnet18", width=8, weights=saved(donor.encoder, tmp_path / "a.safetensors"))
    model = config.build(spec_of(channels=channels)).eval()
    note = config.load_weights(model).note
    assert f"conv1.weight adapted from 3 channels to {channels}" in note
    grey = torch.randn(1, 1, 64, 64)
    ours, theirs = (each.encoder(grey.repeat(1, n, 1, 1))[-1] for each, n in ((model, channels), (donor, 3)))
    torch.testing.assert_close(ours, theirs)


def test_weights_of_the_whole_network_leave_a_head_of_other_classes_random(tmp_path: Path):
    donor = randomised(EncoderUnetConfig(arch="resnet18", width=8).build(spec_of(classes=5)))
    config = EncoderUnetConfig(arch="resnet18", width=8, weights=saved(donor, tmp_path / "a.safetensors"))
    model = config.build(spec_of(classes=3, channels=1))
    before, loaded = model.head.weight.clone(), config.load_weights(model)
    assert "the head starts at random: 5 classes there, 3 here" in loaded.note
    assert "encoder.conv1.weight adapted from 3 channels to 1" in loaded.note
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.decoder[2].conv1.weight, donor.decoder[2].conv1.weight)


def test_the_head_is_all_that_weights_of_a_classifier_leave_random():
    config = EncoderUnetConfig(arch="resnet18", width=8)
    model = config.build(spec_of())
    head = config.head_prefixes(model)
    trunk = {name.partition(".")[0] for name, _ in model.named_parameters() if not name.startswith(head)}
    assert trunk == {"encoder"}


def test_other_weights_are_refused(tmp_path: Path):
    import torchvision

    other = saved(torchvision.models.resnet34(weights=None), tmp_path / "a.safetensors")
    config = EncoderUnetConfig(arch="resnet18", weights=other)
    with pytest.raises(BadCheckpoint, match="does not match this model"):
        config.load_weights(config.build(spec_of()))
    other = saved(torchvision.models.mobilenet_v3_small(weights=None), tmp_path / "b.safetensors")
    config = EncoderUnetConfig(arch="resnet18", weights=other)
    with pytest.raises(BadCheckpoint, match="does not match this model"):
        config.load_weights(config.build(spec_of()))


def test_what_cannot_be_a_way_down_is_refused():
    with pytest.raises(UsageError, match="cannot be the way down of a U-Net; use one of resnet18"):
        EncoderUnetConfig(arch="resnet50v2_tf1")
    with pytest.raises(UsageError, match=r"made for images of \(160, 160\)"):
        EncoderUnetConfig(arch="timm:test_vit").build(spec_of())
    with pytest.raises(UsageError, match="unknown to timm"):
        EncoderUnetConfig(arch="timm:nothing").refuse_unknown()


@pytest.mark.skipif(not LITE0.is_file(), reason="needs ../shared/data, which is not part of the repository")
@torch.no_grad()
def test_real_weights_see_what_timm_sees():
    config = EncoderUnetConfig(arch="timm:tf_efficientnet_lite0", weights=str(LITE0))
    model = config.build(spec_of()).eval()
    assert "encoder: loaded 288 tensors" in config.load_weights(model).note
    theirs = timm.create_model("tf_efficientnet_lite0", checkpoint_path=str(LITE0)).eval()
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = theirs.forward_intermediates(image, intermediates_only=True)
    torch.testing.assert_close(model.encoder(image)[-1], expected[-1])
