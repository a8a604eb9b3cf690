"""Targets of a single-shot detector: the ground truth that each anchor is matched to, and the anchors without one
that are hard enough to learn from. Whole batches on the device, of static shapes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sightline.boxes import encode, iou, to_corners
from sightline.kernels import overlaps

POSITIVE_IOU = 0.5
NEGATIVES_PER_POSITIVE = 3


def match(
    boxes: Tensor, labels: Tensor, anchors: Tensor, lineage: Literal["tf", "mlperf"] = "tf"
) -> tuple[Tensor, Tensor]:
    """Return the class of each anchor (batch, anchors), 0 for background, and offsets to its box (batch, anchors, 4).

    `boxes` (batch, n, 4) are corner boxes, `labels` (batch, n) their classes, 0 where a row is padding. An anchor is
    matched to the box it overlaps most, where that is enough, and in any case to a box that overlaps no anchor more.
    Of two boxes that claim one anchor so, `tf` gives it to the first and `mlperf` to the last.
    """
    used = ((labels > 0) * torch.arange(1, labels.shape[1] + 1, device=labels.device)).amax(1)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        # Where reading a number costs nothing, places that no image of the batch uses are left out: most of them.
        most = max(1, int(used.max()))
        boxes, labels = boxes[:, :most], labels[:, :most]
    boxes = torch.where(labels[..., None] > 0, boxes, 0.0)  # without an area they overlap nothing
    corners = to_corners(anchors)
    if overlaps.applies(boxes):
        box_of, best_anchor = overlaps.best_overlaps(boxes, used, corners)
    else:
        box_of, best_anchor = overlaps.plain(boxes, corners)
    # What the best overlap is, is computed again: a table of all would be stored.
    claimed, is_claimed = _claims(best_anchor, labels > 0, len(anchors), lineage)
    best = _paired_iou(_pick(boxes, box_of), corners)
    is_enough = best >= POSITIVE_IOU if lineage == "tf" else best > POSITIVE_IOU
    box_of = torch.where(is_claimed, claimed, box_of)
    is_positive = is_claimed | is_enough
    classes = torch.where(is_positive, labels.gather(1, box_of), 0)
    offsets = torch.where(is_positive[..., None], encode(_pick(boxes, box_of), anchors), 0.0)
    return classes, offsets


def _pick(boxes: Tensor, box_of: Tensor) -> Tensor:
    """Return the box (batch, anchors, 4) of each anchor."""
    return boxes.gather(1, box_of[..., None].expand(-1, -1, 4))


def _paired_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the overlap (batch, n) of each box in a (batch, n, 4) with the one in its place in b (n, 4)."""
    return iou(a[..., None, :], b[:, None, :])[..., 0, 0]


def _claims(
    best_anchor: Tensor, is_box: Tensor, anchors: int, lineage: Literal["tf", "mlperf"]
) -> tuple[Tensor, Tensor]:
    """Return (the box that claims an anchor, whether any does), both (batch, anchors), by best anchors."""
    boxes = best_anchor.shape[1]
    number = torch.arange(boxes, device=best_anchor.device)
    nobody, first_or_last = (boxes, "amin") if lineage == "tf" else (-1, "amax")
    # Integers, so the order in which a device scatters them does not matter.
    claimed = torch.full((len(best_anchor), anchors), nobody, device=best_anchor.device)
    claimed = claimed.scatter_reduce(1, best_anchor, torch.where(is_box, number, nobody), first_or_last)
    return claimed, claimed != nobody


def hard_negatives(losses: Tensor, is_positive: Tensor) -> Tensor:
    """Choose the background anchors (batch, anchors) with the largest losses: three per positive of their image, if
    there are so many; of equal ones the first. A loss that is not a number counts as large, so that it shows."""
    # The original ranks positives among the negatives, with loss 0: where fewer than three negatives per positive have
    # a loss, it counts positives twice. Here they stand behind all negatives and are never chosen.
    losses = torch.where(is_positive, -1.0, losses.detach().clamp(min=0))  # rounding can make a loss of 0 negative
    positives = is_positive.sum(1, keepdim=True)
    wanted = torch.minimum(NEGATIVES_PER_POSITIVE * positives, losses.shape[1] - positives)  # (batch, 1)
    # One sort instead of the original's two. A running count among equal losses would do without its indices, but
    # Inductor of torch 2.11 cannot compile a cumulative sum here.
    order = losses.sort(dim=1, descending=True, stable=True).indices  # NaN comes first
    is_wanted = torch.arange(losses.shape[1], device=losses.device) < wanted
    return torch.zeros_like(is_positive).scatter(1, order, is_wanted)
