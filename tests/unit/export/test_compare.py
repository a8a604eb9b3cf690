"""The comparison of an exported file with its network, against numbers worked out by hand."""

import math

import pytest
import torch

from sightline.export.compare import Matched, match_boxes, relative_difference


def test_a_difference_is_relative_to_the_largest_value_of_its_output():
    ours = (torch.tensor([1.0, -4.0]), torch.tensor([100.0]))
    theirs = (torch.tensor([1.0, -4.001]), torch.tensor([100.01]))
    assert relative_difference(ours, theirs) == pytest.approx(0.001 / 4, rel=1e-3)
    assert relative_difference(ours, ours) == 0


@pytest.mark.parametrize("other", [torch.tensor([math.nan]), torch.tensor([math.inf]), torch.tensor([1.0, 1.0])])
def test_what_is_not_finite_or_of_another_shape_differs_infinitely(other: torch.Tensor):
    assert relative_difference((torch.tensor([1.0]),), (other,)) == math.inf
    assert relative_difference((other,), (torch.tensor([1.0]),)) == math.inf


BOXES = torch.tensor([[[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
SCORES, LABELS = torch.tensor([[0.9, 0.8, 0.0]]), torch.tensor([[1, 2, 0]])


def test_boxes_match_in_any_order_by_class_and_place():
    turned = tuple(each[:, [1, 0, 2]] for each in (BOXES + 1e-6 * (LABELS > 0)[..., None], SCORES + 2e-6, LABELS))
    pairs, total, difference = match_boxes((BOXES, SCORES, LABELS), turned)
    assert (pairs, total) == (2, 2) and difference == pytest.approx(2e-6, rel=0.1)


@pytest.mark.parametrize(
    "theirs",
    [
        (BOXES, SCORES, torch.tensor([[3, 2, 0]])),
        (BOXES + torch.tensor([[[0.1], [0.0], [0.0]]]), SCORES, LABELS),
        (BOXES, SCORES, torch.tensor([[0, 2, 0]])),
    ],
    ids=["another class", "another place", "one less"],
)
def test_a_box_without_a_partner_is_counted(theirs: tuple[torch.Tensor, ...]):
    ours = (BOXES, SCORES, LABELS)
    assert match_boxes(ours, theirs)[:2] == match_boxes(theirs, ours)[:2] == (1, 2)
    assert match_boxes(ours, theirs) + Matched(3, 4, 0.5) == Matched(4, 6, 0.5)


def test_one_box_is_the_partner_of_one_only():
    twice = tuple(each[:, [0, 0, 2]] for each in (BOXES, SCORES, LABELS))
    assert match_boxes(twice, (BOXES, SCORES, LABELS))[:2] == (1, 2)
    assert match_boxes(twice, twice)[:2] == (2, 2)
