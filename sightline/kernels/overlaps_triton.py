"""Triton kernels of overlaps.py. They round as boxes.iou does, so that equal overlaps are equal here too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ANCHORS = 256  # of a program
ROUND = 1024  # anchors that a box is compared with at once


def best_overlaps(boxes: Tensor, used: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Return what overlaps.best_overlaps does; boxes and corners are contiguous."""
    batch, n, anchors = *boxes.shape[:2], len(corners)
    box_of = torch.empty((batch, anchors), dtype=torch.int64, device=boxes.device)
    anchor_of = torch.empty((batch, n), dtype=torch.int64, device=boxes.device)
    with torch.cuda.device_of(boxes):
        best_boxes[(batch, triton.cdiv(anchors, ANCHORS))](
            boxes, used, corners, box_of, n, anchors, ANCHORS=ANCHORS, enable_fp_fusion=False
        )
        best_anchors[(batch, n)](boxes, used, corners, anchor_of, n, anchors, ROUND=ROUND, enable_fp_fusion=False)
    return box_of, anchor_of


@triton.jit
def overlap(ymin_a, xmin_a, ymax_a, xmax_a, ymin_b, xmin_b, ymax_b, xmax_b):  # type: ignore[no-untyped-def]
    """Return boxes.iou."""
    height = tl.maximum(tl.minimum(ymax_a, ymax_b) - tl.maximum(ymin_a, ymin_b), 0.0)
    width = tl.maximum(tl.minimum(xmax_a, xmax_b) - tl.maximum(xmin_a, xmin_b), 0.0)
    shared = height * width
    union = (ymax_a - ymin_a) * (xmax_a - xmin_a) + (ymax_b - ymin_b) * (xmax_b - xmin_b) - shared
    return tl.where(shared > 0, tl.div_rn(shared, tl.where(shared > 0, union, 1.0)), 0.0)


@triton.jit
def best_boxes(  # type: ignore[no-untyped-def]
    boxes, used, corners, box_of, n, anchors, ANCHORS: tl.constexpr
):
    """Find the first box that each of ANCHORS anchors of one image overlaps most."""
    image = tl.program_id(0).to(tl.int64)
    anchor = tl.program_id(1) * ANCHORS + tl.arange(0, ANCHORS)
    known = anchor < anchors
    at = corners + anchor * 4
    ymin, xmin = tl.load(at, mask=known, other=0.0), tl.load(at + 1, mask=known, other=0.0)
    ymax, xmax = tl.load(at + 2, mask=known, other=0.0), tl.load(at + 3, mask=known, other=0.0)
    best = tl.zeros((ANCHORS,), tl.float32)
    number = tl.zeros((ANCHORS,), tl.int64)
    for place in range(tl.load(used + image)):
        box = boxes + (image * n + place) * 4
        found = overlap(ymin, xmin, ymax, xmax, tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3))
        number = tl.where(found > best, place, number)
        best = tl.maximum(found, best)
    tl.store(box_of + image * anchors + anchor, number, mask=known)


@triton.jit
def best_anchors(  # type: ignore[no-untyped-def]
    boxes, used, corners, anchor_of, n, anchors, ROUND: tl.constexpr
):
    """Find the first anchor that one box overlaps most; 0 where there is no box."""
    image, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.zeros((), tl.int64)
    if place < tl.load(used + image):
        box = boxes + (image * n + place) * 4
        y0, x0, y1, x1 = tl.load(box), tl.load(box + 1), tl.load(box + 2), tl.load(box + 3)
        best = tl.full((ROUND,), -1.0, tl.float32)
        number = tl.zeros((ROUND,), tl.int64)
        for start in range(0, anchors, ROUND):
            anchor = start + tl.arange(0, ROUND)
            known = anchor < anchors
            at = corners + anchor * 4
            ymin, xmin = tl.load(at, mask=known, other=0.0), tl.load(at + 1, mask=known, other=0.0)
            ymax, xmax = tl.load(at + 2, mask=known, other=0.0), tl.load(at + 3, mask=known, other=0.0)
            found = tl.where(known, overlap(y0, x0, y1, x1, ymin, xmin, ymax, xmax), -1.0)
            number = tl.where(found > best, anchor, number)
            best = tl.maximum(found, best)
        first = tl.min(tl.where(best == tl.max(best, 0), number, anchors), 0)
    tl.store(anchor_of + image * n + place, first)
