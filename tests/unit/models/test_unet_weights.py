"""Weights of U-Nets: the original's Lightning checkpoints compute here what the original computed, and our own load."""

import argparse
import json
import runpy
from pathlib import Path

import pytest
import torch

from sightline.errors import BadCheckpoint
from sightline.models.unet import Unet, UnetConfig
from sightline.parts import DataSpec

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
ORIGINAL = json.loads((GOLDEN / "unet_original.json").read_text())
MADE_BY = runpy.run_path(str(GOLDEN / "unet_original.py"))
FLAGS = {"plain": {}, "residual": {"residual": True}, "attention": {"attention": True}}


def spec(classes: int = 3, size: tuple[int, ...] = (16, 16), channels: int = 2) -> DataSpec:
    return DataSpec(tuple(map(str, range(classes))), channels, size, (), (), spacing=(1.0,) * len(size))


def original_checkpoint(variant: str, path: Path) -> Path:
    """Write a .ckpt as Lightning did for the original's module, whose network is its attribute `model`."""
    shapes = ORIGINAL[variant]["shapes"]
    state = {
        f"model.{name}": MADE_BY["values"](name, shape, number) for number, (name, shape) in enumerate(shapes.items())
    }
    content = {"epoch": 3, "global_step": 4, "pytorch-lightning_version": "1.6.4", "state_dict": state}
    content |= {"hyper_parameters": {"args": argparse.Namespace(dim=2, lr=1e-3)}, "callbacks": {"EarlyStopping": {}}}
    torch.save(content, path)
    return path


def started(classes: int, weights: Path, size: tuple[int, ...] = (16, 16), **fields) -> tuple[Unet, str]:
    config = UnetConfig(weights=str(weights), **fields)
    torch.manual_seed(0)
    model = config.build(spec(classes, size))
    return model, config.start_from(model)


@pytest.mark.parametrize("variant", FLAGS)
def test_a_checkpoint_of_the_original_gives_its_outputs(tmp_path, variant):
    path = original_checkpoint(variant, tmp_path / "last.ckpt")

    model, note = started(3, path, **FLAGS[variant])

    # The original makes a head for the coarser level, which only deep supervision uses.
    assert note.startswith("U-Net for patches of 16x16: 3 levels, ")
    assert note.endswith(": those of its attribute 'model'; 2 of deep_supervision_heads. are not used")
    with torch.no_grad():
        found = model.eval()(MADE_BY["image"]()).flatten()[::7]
    torch.testing.assert_close(found, torch.tensor(ORIGINAL[variant]["outputs"]), rtol=1e-3, atol=1e-3)  # CPUs differ


def test_deep_supervision_takes_the_originals_head_of_its_level(tmp_path):
    path = original_checkpoint("plain", tmp_path / "last.ckpt")

    model, note = started(3, path, deep_supervision=True, aux_heads=1)

    assert "loaded all 38 tensors" in note
    names = list(ORIGINAL["plain"]["shapes"])
    expected = MADE_BY["values"]("bias", [3], names.index("deep_supervision_heads.0.conv.bias"))
    assert torch.equal(model.heads[1].bias, expected)


def test_the_head_starts_at_random_for_other_classes_and_the_rest_is_the_originals(tmp_path):
    path = original_checkpoint("plain", tmp_path / "last.ckpt")
    same, _ = started(3, path)

    other, note = started(5, path)

    assert "the head starts at random: 3 classes there, 5 here" in note
    assert torch.equal(other.encoder[2].conv2.conv.weight, same.encoder[2].conv2.conv.weight)
    fresh = UnetConfig()
    torch.manual_seed(0)
    assert torch.equal(other.heads[0].weight, fresh.build(spec(5)).heads[0].weight)


def test_our_own_file_loads_and_further_heads_are_not_used(tmp_path):
    tiny = {"width": 2, "max_filters": 8}
    donor = UnetConfig(deep_supervision=True, aux_heads=1, **tiny).build(spec())
    torch.save(donor.state_dict(), tmp_path / "unet.pth")

    model, note = started(3, tmp_path / "unet.pth", **tiny)

    assert note.endswith("; 2 of heads.1. are not used")
    assert all(torch.equal(tensor, donor.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_all_heads_that_a_network_can_have_load_into_one_without(tmp_path):
    """The largest patch has six levels, of which four lie between the finest and the deepest."""
    tiny = {"width": 2, "max_filters": 2}
    donor = UnetConfig(deep_supervision=True, aux_heads=4, **tiny).build(spec(size=(128, 128)))
    torch.save(donor.state_dict(), tmp_path / "unet.pth")

    _, note = started(3, tmp_path / "unet.pth", size=(128, 128), **tiny)

    assert note.endswith("; 8 of heads.1., heads.2., heads.3., heads.4. are not used")


def test_a_counter_of_drop_block_is_not_expected_from_the_original(tmp_path):
    path = original_checkpoint("plain", tmp_path / "last.ckpt")
    model, note = started(3, path, drop_block=True)
    assert "loaded" in note and model.encoder[2].conv1.drop.steps == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": True}, "missing: decoder.0.gate.above.conv.weight"),
        ({"residual": True}, "missing: encoder.0.conv2.conv.weight"),
        ({"width": 16}, "does not fit the model: encoder.0.conv1.conv.weight 32x2x3x3 in the file, 16x2x3x3"),
        ({"size": (32, 32)}, "does not match this model"),
    ],
)
def test_another_network_than_the_originals_is_refused(tmp_path, fields, message):
    path = original_checkpoint("plain", tmp_path / "last.ckpt")
    with pytest.raises(BadCheckpoint, match=message):
        started(3, path, **fields)
