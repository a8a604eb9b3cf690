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
    """(boxes (batch, n, 4), scores (batch, n), labels (batch, n) from 1; all 0 where there are fewer than n), where n
    is `per_image`, or less where classes and candidates cannot give so many.

    `boxes` (batch, anchors, 4) are corner boxes, `scores` (batch, anchors, classes) those of the classes without
    background. Of equal scores the lower class and then the lower anchor comes first. `static` is for devices and
    exports, where no shape may depend on a score; by default everywhere but on the CPU. The result is the same.
    """
    batch, anchors, classes = scores.shape
    size = min(per_image, classes * min(candidates, anchors))
    if scores.device.type != "cpu" if static is None else static:
        scores = torch.where(scores > score_threshold, scores, 0.0)
        top, anchor = _top(scores.transpose(1, 2).reshape(-1, anchors), min(candidates, anchors))
        row = torch.arange(batch * classes, device=scores.device)
    else:
        top, anchor, row = _above(scores, score_threshold, candidates)
    picture = row // classes
    kept = suppress(boxes[picture[:, None], anchor], top > 0, nms_iou)
    top = torch.where(kept, top, 0.0)
    width = top.shape[1]
    # Back to one row per picture, where most places are empty.
    every = top.new_zeros(batch * classes, width).index_copy(0, row, top).view(batch, -1)
    of_every = anchor.new_zeros(batch * classes, width).index_copy(0, row, anchor).view(batch, -1)
    best, place = _top(every, min(size, classes * width))
    found = boxes.gather(1, of_every.gather(1, place)[..., None].expand(-1, -1, 4))
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


def _above(scores: Tensor, score_threshold: float, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """What _top finds above the threshold, with only the classes of a picture where there is any: (scores (rows, n),
    anchors (rows, n), picture * classes + class (rows,)), with n as small as can be."""
    classes = scores.shape[2]
    picture, anchor, number = (scores > score_threshold).nonzero(as_tuple=True)
    value, row = scores[picture, anchor, number], picture * classes + number
    order = value.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    value, anchor = value[order], anchor[order]
    rows, which, counts = row[order].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(value)) - (counts.cumsum(0) - counts)[which]
    is_candidate = place < candidates
    width = min(candidates, int(counts.max())) if len(counts) else 1
    at = (which[is_candidate], place[is_candidate])
    top = value.new_zeros(len(rows), width).index_put(at, value[is_candidate])
    return top, anchor.new_zeros(len(rows), width).index_put(at, anchor[is_candidate]), rows
