"""COCO's twelve scores of detections, and precision, recall and F1. The ground truth comes with the batches, so no
annotation file is needed.

Batch keys: index, valid (batch,); height, width (batch,) of the original image; truth_boxes (batch, n, 4) as x, y,
width, height in its pixels; truth_labels (batch, n) from 1, 0 for padding; truth_area, truth_crowd (batch, n).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from torch import Tensor
from torch.nn import functional as F

from sightline.boxes import iou
from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics import detection_f1
from sightline.metrics.precision_recall import curve_table
from sightline.parts import Batch, Metric, Scores

WORST = 20
NAMES = ("ap", "ap50", "ap75", "aps", "apm", "apl", "ar1", "ar10", "ar100", "ars", "arm", "arl")
FIRST = NAMES[:2]  # that most people look for; F1 and what belongs to it follow
# For the list of the worst images only.
FOUND_IOU = 0.5  # least overlap with which a detection finds a ground truth
CONFIDENT = 0.5  # least score with which a detection without ground truth counts as a mistake
MOST_ROWS = 2**20  # with padding that are kept on a GPU
CELLS = 2**21  # overlaps that lie in memory at once


class CocoMap(Metric):
    """COCO's scores, from rows of numbers on the device; each row starts with the image's index, -1 for padding.

    As in COCO, a score without any ground truth is -1.
    """

    def __init__(self, classes: tuple[str, ...], device: torch.device):
        self.classes = classes
        # float64 holds an index and COCO's coordinates exactly; MPS does not have it.
        self._like = torch.zeros(0, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._images: list[Tensor] = []  # (images, 4): index, ground truths, missed ground truths, confident mistakes
        self._detections: list[Tensor] = []  # (n, 7): index, class, score, x, y, width, height
        self._truths: list[Tensor] = []  # (n, 8): index, class, is a crowd, area, x, y, width, height

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        valid, *numbers = (batch[key].to(self._like.device) for key in ("valid", "index", "height", "width"))
        index, height, width = (number.double() for number in numbers)
        index = torch.where(valid, index, -1.0)
        boxes = _in_pixels(predictions["boxes"].to(self._like), height, width)
        detections = self._rows(index, predictions["labels"], predictions["scores"], boxes)
        truths = self._rows(index, *(batch[f"truth_{key}"] for key in ("labels", "crowd", "area", "boxes")))
        self._images.append(torch.stack([index, *_mistakes(detections, truths)], dim=1))
        for kept, rows in ((self._detections, detections), (self._truths, truths)):
            kept.append(rows.flatten(0, 1))
            # One image of 10,000 boxes makes as many rows of every other. On a GPU, looking is waiting: not often.
            if rows.device.type == "cpu":
                kept[-1] = _of_images(kept[-1])
            elif len(kept) > 1 and sum(map(len, kept[1:])) > MOST_ROWS:
                kept[:] = [_of_images(torch.cat(kept))]

    def _rows(self, index: Tensor, labels: Tensor, *columns: Tensor) -> Tensor:
        """Return (batch, n, columns): one row per box."""
        labels = labels.to(self._like)
        index = torch.where(labels > 0, index[:, None], -1.0)
        parts = (part.to(self._like) for part in columns)
        return torch.cat([index[..., None], labels[..., None], *(p[..., None] if p.ndim == 2 else p for p in parts)], 2)

    def merge(self, world: World) -> None:
        for kept in (self._images, self._detections, self._truths):
            kept[:] = [_gather(kept, world)]

    def names(self) -> tuple[str, ...]:
        return (*FIRST, *detection_f1.NAMES, *NAMES[len(FIRST) :], "samples")

    def result(self) -> Scores:
        images, detections, truths = (
            _present(torch.cat(kept)).cpu().numpy() if kept else np.zeros((0, 4))
            for kept in (self._images, self._detections, self._truths)
        )
        if not len(images):
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        with _uncollected():
            evaluation = _evaluate(len(self.classes), images, detections, truths)
        at_threshold, rates = detection_f1.best_f1(evaluation.ious, len(self.classes), detections, truths)
        coco = {name: float(value) for name, value in zip(NAMES, evaluation.stats, strict=True)}
        values = {**{name: coco[name] for name in FIRST}, **at_threshold, **coco, "samples": float(len(images))}
        precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoUs, recalls, classes), any size, 100 detections
        counts = np.bincount(truths[truths[:, 2] == 0, 1].astype(int), minlength=len(self.classes) + 1)
        per_class: list[dict[str, Any]] = [
            {
                "class": name,
                "ap": float(precision[:, :, number].mean()) if counts[number + 1] else None,
                "ap50": float(precision[0, :, number].mean()) if counts[number + 1] else None,
                **rates[number],
                "truths": int(counts[number + 1]),
            }
            for number, name in enumerate(self.classes)
        ]
        curves = [  # at IoU 0.5
            (row["class"], row["ap50"], precision[0, :, number])
            for number, row in enumerate(per_class)
            if row["truths"]
        ]
        tables = {"classes": per_class, "precision_recall": curve_table(curves)}
        return Scores(values, tables, _worst(images))


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the collector from looking for cycles among millions of new objects that have none: half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _in_pixels(corners: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Convert corner boxes (batch, n, 4) to x, y, width, height in pixels of their images."""
    ymin, xmin, ymax, xmax = corners.unbind(2)
    height, width = height[:, None], width[:, None]
    return torch.stack([xmin * width, ymin * height, (xmax - xmin) * width, (ymax - ymin) * height], dim=2)


