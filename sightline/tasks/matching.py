"""What a single-shot detector should answer at each anchor: which ground truth it is matched to, and which of the
anchors without one are hard enough to learn from. Whole batches on the device, of static shapes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sightline.boxes import encode, iou, to_corners

POSITIVE_IOU = 0.5
NEGATIVES_PER_POSITIVE = 3


def match(
    boxes: Tensor, labels: Tensor, anchors: Tensor, lineage: Literal["tf", "mlperf"] = "tf"
) -> tuple[Tensor, Tensor]:
    """(class of each anchor (batch, anchors), 0 for background; offsets to its box (batch, anchors, 4), 0 there too).

    `boxes` (batch, n, 4) are corner boxes, `labels` (batch, n) their classes, 0 where a row is padding.
    """
    box_of, is_positive = assign(iou(boxes, to_corners(anchors)), labels > 0, lineage)
    classes = torch.where(is_positive, labels.gather(1, box_of), 0)
    theirs = boxes.gather(1, box_of[..., None].expand(-1, -1, 4))
    offsets = torch.where(is_positive[..., None], encode(theirs, anchors), 0.0)
    return classes, offsets


def assign(overlap: Tensor, is_box: Tensor, lineage: Literal["tf", "mlperf"]) -> tuple[Tensor, Tensor]:
    """(box of each anchor, whether it is matched to it), both (batch, anchors), from overlaps (batch, n, anchors).

    An anchor is matched to the box it overlaps most, where that is enough, and in any case to a box that overlaps
    no anchor more. Of two boxes that claim one anchor so, `tf` gives it to the first and `mlperf` to the last.
    """
    overlap = torch.where(is_box[..., None], overlap, -1.0)  # padding overlaps less than not at all
    best, box_of = overlap.max(dim=1)  # (batch, anchors); of equal ones the first
    best_anchor = overlap.max(dim=2).indices  # (batch, n)
    boxes = overlap.shape[1]
    number = torch.arange(boxes, device=overlap.device).expand_as(best_anchor)
    # Integers, so the order in which a device scatters them does not matter.
    if lineage == "tf":
        is_enough = best >= POSITIVE_IOU
        nobody, first_or_last = boxes, "amin"
    else:
        is_enough = best > POSITIVE_IOU
        nobody, first_or_last = -1, "amax"
    claims = torch.where(is_box, number, nobody)
    claimed = torch.full_like(box_of, nobody).scatter_reduce(1, best_anchor, claims, first_or_last)
    is_claimed = claimed != nobody
    return torch.where(is_claimed, claimed, box_of), is_claimed | is_enough


def hard_negatives(losses: Tensor, is_positive: Tensor) -> Tensor:
    """The background anchors (batch, anchors) with the largest losses: three per positive of their picture, as far as
    there are so many; of equal ones the first. A loss that is not a number counts as large, so that it is seen."""
    # The original ranks positives among the negatives, with loss 0: where fewer than three negatives per positive have
    # a loss, it counts positives twice. Here they stand behind all negatives and are never chosen.
    losses = torch.where(is_positive, -1.0, losses.detach().clamp(min=0))  # rounding can make a loss of 0 negative
    positives = is_positive.sum(1, keepdim=True)
    wanted = torch.minimum(NEGATIVES_PER_POSITIVE * positives, losses.shape[1] - positives)  # (batch, 1)
    # One sort instead of the original's two: the loss at the last place tells who is before it.
    descending = losses.sort(dim=1, descending=True).values
    last = descending.gather(1, (wanted - 1).clamp(min=0))
    is_above = ~(losses <= last)  # true for NaN, unlike losses > last
    is_tied = losses == last
    left = wanted - is_above.sum(1, keepdim=True)
    return is_above | (is_tied & (is_tied.cumsum(1) <= left) & (wanted > 0))
