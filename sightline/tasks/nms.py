"""Detections of a whole batch from the scores of all anchors: take the best anchors of each class, apply greedy
non-maximum suppression within the class, then keep the best of all classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.boxes import decode, iou
from sightline.tasks.config import DetectionConfig

Suppress = Callable[[Tensor, Tensor, float], Tensor]
FEW = 2**22  # scores above the threshold, of a batch; each takes about 100 bytes while they are sorted
BestBoxes = Callable[[Tensor, Tensor, float, float, int, int], tuple[Tensor, Tensor, Tensor]]


def boxes_of(
    task: DetectionConfig, logits: Tensor, offsets: Tensor, anchors: Tensor, choose: BestBoxes | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes, scores and labels as `best_boxes` does, from the answer of a detector. `choose` replaces it."""
    scores = logits.float().softmax(2)[..., 1:]  # (batch, anchors, classes)
    boxes = decode(offsets.float(), anchors)
    return (choose or best_boxes)(boxes, scores, task.score_threshold, task.nms_iou, task.candidates, task.per_image)


def best_boxes(
    boxes: Tensor,
    scores: Tensor,
    score_threshold: float,
    nms_iou: float,
    candidates: int,
    per_image: int,
    static: bool | None = None,
    suppression: Suppress | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return boxes (batch, n, 4), scores (batch, n) and labels (batch, n) from 1; all are 0 after the last detection.

    `boxes` (batch, anchors, 4) are corner boxes, `scores` (batch, anchors, classes) exclude the background. n is
    `per_image`, or less if classes and candidates cannot fill it. Equal scores are ordered by class, then by anchor.
    `static` avoids shapes that depend on scores, for devices and compilers; by default it is off on the CPU, and where
    few scores are above the threshold on CUDA. The result is the same. `suppression` stands in for `suppress`.
    """
    batch, anchors, classes = scores.shape
    size = min(per_image, classes * min(candidates, anchors))
    if not _has_few(scores, score_threshold) if static is None else static:
        scores = torch.where(scores > score_threshold, scores, 0.0)
        top, anchor = _top(scores.transpose(1, 2).reshape(-1, anchors), min(candidates, anchors))
        row = torch.arange(batch * classes, device=scores.device)
    else:
        top, anchor, row = _above(scores, score_threshold, candidates)
    image = row // classes
    kept = (suppression or suppress)(boxes[image[:, None], anchor], top > 0, nms_iou)
    top = torch.where(kept, top, 0.0)
    width = top.shape[1]
    # Back to one row per image; most of its entries are empty.
    all_scores = top.new_zeros(batch * classes, width).index_copy(0, row, top).view(batch, -1)
    all_anchors = anchor.new_zeros(batch * classes, width).index_copy(0, row, anchor).view(batch, -1)
    best, place = _top(all_scores, min(size, classes * width))
    found = boxes.gather(1, all_anchors.gather(1, place)[..., None].expand(-1, -1, 4))
    is_detection = best > 0
    found = torch.where(is_detection[..., None], found, 0.0)
    labels = torch.where(is_detection, place // width + 1, 0)
    missing = size - best.shape[1]
    return F.pad(found, (0, 0, 0, missing)), F.pad(best, (0, missing)), F.pad(labels, (0, missing))


def suppress(boxes: Tensor, is_candidate: Tensor, nms_iou: float) -> Tensor:
    """Return (rows, n): True for each of `boxes` (rows, n, 4) that greedy suppression keeps.

    Boxes are in descending order of score. Starting with the first, each kept box drops all later ones that overlap
    it by `nms_iou` or more.
    """
    kept = is_candidate.clone()
    for place in range(boxes.shape[1] - 1):
        # One row of overlaps at a time: all at once would be (rows, n, n), gigabytes for a batch of 128.
        overlaps = iou(boxes[:, place : place + 1], boxes[:, place + 1 :])[:, 0] >= nms_iou
        kept[:, place + 1 :] &= ~(overlaps & kept[:, place : place + 1])
    return kept


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row (rows, n) of non-negative scores and their places; ties go to the first.

    topk does not define the order of ties, so it gets unique keys made of score and place.
    """
    length = scores.shape[1]
    last_first = torch.arange(length - 1, -1, -1, device=scores.device)
    # Non-negative floats sort like their bits read as integers.
    keys = torch.add(last_first, scores.contiguous().view(torch.int32), alpha=length)  # int64
    places = length - 1 - keys.topk(count, dim=1).values % length
    return scores.gather(1, places), places


def _has_few(scores: Tensor, threshold: float) -> bool:
    """Return whether it is best to look only at what is above the threshold. Waits for a GPU, which then skips most of
    the work: 200 rounds over the candidates of every class of every image, of which nearly all are empty."""
    if scores.device.type != "cuda":
        return scores.device.type == "cpu"
    return not torch.cuda.is_current_stream_capturing() and int((scores > threshold).sum()) <= FEW


def _above(scores: Tensor, score_threshold: float, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as _top above the threshold, only for classes of an image that have any score there.

    The result is (scores (rows, n), anchors (rows, n), image * classes + class (rows,)), with the smallest possible n.
    """
    classes = scores.shape[2]
    image, anchor, number = (scores > score_threshold).nonzero(as_tuple=True)
    value, row = scores[image, anchor, number], image * classes + number
    order = value.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    value, anchor = value[order], anchor[order]
    rows, which, counts = row[order].unique_consecutive(return_inverse=True, return_counts=True)
    place = torch.arange(len(value), device=value.device) - (counts.cumsum(0) - counts)[which]
    is_candidate = place < candidates
    width = min(candidates, int(counts.max())) if len(counts) else 1
    at = (which[is_candidate], place[is_candidate])
    top = value.new_zeros(len(rows), width).index_put(at, value[is_candidate])
    return top, anchor.new_zeros(len(rows), width).index_put(at, anchor[is_candidate]), rows
