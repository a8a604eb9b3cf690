"""COCO's twelve numbers of detections against the ground truth that comes with the batches, so no file is needed.

Batch keys: index, valid (batch,); height, width (batch,) of the original picture; truth_boxes (batch, n, 4) x, y,
width, height in its pixels, truth_labels (batch, n) from 1, 0 where a row is padding; truth_area, truth_crowd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor
from torch.nn import functional as F

from sightline.boxes import iou
from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.parts import Batch, Metric, Scores

WORST = 20
NAMES = ("ap", "ap50", "ap75", "aps", "apm", "apl", "ar1", "ar10", "ar100", "ars", "arm", "arl")
FOUND_IOU = 0.5  # for the list of the worst pictures: the overlap that finds a ground truth,
CONFIDENT = 0.5  # and the score from which on a detection of nothing is a mistake


class CocoMap(Metric):
    """Keeps rows of numbers on the device, each beginning with the picture's index, -1 where there is none.

    A score is -1, as COCO has it, where there is no ground truth to measure it on.
    """

    def __init__(self, classes: tuple[str, ...], device: torch.device):
        self.classes = classes
        # MPS has no 64-bit floats, which hold an index and COCO's coordinates exactly.
        self._like = torch.zeros(0, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._pictures: list[Tensor] = []  # (pictures, 4): index, ground truths, missed ones, confident mistakes
        self._detections: list[Tensor] = []  # (n, 7): index, class, score, x, y, width, height
        self._truths: list[Tensor] = []  # (n, 8): index, class, is a crowd, area, x, y, width, height

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        valid, *numbers = (batch[key].to(self._like.device) for key in ("valid", "index", "height", "width"))
        index, height, width = (number.double() for number in numbers)
        index = torch.where(valid, index, -1.0)
        boxes = _in_pixels(predictions["boxes"].to(self._like), height, width)
        detections = self._rows(index, predictions["labels"], predictions["scores"], boxes)
        truths = self._rows(index, *(batch[f"truth_{key}"] for key in ("labels", "crowd", "area", "boxes")))
        self._pictures.append(torch.stack([index, *_mistakes(detections, truths)], dim=1))
        self._detections.append(detections.flatten(0, 1))
        self._truths.append(truths.flatten(0, 1))

    def _rows(self, index: Tensor, labels: Tensor, *columns: Tensor) -> Tensor:
        """(batch, n, columns) of each picture's boxes."""
        labels = labels.to(self._like)
        index = torch.where(labels > 0, index[:, None], -1.0)
        parts = (part.to(self._like) for part in columns)
        return torch.cat([index[..., None], labels[..., None], *(p[..., None] if p.ndim == 2 else p for p in parts)], 2)

    def merge(self, world: World) -> None:
        for kept in (self._pictures, self._detections, self._truths):
            kept[:] = [_gathered(kept, world)]

    def names(self) -> tuple[str, ...]:
        return (*NAMES, "samples")

    def result(self) -> Scores:
        pictures, detections, truths = (
            _present(torch.cat(kept)).cpu().numpy() if kept else np.zeros((0, 4))
            for kept in (self._pictures, self._detections, self._truths)
        )
        if not len(pictures):
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        evaluation = _evaluated(len(self.classes), pictures, detections, truths)
        values = {name: float(value) for name, value in zip(NAMES, evaluation.stats, strict=True)}
        values["samples"] = float(len(pictures))
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoUs, recalls, classes), any size, 100 detections
        counts = np.bincount(truths[truths[:, 2] == 0, 1].astype(int), minlength=len(self.classes) + 1)
        per_class = [
            {
                "class": name,
                "ap": float(precision[:, :, number].mean()) if counts[number + 1] else None,
                "ap50": float(precision[0, :, number].mean()) if counts[number + 1] else None,
                "truths": int(counts[number + 1]),
            }
            for number, name in enumerate(self.classes)
        ]
        return Scores(values, {"classes": per_class}, _worst(pictures))


def _in_pixels(corners: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """x, y, width, height of corner boxes (batch, n, 4) in the pixels of their pictures."""
    ymin, xmin, ymax, xmax = corners.unbind(2)
    height, width = height[:, None], width[:, None]
    return torch.stack([xmin * width, ymin * height, (xmax - xmin) * width, (ymax - ymin) * height], dim=2)


def _mistakes(detections: Tensor, truths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per picture: ground truths without crowds, how many of them no detection of their class overlaps, and how many
    confident detections overlap none of their class."""
    is_truth, is_crowd = truths[..., 0] >= 0, truths[..., 2] > 0
    is_sure = (detections[..., 0] >= 0) & (detections[..., 2] >= CONFIDENT)
    low, size = detections[..., 3:5], detections[..., 5:7]
    truth_low, truth_size = truths[..., 4:6], truths[..., 6:8]
    overlap = iou(torch.cat([low, low + size], 2), torch.cat([truth_low, truth_low + truth_size], 2))
    is_same = (detections[..., 1, None] == truths[:, None, :, 1]) & (detections[..., 0, None] >= 0) & is_truth[:, None]
    is_found = is_same & (overlap >= FOUND_IOU)  # (batch, detections, truths)
    is_missed = is_truth & ~is_crowd & ~is_found.any(1)
    # Somewhere in a crowd there may be anything of its class.
    is_wrong = is_sure & ~(is_found | (is_same & is_crowd[:, None])).any(2)
    counts = ((is_truth & ~is_crowd).sum(1), is_missed.sum(1), is_wrong.sum(1))
    return counts[0].to(overlap), counts[1].to(overlap), counts[2].to(overlap)


def _present(rows: Tensor) -> Tensor:
    """Return the rows that belong to an image, sorted by its index: the same from any number of ranks."""
    rows = rows[rows[:, 0] >= 0]
    return rows[rows[:, 0].argsort(stable=True)]


def _gathered(kept: list[Tensor], world: World) -> Tensor:
    """The rows of all ranks."""
    rows = _present(torch.cat(kept))
    most = int(world.gather(torch.tensor([len(rows)], device=rows.device)).max())
    return world.gather(F.pad(rows, (0, 0, 0, most - len(rows)), value=-1.0))


def _evaluated(classes: int, pictures: np.ndarray, detections: np.ndarray, truths: np.ndarray) -> Any:
    """COCO's own evaluation, run."""
    images = [{"id": int(index)} for index in pictures[:, 0]]
    categories = [{"id": number + 1} for number in range(classes)]
    found = [
        {"id": n, "image_id": int(i), "category_id": int(c), "score": score, "bbox": box, "area": box[2] * box[3]}
        for n, (i, c, score, *box) in enumerate(detections.tolist(), start=1)
    ]
    given = [
        {"id": n, "image_id": int(i), "category_id": int(c), "iscrowd": int(crowd), "area": area, "bbox": box}
        for n, (i, c, crowd, area, *box) in enumerate(truths.tolist(), start=1)
    ]
    sets = [COCO({"images": images, "categories": categories, "annotations": rows}) for rows in (given, found)]
    evaluation = COCOeval_faster(*sets, iouType="bbox", print_function=lambda *lines: None)
    evaluation.run()
    return evaluation


def _worst(pictures: np.ndarray) -> list[dict[str, Any]]:
    """Return the images with the most mistakes; of equal ones the first."""
    mistakes = pictures[:, 2] + pictures[:, 3]
    order = np.argsort(-mistakes, kind="stable")[:WORST]
    return [
        {"index": int(index), "truths": int(truths), "missed": int(missed), "wrong": int(wrong)}
        for index, truths, missed, wrong in pictures[order].tolist()
        if missed + wrong
    ]
