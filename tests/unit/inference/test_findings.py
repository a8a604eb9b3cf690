"""The outputs of a network as names and places."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sightline.inference.findings import boxes_found, classes_found, labels_found, labels_of, true_boxes
from sightline.parts import DataSpec, Finding

SPEC = DataSpec(("ant", "bee", "cat"), 3, (8, 8), (0.5,) * 3, (0.2,) * 3)


def test_classes_come_with_their_probabilities():
    logits = np.array([[1.0, 3.0, 2.0], [5.0, -5.0, 0.0]])
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    first, second = classes_found(torch.tensor(logits), SPEC, top=2, threshold=0.0)
    assert [(f.name, f.class_id, f.box) for f in first] == [("bee", 1, None), ("cat", 2, None)]
    assert [f.score for f in first] == pytest.approx([expected[0, 1], expected[0, 2]], abs=1e-6)
    assert [f.name for f in second] == ["ant", "cat"]


def test_classes_below_the_threshold_and_beyond_the_number_there_is():
    logits = torch.tensor([[0.0, 10.0, 0.0], [float("nan")] * 3])
    assert [[f.name for f in found] for found in classes_found(logits, SPEC, 9, 0.5)] == [["bee"], []]
    assert len(classes_found(logits, SPEC, 9, 0.0)[0]) == 3


BOXES = torch.tensor(
    [
        [[0.1, 0.2, 0.5, 0.6], [-0.2, 0.5, 0.4, 1.3], [0.0, 0.0, 0.0, 0.0]],
        [[0.3, 0.3, 0.4, 0.4], [0.0, float("nan"), 1.0, 1.0], [0.2, 0.1, 0.9, 0.8]],
    ]
)
SCORES = torch.tensor([[0.9, 0.4, 0.0], [0.35, 0.8, 0.7]])
LABELS = torch.tensor([[3, 1, 0], [2, 2, 1]])


def test_boxes_turn_to_x_first_and_are_cut_at_the_edges():
    first, second = boxes_found(BOXES, SCORES, LABELS, SPEC, top=10, threshold=0.0)
    assert first == [
        Finding("cat", 3, pytest.approx(0.9), pytest.approx((0.2, 0.1, 0.6, 0.5))),
        Finding("ant", 1, pytest.approx(0.4), pytest.approx((0.5, 0.0, 1.0, 0.4))),
    ]
    assert [(f.name, round(f.score, 2)) for f in second] == [("ant", 0.7), ("bee", 0.35)]  # the best first


def test_boxes_by_threshold_and_number():
    found = boxes_found(BOXES, SCORES, LABELS, SPEC, top=1, threshold=0.5)
    assert [[f.name for f in each] for each in found] == [["cat"], ["ant"]]
    assert boxes_found(BOXES, SCORES, LABELS, SPEC, top=9, threshold=0.95) == [[], []]


@dataclass(frozen=True)
class Numbered(DataSpec):
    """The spec of a data set that numbers its classes with gaps, as COCO does."""

    class_ids: tuple[int, ...] = (1, 13, 90)


def test_boxes_carry_the_ids_of_the_data_set():
    found = boxes_found(BOXES, SCORES, LABELS, Numbered(**vars(SPEC) | {"class_ids": (1, 13, 90)}), 9, 0.0)
    assert [[f.class_id for f in each] for each in found] == [[90, 1], [1, 13]]


def test_what_has_exactly_the_threshold_is_shown():
    logits = torch.zeros(1, 2)
    two = DataSpec(("ant", "bee"), 3, (8, 8), (0.5,) * 3, (0.2,) * 3)
    for found in (classes_found(logits, two, 9, 0.5), labels_found(logits, two, 9, 0.5)):
        assert sorted(each.name for each in found[0]) == ["ant", "bee"] and {each.score for each in found[0]} == {0.5}
    scores = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.25, 0.125]])
    found = boxes_found(BOXES.nan_to_num(0), scores, LABELS, SPEC, top=9, threshold=0.25)
    assert [[each.score for each in row] for row in found] == [[0.75, 0.25], [0.5, 0.25]]


def test_annotated_boxes_are_shares_of_their_files():
    boxes = torch.tensor(
        [[[10.0, 20.0, 30.0, 40.0], [0.0, 0.0, 0.0, 0.0]], [[0.0, 0.0, 50.0, 100.0], [1.0, 2.0, 3.0, 4.0]]]
    )
    labels, height, width = torch.tensor([[2, 0], [1, 3]]), torch.tensor([100, 200]), torch.tensor([200, 50])
    found = true_boxes(boxes, labels, height, width, SPEC)
    assert found == [
        [Finding("bee", 2, 1.0, (0.05, 0.2, 0.2, 0.6))],
        [Finding("ant", 1, 1.0, (0.0, 0.0, 1.0, 0.5)), Finding("cat", 3, 1.0, (0.02, 0.01, 0.08, 0.03))],
    ]
    numbered = DataSpec(SPEC.classes, 3, (8, 8), SPEC.mean, SPEC.std, (7, 8, 90))
    assert [row[0].class_id for row in true_boxes(boxes, labels, height, width, numbered)] == [8, 7]


def test_labels_of_a_mix_are_the_largest_part_first():
    found = labels_of(torch.tensor([[0.25, 0.0, 0.75], [0.0, 0.0, 0.0]]), SPEC)
    assert found == [[Finding("cat", 2, 0.75), Finding("ant", 0, 0.25)], []]
