"""Images of very many boxes: the result of one piece, and memory that does not grow with boxes times anchors."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchvision.ops import box_iou

from sightline.kernels import overlaps
from sightline.metrics.coco_map import CocoMap
from sightline.tasks.matching import match

IMAGES, BOXES, ANCHORS = 4, 300, 2000


def corners(*shape: int) -> torch.Tensor:
    low = torch.rand(*shape, 2) * 0.8
    return torch.cat([low, low + 0.1], -1)


def test_a_batch_of_many_boxes_takes_no_table_of_boxes_times_anchors(monkeypatch: pytest.MonkeyPatch):
    """No operation allocates one."""
    monkeypatch.setattr(overlaps, "CELLS", IMAGES * BOXES * ANCHORS // 16)
    truth, labels = corners(IMAGES, BOXES), torch.ones(IMAGES, BOXES, dtype=torch.int64)
    metric = CocoMap(("a", "b"), torch.device("cpu"))
    found = {"boxes": corners(IMAGES, 200), "scores": torch.rand(IMAGES, 200)}
    found["labels"] = torch.ones(IMAGES, 200, dtype=torch.int64)
    batch = {"index": torch.arange(IMAGES), "valid": torch.ones(IMAGES, dtype=torch.bool)}
    batch |= {side: torch.full((IMAGES,), 64) for side in ("height", "width")}
    batch |= {"truth_boxes": truth.double() * 64, "truth_labels": labels, "truth_area": torch.ones(IMAGES, BOXES)}
    batch |= {"truth_crowd": torch.zeros(IMAGES, BOXES, dtype=torch.bool)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        match(truth, labels, corners(ANCHORS))
        metric.update(found, batch)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert IMAGES * BOXES * 4 < largest < IMAGES * BOXES * ANCHORS * 4 / 2


@pytest.mark.parametrize(("boxes", "anchors"), [(7, 50), (300, 6), (40, 40)])
def test_pieces_are_as_large_as_memory_allows(boxes: int, anchors: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlaps, "CELLS", 2 * 2 * anchors + 1)  # two rows of boxes against all anchors, of two images
    shapes, iou = [], overlaps.iou

    def noted(each: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        shapes.append((each.shape[-2], among.shape[-2]))
        return iou(each, among)

    monkeypatch.setattr(overlaps, "iou", noted)
    overlaps._best(torch.rand(2, boxes, 4), torch.rand(anchors, 4))
    assert shapes == [(2, anchors)] * (boxes // 2) + [(1, anchors)] * (boxes % 2)
    shapes.clear()
    monkeypatch.setattr(overlaps, "CELLS", 2 * boxes * anchors)
    overlaps._best(torch.rand(2, boxes, 4), torch.rand(anchors, 4))
    assert shapes == [(boxes, anchors)]
    shapes.clear()
    monkeypatch.setattr(overlaps, "CELLS", 1)
    overlaps._best(torch.rand(2, 3, 4), torch.rand(anchors, 4))
    assert shapes == [(1, anchors)] * 3


def drawn(*shape: int) -> torch.Tensor:
    """Corners are multiples of 1/16, so that many overlaps are equal."""
    low, high = torch.randint(0, 17, (2, *shape, 2), generator=torch.Generator().manual_seed(0)).sort(dim=0).values
    return torch.cat([low, high], -1) / 16


@pytest.mark.parametrize("cells", [1, 500, 2**21])
def test_boxes_are_matched_in_pieces_as_in_one(cells: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlaps, "CELLS", cells)
    boxes, anchors = drawn(3, 40), drawn(111)
    box_of, anchor_of = overlaps.plain(boxes, anchors)
    for row, some in enumerate(boxes):
        table = box_iou(anchors, some).nan_to_num(0.0)  # 0 / 0 of two boxes without an area
        assert torch.equal(box_of[row], table.argmax(1))
        assert torch.equal(anchor_of[row], table.T.argmax(1))
