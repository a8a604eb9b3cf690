"""Images of very many boxes: the result of one piece, and memory that does not grow with boxes times anchors."""

import subprocess
import sys

import pytest
import torch
from torchvision.ops import box_iou

from sightline.kernels import overlaps

BOXES = 1000
PROGRAM = f"""
import resource
import torch
from sightline.metrics.coco_map import CocoMap
from sightline.tasks.matching import match

torch.set_num_threads(1)


def draw(*shape):
    low = torch.rand(*shape, 2) * 0.8
    return torch.cat([low, low + 0.1], -1)


def step(boxes, anchors):
    truth = draw(8, boxes)
    match(truth, torch.ones(8, boxes, dtype=torch.int64), draw(anchors))
    metric = CocoMap(("a", "b"), torch.device("cpu"))
    metric.update(
        {{"boxes": draw(8, 200), "scores": torch.rand(8, 200), "labels": torch.ones(8, 200, dtype=torch.int64)}},
        {{
            "index": torch.arange(8), "valid": torch.ones(8, dtype=torch.bool),
            "height": torch.full((8,), 64), "width": torch.full((8,), 64),
            "truth_boxes": truth.double() * 64, "truth_labels": torch.ones(8, boxes, dtype=torch.int64),
            "truth_area": torch.ones(8, boxes), "truth_crowd": torch.zeros(8, boxes, dtype=torch.bool),
        }},
    )


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


step(20, 100)
before = peak()
step({BOXES}, 8732)
print(peak() - before)
"""


def test_a_batch_of_many_boxes_takes_no_table_of_boxes_times_anchors():
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
    table = 8 * BOXES * 8732 * 4  # bytes, of which one was made for each of several operations
    assert int(told) < table / 2


def drawn(*shape: int) -> torch.Tensor:
    """Corners are multiples of 1/16, so that many overlaps are equal."""
    low, high = torch.randint(0, 17, (2, *shape, 2), generator=torch.Generator().manual_seed(0)).sort(dim=0).values
    return torch.cat([low, high], -1) / 16


@pytest.mark.parametrize("cells", [1, 500, 2**21])
def test_boxes_are_matched_in_pieces_as_in_one(cells: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlaps, "CELLS", cells)
    boxes, corners = drawn(3, 40), drawn(111)
    box_of, anchor_of = overlaps.plain(boxes, corners)
    for row, some in enumerate(boxes):
        table = box_iou(corners, some).nan_to_num(0.0)  # 0 / 0 of two boxes without an area
        assert torch.equal(box_of[row], table.argmax(1))
        assert torch.equal(anchor_of[row], table.T.argmax(1))
