"""Samples of a training batch and their sheet: shares of mixed labels, chosen slices, channels, captions."""

import numpy as np
import pytest
import torch
from PIL import Image

from sightline.parts import DataSpec, Finding, SeenSample
from sightline.report.draw import GROUND
from sightline.report.samples import Drawn, pixels_of, sheet
from sightline.tasks.classification import Classification, MultiLabel
from sightline.tasks.detection import Detection
from sightline.tasks.segmentation import Segmentation

SPEC = DataSpec(("cat", "dog", "owl"), 3, (4, 4), (0.5, 0.4, 0.3), (0.2, 0.1, 0.3))


def shares(samples: list[SeenSample]) -> list[dict[str, float]]:
    return [{label.name: round(label.score, 3) for label in sample.labels} for sample in samples]


def test_mixed_labels_have_their_shares():
    batch = {"image": torch.zeros(3, 3, 4, 4), "label": torch.tensor([0, 1, 1]), "mix": torch.tensor(0.7)}
    task = Classification(label_smoothing=0.1)
    assert shares(task.seen(batch, SPEC)) == [{"cat": 0.7, "dog": 0.3}, {"dog": 0.7, "cat": 0.3}, {"dog": 1.0}]
    batch["partner"], batch["mix"] = torch.tensor([2, 1, 0]), torch.tensor([0.25, 0.5, 1.0])
    assert shares(task.seen(batch, SPEC)) == [{"dog": 0.75, "cat": 0.25}, {"dog": 1.0}, {"dog": 1.0}]
    batch["label_share"] = torch.tensor(0.9)  # cutmix: the share of the label, not of the pixels outside of the box
    assert shares(task.seen(batch, SPEC))[0] == {"cat": 0.9, "dog": 0.1}
    assert task.label_note() == "label smoothing 0.1" and Classification().label_note() == ""


def test_several_labels_and_none():
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.uint8)}
    assert shares(MultiLabel().seen(batch, SPEC)) == [{"cat": 1.0, "owl": 1.0}, {}]


def test_boxes_without_padding():
    boxes = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]]])
    batch = {"image": torch.zeros(1, 3, 4, 4), "boxes": boxes, "labels": torch.tensor([[2, 0]])}
    [sample] = Detection().seen(batch, DataSpec(("a", "b"), 3, (4, 4), SPEC.mean, SPEC.std, (7, 9)))
    [label] = sample.labels
    assert (label.name, label.class_id) == ("b", 9) and label.box == pytest.approx((0.2, 0.1, 0.4, 0.3))


def test_a_volume_is_seen_by_its_middle_slice_or_the_one_with_most_labels():
    label = torch.zeros(3, 5, 4, 4, dtype=torch.int64)
    label[0, 2, 0, 0] = label[0, 4] = 1  # the middle one has some
    label[1, 1, 0, 0] = label[1, 3, 0] = 1
    image = torch.arange(5.0)[None, None, :, None, None].expand(3, 2, 5, 4, 4)
    seen = Segmentation().seen({"image": image, "label": label}, SPEC)
    assert [sample.note for sample in seen] == ["slice 2", "slice 3", "slice 2"]
    assert [sample.image[0, 0, 0] for sample in seen] == [2, 3, 2] and seen[1].mask.sum() == 4


def test_the_normalisation_is_undone():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    image = ((pixels / 255 - SPEC.mean) / SPEC.std).transpose(2, 0, 1).astype(np.float32)
    assert np.array_equal(pixels_of(image, SPEC), pixels)


def test_channels_that_are_no_colours_lie_side_by_side():
    spec = DataSpec(("none", "some"), 3, (2, 8, 6), (), ())
    image = np.stack([np.full((8, 6), value, np.float32) for value in (-1, 0, 1)])
    pixels = pixels_of(image, spec, (-1.0, 1.0))
    assert pixels.shape == (16, 12, 3)
    assert [pixels[y, x, 0] for y, x in ((0, 0), (0, 6), (8, 0), (8, 6))] == [0, 128, 255, 0]


@pytest.mark.parametrize(
    "name", ["x" * 999, "名前" * 20, "<script>alert(1)</script>" * 3, "a\nb\u202e\udcff", ""], ids=range(5)
)
def test_captions_stay_below_their_own_tile(name: str):
    label = Finding(name, 0, 1.0)
    sample = SeenSample(np.full((3, 4, 4), 50, np.float32), (label, label, label))
    spec = DataSpec((name,), 3, (4, 4), SPEC.mean, SPEC.std)
    drawn = np.asarray(sheet(Drawn(spec, samples=[sample] * 2, names=[name] * 2), f"title; {name}"))
    inside = (drawn[:, 8:208] == 255).all(2).all(1)  # the tile is white
    bottom = int(np.flatnonzero(inside)[-1]) + 1
    for left, right in ((0, 7), (209, 215), (417, drawn.shape[1])):  # letters may reach a pixel over their place
        assert (drawn[bottom:, left:right] == GROUND).all()


def test_a_sheet_is_an_image_of_all_its_rows():
    samples = [SeenSample(np.zeros((3, 4, 4), np.float32), (Finding("cat", 0, 1.0),))] * 7
    both = sheet(Drawn(SPEC, samples[:2], samples, ["a"] * 7), "title")
    one = sheet(Drawn(SPEC, [], samples[:1], ["a"]), "title")
    assert isinstance(both, Image.Image) and both.width == one.width
    assert both.height > 600 > 300 > one.height > 200  # three rows and one
