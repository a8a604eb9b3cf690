"""`best_boxes` of nms.py as one operation of an exported graph, and what file formats replace it by.

Unrolled, its loop would be thousands of nodes. ONNX has NonMaxSuppression; torch.export gets torchvision's nms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.tasks.nms import best_boxes


@torch.library.custom_op("sightline::best_boxes", mutates_args=())
def best_boxes_in_graph(
    boxes: Tensor, scores: Tensor, score_threshold: float, nms_iou: float, candidates: int, per_image: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `best_boxes` does."""
    return best_boxes(boxes, scores, score_threshold, nms_iou, candidates, per_image)


@best_boxes_in_graph.register_fake
def _(
    boxes: Tensor, scores: Tensor, score_threshold: float, nms_iou: float, candidates: int, per_image: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, anchors, classes = scores.shape
    n = min(per_image, classes * min(candidates, anchors))
    return boxes.new_empty(batch, n, 4), scores.new_empty(batch, n), scores.new_empty(batch, n, dtype=torch.int64)


def for_torch() -> dict[Any, Callable[..., Any]]:
    """Return the table for ExportedProgram.run_decompositions: torch's operations and torchvision's nms."""

    def replacement(
        boxes: Tensor, scores: Tensor, score_threshold: float, nms_iou: float, candidates: int, per_image: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return best_boxes(boxes, scores, score_threshold, nms_iou, candidates, per_image, True, suppress)

    return {torch.ops.sightline.best_boxes.default: replacement}


def suppress(boxes: Tensor, is_candidate: Tensor, nms_iou: float) -> Tensor:
    """Do what `suppress` of nms.py does, by one call of torchvision's nms for all rows."""
    from torchvision.ops import nms

    row, place = is_candidate.nonzero(as_tuple=True)
    # Two empty boxes are added at the end: torchvision tells torch.export that nms keeps two boxes or more.
    corners = F.pad(boxes[row, place].double(), (0, 0, 0, 2))
    rows = F.pad(row, (0, 2))
    # Rows are moved apart, in float64, so that no overlap changes.
    apart = 2 * boxes.abs().amax().double() + 1
    # The places of a row are in descending order of score.
    order = torch.arange(corners.shape[0], 0, -1, dtype=torch.float64, device=boxes.device)
    kept = nms(corners + rows[:, None] * apart, order, _below(nms_iou))
    is_kept = torch.zeros_like(rows, dtype=torch.bool).index_fill(0, kept, True)
    return torch.zeros_like(is_candidate).index_put((row, place), is_kept[: row.shape[0]])


def for_onnx() -> dict[Any, Callable[..., Any]]:
    """Return the table for torch.onnx.export: operations of ONNX, NonMaxSuppression among them. Needs onnxscript."""
    from onnxscript import opset18

    op: Any = opset18

    def replacement(
        boxes: Any, scores: Any, score_threshold: float, nms_iou: float, candidates: int, per_image: int
    ) -> Any:
        _, anchors, classes = scores.shape
        width = min(candidates, anchors)
        size = min(per_image, classes * width)
        by_class = op.Transpose(scores, perm=[0, 2, 1])  # (batch, classes, anchors)
        none = op.Constant(value_float=0.0)
        by_class = op.Where(op.Greater(by_class, op.Constant(value_float=score_threshold)), by_class, none)
        # TopK puts the lower of two places with equal values first, as best_boxes does.
        top, anchor = op.TopK(by_class, _ints(op, width), axis=2)
        found = _gather(op, boxes, op.Reshape(anchor, _ints(op, 0, classes * width)))  # (batch, classes * width, 4)
        # A row is a class of an image: NonMaxSuppression takes rows for images, each with a single class.
        selected = op.NonMaxSuppression(
            op.Reshape(found, _ints(op, -1, width, 4)),
            op.Reshape(top, _ints(op, -1, 1, width)),
            _ints(op, width),
            op.Constant(value_floats=[_below(nms_iou)]),
            op.Constant(value_floats=[score_threshold]),
        )  # (kept, 3): row, 0, place
        chosen = op.Gather(selected, _ints(op, 0, 2), axis=1)
        rows = op.Reshape(top, _ints(op, -1, width))
        kept = op.ScatterND(op.Mul(rows, none), chosen, op.GatherND(rows, chosen))
        best, place = op.TopK(op.Reshape(kept, _ints(op, -1, classes * width)), _ints(op, size), axis=1)
        is_detection = op.Greater(best, none)
        label = op.Add(op.Div(place, _ints(op, width)), _ints(op, 1))
        corners = op.Where(op.Unsqueeze(is_detection, _ints(op, 2)), _gather(op, found, place), none)
        return corners, best, op.Where(is_detection, label, _ints(op, 0))

    return {torch.ops.sightline.best_boxes.default: replacement}


def _gather(op: Any, boxes: Any, places: Any) -> Any:
    """Return the boxes (batch, n, 4) at places (batch, n) of (batch, m, 4)."""
    return op.GatherElements(boxes, op.Tile(op.Unsqueeze(places, _ints(op, 2)), _ints(op, 1, 1, 4)), axis=1)


def _ints(op: Any, *numbers: int) -> Any:
    return op.Constant(value_ints=list(numbers))


def _below(threshold: float) -> float:
    """Return the next smaller float32: here overlaps of the threshold itself are dropped, in ONNX only larger ones."""
    return float(np.nextafter(np.float32(threshold), np.float32(0)))
