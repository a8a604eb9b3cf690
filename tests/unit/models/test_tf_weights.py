"""Whole networks that TensorFlow wrote (tests/golden/tf_checkpoint/make.py): loaded here, they compute the same."""

import json
from pathlib import Path

import pytest
import torch

from sightline.errors import BadCheckpoint
from sightline.models.resnet import ResNetConfig
from sightline.models.ssd import SsdConfig
from sightline.models.tf_checkpoint import TensorBundle
from sightline.parts import DataSpec

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "tf_checkpoint"
NETWORKS = json.loads((GOLDEN / "networks.json").read_text())
CLASSIFIERS = {
    "keras": ResNetConfig(depth=50, width=2, padding="same_but_stem"),
    "estimator": ResNetConfig(depth=18, width=2, padding="same", version="v2", project_every_stage=True),
    "resnext": ResNetConfig(depth=50, width=2, padding="same", groups=2, group_width=32),
}


def spec(classes: int, size: int = 64) -> DataSpec:
    names = tuple(f"class{number}" for number in range(classes))
    return DataSpec(classes=names, channels=3, size=(size, size), mean=(0.0,) * 3, std=(1.0,) * 3)


def image(size: int) -> torch.Tensor:
    values = torch.arange(size * size * 3, dtype=torch.float64).mul(0.37).sin().float()
    return values.reshape(1, size, size, 3).permute(0, 3, 1, 2)


def with_weights(config, name: str):
    return type(config)(**{**vars(config), "weights": str(GOLDEN / name)})


def outputs(name: str) -> list[torch.Tensor]:
    return [torch.tensor(output["values"]).reshape(output["shape"]) for output in NETWORKS[name]]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_of_tensorflow_gives_tensorflows_logits(name):
    config = with_weights(CLASSIFIERS[name], name)
    model = config.build(spec(5))

    note = config.start_from(model)

    assert note.startswith("loaded all ") and note.endswith(f" tensors of {GOLDEN / name}.index")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(image(64)), outputs(name)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_its_head_starts_at_random_for_other_classes(name):
    config = with_weights(CLASSIFIERS[name], name)
    model = config.build(spec(3))
    fresh = model.fc.weight.clone()

    assert "; the head starts at random: 5 classes there, 3 here" in config.start_from(model)
    assert torch.equal(model.fc.weight, fresh) and (model.conv1.weight != 0).any()


def test_the_table_names_tensorflows_tensors_and_layouts():
    config = with_weights(CLASSIFIERS["resnext"], "resnext")
    rows = {row.name: row for row in config.load_weights(config.build(spec(5))).tensors}

    grouped = rows["layer1.0.conv2.weight"]
    assert (grouped.state, grouped.there, grouped.here) == ("converted", "3x3x1x2 resnet_model/Variable", "2x1x3x3")
    norm = rows["layer1.0.bn1.running_mean"]
    assert (norm.state, norm.there) == ("loaded", "2 resnet_model/batch_normalization_2/moving_mean")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("keras", {"depth": 101}, r"does not match this model .*missing: layer3.6.conv1.weight"),
        ("keras", {"width": 4}, "does not fit the model: conv1.weight 2x3x7x7 in the file, 4x3x7x7 in the model"),
        ("resnext", {"depth": 101}, r"does not match this model .*missing: "),
        ("resnext", {"groups": 1, "group_width": 64}, "does not match this model .*unexpected: .*Variable"),
        ("estimator", {"depth": 34}, r"does not match this model .*missing: layer3.1.bn2.weight"),
        ("estimator", {"version": "v1.5"}, r"does not match this model"),
        ("object", {}, "has 0 dense layers"),
        ("shards", {}, "holds no network of TensorFlow's ResNet scripts, but 3 tensors: a, b, c; expected names"),
    ],
)
def test_other_networks_are_refused(name, fields, message):
    base = CLASSIFIERS.get(name, CLASSIFIERS["keras"])
    config = with_weights(ResNetConfig(**{**vars(base), **fields}), name)
    with pytest.raises(BadCheckpoint, match=message):
        config.start_from(config.build(spec(5)))


def test_another_padding_than_the_scripts_is_reported():
    config = with_weights(ResNetConfig(depth=50, width=2), "keras")
    note = config.start_from(config.build(spec(5)))
    assert "they were made with padding=same_but_stem, this network has padding=torch" in note


def test_a_detector_of_tensorflow_gives_tensorflows_scores_and_offsets():
    config = with_weights(SsdConfig(width=2, padding="same"), "ssd")
    model = config.build(spec(3, 300))

    note = config.start_from(model)

    assert note == f"loaded all {len(model.state_dict()) - 29} tensors of {GOLDEN / 'ssd.index'}"  # without counters
    with torch.no_grad():
        logits, offsets, _ = model.eval()(image(300))
    for ours, theirs in zip((logits, offsets), outputs("ssd"), strict=True):
        torch.testing.assert_close(ours[:, ::97], theirs, rtol=1e-4, atol=1e-4)


def test_its_heads_start_at_random_for_other_classes_and_unneeded_levels_are_reported():
    config = with_weights(SsdConfig(width=2, padding="same"), "ssd")
    model = config.build(spec(7, 128))  # four levels

    note = config.start_from(model)

    assert "the head starts at random: 3 classes there, 7 here; not used: " in note
    assert torch.equal(model.extras[1].conv2.bias, TensorBundle(GOLDEN / "ssd.index").read("ssd/block8-conv3x3/bias"))


@pytest.mark.parametrize("place", [0, 3, 9, 4000, -1])
def test_a_damaged_object_graph_is_refused(tmp_path, place):
    """Its checksum covers its length, the checksum of that and its bytes."""
    entry = TensorBundle(GOLDEN / "keras.index").entries["_CHECKPOINTABLE_OBJECT_GRAPH"]
    data = bytearray((GOLDEN / "keras.data-00000-of-00001").read_bytes())
    data[entry.offset + place % entry.size] ^= 1
    (tmp_path / "keras.index").write_bytes((GOLDEN / "keras.index").read_bytes())
    (tmp_path / "keras.data-00000-of-00001").write_bytes(data)
    with pytest.raises(BadCheckpoint, match="fail their checksum; fetch the checkpoint again"):
        TensorBundle(tmp_path / "keras.index").read_text("_CHECKPOINTABLE_OBJECT_GRAPH")
