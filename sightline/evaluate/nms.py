"""From the scores of all anchors to a picture's detections, for a whole batch at once: the best anchors of each class,
greedy non-maximum suppression within a class, then the best of all classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.boxes import iou


def best_boxes(
    boxes: Tensor,
    scores: Tensor,
    score_threshold: float,
    nms_iou: float,
    candidates: int,
    per_image: int,
    static: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(boxes (batch, n, 4), scores (batch, n), labels (batch, n) from 1; all 0 where there are fewer than n).

    n is `per_image`, or less where classes and candidates cannot give so many.

    `boxes` (batch, anchors, 4) are corner boxes, `scores` (batch, classes, anchors) those of the classes without
    background. Of equal scores the lower class and then the lower anchor comes first. `static` is for devices and
    exports, where no shape may depend on a score; by default everywhere but on the CPU. The result is the same.
    """
    batch, classes, anchors = scores.shape
    width = min(candidates, anchors)
    size = min(per_image, classes * width)
    rows = torch.where(scores > score_threshold, scores, 0.0).reshape(-1, anchors)
    shown = None
    if not (scores.device.type != "cpu" if static is None else static):
        # Where reading a number costs nothing, classes and places without a candidate are left out: most of them.
        counts = (rows > 0).sum(1)
        shown = counts.nonzero()[:, 0]
        rows, width = rows[shown], min(width, int(counts.max()) or 1)
    top, anchor = _top(rows, width)  # (rows, width)
    picture = torch.arange(batch * classes, device=rows.device) // classes
    picture = picture if shown is None else picture[shown]
    kept = suppress(boxes[picture[:, None], anchor], top > 0, nms_iou)
    top = torch.where(kept, top, 0.0)
    if shown is not None:
        top = top.new_zeros(batch * classes, width).index_copy(0, shown, top)
        anchor = anchor.new_zeros(batch * classes, width).index_copy(0, shown, anchor)
    best, place = _top(top.view(batch, -1), min(size, classes * width))
    found = boxes.gather(1, anchor.view(batch, -1).gather(1, place)[..., None].expand(-1, -1, 4))
    is_there = best > 0
    found = torch.where(is_there[..., None], found, 0.0)
    labels = torch.where(is_there, place // width + 1, 0)
    missing = size - best.shape[1]
    return F.pad(found, (0, 0, 0, missing)), F.pad(best, (0, missing)), F.pad(labels, (0, missing))


def suppress(boxes: Tensor, is_there: Tensor, nms_iou: float) -> Tensor:
    """Which of `boxes` (rows, n, 4), in descending order of score, greedy suppression keeps (rows, n): from the first
    on, each that is still there drops those behind it that overlap it by `nms_iou` or more."""
    kept = is_there.clone()
    for place in range(boxes.shape[1] - 1):
        # Overlaps are made when needed: all at once would be (rows, n, n), gigabytes for a batch of 128.
        overlaps = iou(boxes[:, place : place + 1], boxes[:, place + 1 :])[:, 0] >= nms_iou
        kept[:, place + 1 :] &= ~(overlaps & kept[:, place : place + 1])
    return kept


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row (rows, n) of scores that are not negative, and where they stand; of equal ones
    the first. topk promises nothing about equal ones, so it is given numbers that are not: place within score."""
    length = scores.shape[1]
    last_first = torch.arange(length - 1, -1, -1, device=scores.device)
    # The bits of a float that is not negative, read as an integer, have the order of the floats.
    keys = scores.contiguous().view(torch.int32).long().mul_(length).add_(last_first)
    places = length - 1 - keys.topk(count, dim=1).values % length
    return scores.gather(1, places), places
