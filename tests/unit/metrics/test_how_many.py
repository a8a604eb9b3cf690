"""How much of the mistakes a score keeps: the twenty worst samples, and the matrix of up to forty classes."""

import numpy as np
import pytest
import torch

from sightline.metrics.average_precision import AveragePrecision
from sightline.metrics.coco_map import CocoMap
from sightline.metrics.dice import Dice
from sightline.metrics.iou import MeanIou
from sightline.metrics.topk import TopK
from sightline.parts import Scores

CPU = torch.device("cpu")
MANY = 30  # samples, all wrong


def names(number: int) -> tuple[str, ...]:
    return tuple(f"c{place}" for place in range(number))


def of_images(classes: int = 3) -> Scores:
    metric = TopK(names(classes), 0.0, CPU)
    label = torch.arange(MANY) % classes
    wrong = torch.nn.functional.one_hot((label + 1) % classes, classes).double() * torch.arange(1, MANY + 1)[:, None]
    metric.update({"logits": wrong}, rows(label))
    return metric.result()


def of_labels() -> Scores:
    metric = AveragePrecision(names(2), 0.0, CPU)
    logits = torch.arange(1, MANY + 1, dtype=torch.float64)[:, None] * torch.tensor([1.0, -1.0])
    metric.update({"logits": logits}, rows(torch.tensor([[0, 1]], dtype=torch.uint8).expand(MANY, 2)))
    return metric.result()


def of_masks(classes: int = 3) -> Scores:
    metric = MeanIou(names(classes), 0.0, CPU)
    label = torch.zeros(MANY, 6, 6, dtype=torch.uint8)
    found = label.clone()
    for row in found.view(MANY, 36)[:, :MANY].unbind():  # one pixel more of each image is wrong
        row[: 1 + int((found > 0).flatten(1).any(1).sum())] = 1
    metric.update({"logits": torch.zeros(MANY, classes, 6, 6), "classes": found}, rows(label))
    return metric.result()


def of_volumes() -> Scores:
    metric = Dice(names(2), CPU, "none", "ce")
    label = torch.zeros(MANY, 6, 6, dtype=torch.uint8)
    label[:, 0, 0] = 1
    found = label.clone()
    for place in range(MANY):
        found.view(MANY, 36)[place, 1 : place + 2] = 1
    given = rows(label) | {"volume": torch.arange(MANY)}
    metric.update({"logits": torch.zeros(MANY, 2, 6, 6), "classes": found}, given)
    return metric.result()


def of_boxes(found: int = 0) -> Scores:
    """Thirty images whose box is not found, the last ones with more wrong boxes; or one with many boxes of it."""
    metric = CocoMap(names(1), CPU)
    number = found or MANY
    boxes, scores = torch.zeros(MANY, number, 4), torch.zeros(MANY, number)
    for place in range(MANY):
        scores[place, : place + 1] = torch.linspace(0.9, 0.6, place + 1)
    boxes[..., :2], boxes[..., 2:] = 0.5, 0.75
    truth = torch.tensor([0.0, 0.0, 25.0, 25.0])
    if found:
        scores[:] = torch.linspace(0.9, 0.6, number)
        boxes[:, -1] = torch.tensor([0.0, 0.0, 0.25, 0.25])  # the last one is right
    labels = (scores > 0).long()
    given = rows(labels) | {"height": torch.full((MANY,), 100), "width": torch.full((MANY,), 100)}
    given |= {
        "truth_labels": torch.ones(MANY, 1, dtype=torch.int64),
        "truth_crowd": torch.zeros(MANY, 1),
        "truth_area": torch.full((MANY, 1), 625.0),
        "truth_boxes": truth.expand(MANY, 1, 4),
    }
    metric.update({"boxes": boxes, "scores": scores, "labels": labels}, given)
    return metric.result()


def rows(label: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"label": label, "index": torch.arange(MANY), "valid": torch.ones(MANY, dtype=torch.bool)}


@pytest.mark.parametrize("score", [of_images, of_labels, of_masks, of_volumes, of_boxes])
def test_the_twenty_worst_are_listed_and_the_worst_come_first(score):
    assert [row["index"] for row in score().worst] == list(range(MANY - 1, MANY - 21, -1))


@pytest.mark.parametrize("score", [of_images, of_masks])
def test_the_whole_matrix_is_kept_of_forty_classes(score):
    whole, part = (score(classes).tables.get("matrix", []) for classes in (40, 41))
    assert [row["class"] for row in whole] == list(names(40)) and not part
    assert np.asarray([row["predicted"] for row in whole]).sum() == (MANY if score is of_images else 36 * MANY)


def test_of_an_image_and_class_the_hundred_surest_boxes_count():
    assert (of_boxes(100).values["recall"], of_boxes(101).values["recall"]) == (1, 0)
