"""What a task can read of an exported graph's answers, and what is said of all others."""

import pytest
import torch

from sightline.export.by_task import Outputs, misfit, outputs_of
from sightline.parts import DataSpec
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig, SegmentationConfig

SPEC = DataSpec(("a", "b", "c"), 3, (6, 5), (0.0,), (1.0,))
FLOATS, NUMBERS = torch.zeros, lambda *shape: torch.zeros(*shape, dtype=torch.int64)
BOXES = {"boxes": FLOATS(2, 7, 4), "scores": FLOATS(2, 7), "labels": NUMBERS(2, 7), "count": NUMBERS(2)}


@pytest.mark.parametrize(
    ("task", "raw", "found"),
    [
        (ClassificationConfig(), False, [FLOATS(2, 3)]),
        (MaskConfig(), False, [FLOATS(2, 3, 6, 5)]),
        (SegmentationConfig(), True, [FLOATS(2, 3, 6, 5)]),
        (DetectionConfig(), False, list(BOXES.values())),
        (DetectionConfig(), True, [FLOATS(2, 9, 4), FLOATS(2, 9, 4), FLOATS(9, 4)]),
        (DetectionConfig(), False, [FLOATS(2, 0, 4), FLOATS(2, 0), NUMBERS(2, 0), NUMBERS(2)]),
    ],
)
def test_what_fits(task, raw: bool, found: list):
    assert misfit(outputs_of(task, raw), found, 2, SPEC) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([FLOATS(1, 3)], "logits of shape (1, 3), expected (2, 3)"),
        ([FLOATS(2, 4)], "logits of shape (2, 4), expected (2, 3)"),
        ([FLOATS(2)], "logits of shape (2), expected (2, 3)"),
        ([FLOATS(2, 3, 1)], "logits of shape (2, 3, 1), expected (2, 3)"),
        ([], "0 outputs, expected 1: logits"),
        ([FLOATS(2, 3)] * 2, "2 outputs, expected 1: logits"),
        ([NUMBERS(2, 3)], "logits of int64"),
        ([FLOATS(2, 3).to(torch.complex64)], "logits of complex64"),
    ],
)
def test_what_does_not_fit(found: list, said: str):
    assert misfit(outputs_of(ClassificationConfig()), found, 2, SPEC) == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"boxes": FLOATS(2, 7, 5)}, "boxes of shape (2, 7, 5), expected (2, 7, 4)"),
        ({"scores": FLOATS(2, 8)}, "scores of shape (2, 8), expected (2, 7)"),
        ({"labels": FLOATS(2, 7)}, "labels of float32"),
        ({"count": FLOATS(2)}, "count of float32"),
        ({"scores": NUMBERS(2, 7)}, "scores of int64"),
        ({"labels": NUMBERS(2, 7) + 3}, ""),
        ({"labels": NUMBERS(2, 7) + 4}, "labels beyond its 3 classes"),
        ({"labels": NUMBERS(2, 7) - 1}, "labels beyond its 3 classes"),
        ({"scores": FLOATS(2, 7) + torch.inf}, "scores that are not finite"),
        ({"boxes": FLOATS(2, 7, 4) + torch.nan}, ""),
        ({"count": NUMBERS(2, 1)}, "count of shape (2, 1), expected (2)"),
    ],
)
def test_detections_that_do_not_fit(change: dict, said: str):
    assert misfit(outputs_of(DetectionConfig()), list({**BOXES, **change}.values()), 2, SPEC) == said


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([FLOATS(2, 9, 3), FLOATS(2, 9, 4), FLOATS(9, 4)], "logits of shape (2, 9, 3), expected (2, 9, 4)"),
        ([FLOATS(2, 9, 4), FLOATS(2, 8, 4), FLOATS(9, 4)], "offsets of shape (2, 8, 4), expected (2, 9, 4)"),
        ([FLOATS(2, 9, 4), FLOATS(2, 9, 4), FLOATS(9, 3)], "anchors of shape (9, 3), expected (9, 4)"),
    ],
)
def test_raw_answers_of_a_detector_that_do_not_fit(found: list, said: str):
    assert misfit(outputs_of(DetectionConfig(), True), found, 2, SPEC) == said


@pytest.mark.parametrize("size", [(6, 4), (5, 6), (6, 5, 1)])
def test_masks_of_another_size_do_not_fit(size: tuple):
    text = ", ".join(map(str, (2, 3, *size)))
    found = misfit(outputs_of(MaskConfig()), [FLOATS(2, 3, *size)], 2, SPEC)
    assert found == f"logits of shape ({text}), expected (2, 3, 6, 5)"


def test_what_is_not_compared_may_be_anything():
    assert misfit(Outputs(("logits",), lambda model, image: (image,)), [FLOATS(5)], 2, SPEC) == ""
    assert [outputs_of(task).decodes for task in (DetectionConfig(), ClassificationConfig())] == [True, False]


@pytest.mark.parametrize(
    ("task", "raw", "found", "said"),
    [
        (MaskConfig(), False, [FLOATS(2, 3, 6, 6)], "logits of shape (2, 3, 6, 6), expected (2, 3, 6, 5)"),
        (SegmentationConfig(), True, [FLOATS(2, 4, 6, 5)], "logits of shape (2, 4, 6, 5), expected (2, 3, 6, 5)"),
        (DetectionConfig(), True, [FLOATS(2, 9, 3), FLOATS(2, 9, 4), FLOATS(9, 4)], "expected (2, 9, 4)"),
        (DetectionConfig(), True, [FLOATS(2, 9, 4), FLOATS(2, 9, 5), FLOATS(9, 4)], "expected (2, 9, 4)"),
        (DetectionConfig(), True, [FLOATS(2, 9, 4), FLOATS(2, 8, 4), FLOATS(9, 4)], "expected (2, 9, 4)"),
        (DetectionConfig(), True, [FLOATS(2, 9, 4), FLOATS(2, 9, 4), FLOATS(8, 4)], "expected (9, 4)"),
    ],
)
def test_masks_and_raw_detections_that_do_not_fit(task, raw: bool, found: list, said: str):
    assert misfit(outputs_of(task, raw), found, 2, SPEC).endswith(said)
