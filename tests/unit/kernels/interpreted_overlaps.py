"""The Triton kernels that match boxes, as Triton's interpreter runs them on the CPU, against plain torch.

test_instance_norm.py runs this file in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import torch

from sightline.kernels import overlaps, overlaps_triton, self_check
from sightline.tasks.matching import match

CPU = torch.device("cpu")


def test_the_check_of_every_run_passes():
    assert overlaps.why_wrong(CPU) == ""


def test_the_check_sees_a_box_that_is_left_out_and_the_last_of_equal_anchors(monkeypatch):
    right = overlaps_triton.best_overlaps

    def too_short(boxes, used, corners):
        return right(boxes, (used - 1).clamp(min=0), corners)

    def last_anchor(boxes, used, corners):
        return right(boxes, used, corners)[0], len(corners) - 1 - right(boxes, used, corners.flip(0))[1]

    monkeypatch.setattr(overlaps_triton, "best_overlaps", too_short)
    assert overlaps.why_wrong(CPU).startswith("the best box differs")
    monkeypatch.setattr(overlaps_triton, "best_overlaps", last_anchor)
    assert overlaps.why_wrong(CPU).startswith("the best anchor differs")


def test_anchors_get_the_targets_that_plain_torch_gives_them(monkeypatch):
    """Places between boxes are empty, an image has no box, and boxes claim anchors."""
    boxes = torch.rand(3, 12, 4).sort(dim=2).values
    labels = torch.randint(0, 3, (3, 12))
    labels[1], labels[2, 5:] = 0, 0
    anchors = torch.rand(300, 4) * 0.5 + 0.1
    expected = match(boxes, labels, anchors)
    monkeypatch.setattr(overlaps, "applies", lambda boxes: True)
    monkeypatch.setattr(self_check, "_answers", {("matching of boxes", CPU): True})
    for found, other in zip(match(boxes, labels, anchors), expected, strict=True):
        assert torch.equal(found, other)