def _mistakes(detections: Tensor, truths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, per image: ground truths except crowds, those that no detection of their class overlaps, and confident
    detections that overlap no ground truth of their class."""
    is_truth, is_crowd = truths[..., 0] >= 0, truths[..., 2] > 0
    is_sure = (detections[..., 0] >= 0) & (detections[..., 2] >= CONFIDENT)
    low, size = detections[..., 3:5], detections[..., 5:7]
    corners = torch.cat([low, low + size], 2)
    is_wrong, found = is_sure, []
    for some in truths.split(max(1, CELLS // max(1, len(truths) * detections.shape[1])), dim=1):
        low, size = some[..., 4:6], some[..., 6:8]
        overlap = iou(corners, torch.cat([low, low + size], 2))
        is_same = (detections[..., 1, None] == some[:, None, :, 1]) & (detections[..., 0, None] >= 0)
        is_same &= some[:, None, :, 0] >= 0
        is_found = is_same & (overlap >= FOUND_IOU)  # (batch, detections, some truths)
        found.append(is_found.any(1))
        # A crowd may hold an object of its class anywhere, so detections inside it are not mistakes.
        is_wrong = is_wrong & ~(is_found | (is_same & (some[:, None, :, 2] > 0))).any(2)
    is_counted = is_truth & ~is_crowd
    counts = (is_counted.sum(1), (is_counted & ~torch.cat(found, 1)).sum(1), is_wrong.sum(1))
    return counts[0].to(detections), counts[1].to(detections), counts[2].to(detections)


def _of_images(rows: Tensor) -> Tensor:
    """Return the rows that belong to an image."""
    return rows[rows[:, 0] >= 0]


def _present(rows: Tensor) -> Tensor:
    """Return the rows that belong to an image, sorted by its index, so that the number of ranks does not matter."""
    rows = _of_images(rows)
    return rows[rows[:, 0].argsort(stable=True)]


def _gather(kept: list[Tensor], world: World) -> Tensor:
    """Return the rows of all ranks."""
    rows = _present(torch.cat(kept))
    most = int(world.gather(torch.tensor([len(rows)], device=rows.device)).max())
    return world.gather(F.pad(rows, (0, 0, 0, most - len(rows)), value=-1.0))


def _evaluate(classes: int, images: np.ndarray, detections: np.ndarray, truths: np.ndarray) -> Any:
    """Run COCO's own evaluation and return it."""
    entries = [{"id": int(index)} for index in images[:, 0]]
    categories = [{"id": number + 1} for number in range(classes)]
    found = [
        {"id": n, "image_id": int(i), "category_id": int(c), "score": score, "bbox": box, "area": box[2] * box[3]}
        for n, (i, c, score, *box) in enumerate(detections.tolist(), start=1)
    ]
    given = [
        {"id": n, "image_id": int(i), "category_id": int(c), "iscrowd": int(crowd), "area": area, "bbox": box}
        for n, (i, c, crowd, area, *box) in enumerate(truths.tolist(), start=1)
    ]
    sets = [COCO({"images": entries, "categories": categories, "annotations": rows}) for rows in (given, found)]
    evaluation = COCOeval_faster(*sets, iouType="bbox", print_function=lambda *lines: None)
    evaluation.run()
    return evaluation


def _worst(images: np.ndarray) -> list[dict[str, Any]]:
    """List the images with the most mistakes; ties go to the lower index."""
    mistakes = images[:, 2] + images[:, 3]
    order = np.argsort(-mistakes, kind="stable")[:WORST]
    return [
        {"index": int(index), "truths": int(truths), "missed": int(missed), "wrong": int(wrong)}
        for index, truths, missed, wrong in images[order].tolist()
        if missed + wrong
    ]
