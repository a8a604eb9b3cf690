"""The loss of several labels per image against torch, with smoothing and mixed images; what is found in an image."""

import math

import pytest
import torch
from torch import nn

from sightline.inference.by_task import classes_in, results
from sightline.parts import DataSpec, PredictOptions
from sightline.tasks.classification import Classification, MultiLabel

SPEC = DataSpec(("ant", "bee", "cat"), 3, (8, 8), (0.5,) * 3, (0.2,) * 3, multi_label=True)


def case(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, generator=random), torch.randint(0, 2, (rows, 3), generator=random, dtype=torch.uint8)


def loss_of(smoothing: float = 0.0, **batch: torch.Tensor):
    return MultiLabel(smoothing).loss(nn.Identity(), batch)


def test_the_loss_is_torchs_binary_cross_entropy():
    logits, label = case()
    loss = loss_of(image=logits, label=label)
    torch.testing.assert_close(loss.total, nn.BCEWithLogitsLoss()(logits, label.float()))
    assert loss.sums["exact"] == ((logits > 0) == label.bool()).all(1).sum()


def test_smoothing_draws_targets_to_one_half():
    logits, label = case()
    soft = torch.where(label.bool(), 0.95, 0.05)
    torch.testing.assert_close(loss_of(0.1, image=logits, label=label).total, nn.BCEWithLogitsLoss()(logits, soft))


@pytest.mark.parametrize("each", [False, True], ids=["one share", "a share each"])
def test_mixed_images_have_mixed_targets(each: bool):
    logits, label = case()
    share, partner = (torch.linspace(0, 1, 6), torch.arange(5, -1, -1)) if each else (torch.tensor(0.3), None)
    more = {} if partner is None else {"partner": partner}
    other = (label.roll(1, 0) if partner is None else label[partner]).float()
    column = share[:, None] if each else share
    target = column * label + (1 - column) * other
    loss = loss_of(image=logits, label=label, mix=share, **more)
    torch.testing.assert_close(loss.total, nn.BCEWithLogitsLoss()(logits, target))


def test_data_choose_the_task_and_keep_its_field():
    assert Classification(0.1).for_data(SPEC) == MultiLabel(0.1)
    one = DataSpec(("ant",), 3, (8, 8), (0.5,) * 3, (0.2,) * 3)
    assert Classification(0.1).for_data(one) == Classification(0.1)


def test_checkpoints_of_other_data_stay_as_they_were():
    one = DataSpec(("ant",), 3, (8, 8), (0.5,) * 3, (0.2,) * 3)
    assert "multi_label" not in one.to_json() and DataSpec.from_json(one.to_json()) == one
    assert SPEC.to_json()["multi_label"] is True and DataSpec.from_json(SPEC.to_json()) == SPEC


def test_every_class_above_one_half_is_found():
    logits = torch.tensor([[2.0, -1.0, 0.5], [-1.0, -2.0, -3.0]])
    first, second = classes_in(MultiLabel(), {"logits": logits}, SPEC, None, None)
    assert [(each.name, each.class_id) for each in first] == [("ant", 0), ("cat", 2)] and second == []
    assert first[0].score == pytest.approx(torch.tensor(2.0).sigmoid().item())
    [lower, _] = classes_in(MultiLabel(), {"logits": logits}, SPEC, None, 0.2)
    assert [each.name for each in lower] == ["ant", "cat", "bee"]
    assert [len(found) for found in classes_in(MultiLabel(), {"logits": logits}, SPEC, 1, 0.0)] == [1, 1]


def test_python_gets_the_probability_of_every_class_and_those_that_an_image_has():
    logits = torch.tensor([[3.0, -1.0, 0.5], [-3.0, -2.0, -4.0], [0.0, 0.0, 0.0]])
    names = ["a.jpg", "b.jpg", None]  # the last is padding
    found = results(MultiLabel(), names, {"logits": logits}, {}, SPEC, PredictOptions())
    assert [each.file for each in found] == ["a.jpg", "b.jpg"]
    assert [each.labels for each in found] == [(SPEC.classes[0], SPEC.classes[2]), ()]
    for each, row in zip(found, logits, strict=False):
        expected = dict(zip(SPEC.classes, row.sigmoid().tolist(), strict=True))
        assert each.probabilities == expected and each.probability == max(expected.values()) == expected[each.label]
    [lower, _] = results(MultiLabel(), names, {"logits": logits}, {}, SPEC, PredictOptions(threshold=0.2))
    assert len(lower.labels) == 3


def test_scores_that_are_not_numbers_name_no_class():
    nothing = {"logits": torch.full((1, 3), torch.nan)}
    [found] = results(Classification(), ["a.jpg"], nothing, {}, SPEC, PredictOptions())
    assert (found.label, found.probabilities, found.labels) == ("", {}, ()) and math.isnan(found.probability)
