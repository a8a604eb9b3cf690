"""Intersection over union of every class, from one confusion matrix of all pixels of a split.

Batch keys: label (batch, height, width), index and valid (batch,); pixels that are IGNORED, padding too, do not count.
Predictions: logits, classes. Classes that are neither true nor found are left out of means, as torchmetrics does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics.dice import dice_loss, soft_sums
from sightline.parts import IGNORED, Batch, Metric, Scores

WORST = 20
MATRIX_MOST = 40  # classes up to which the whole confusion matrix is kept
AT_ONCE = 2**22  # pixels: of large images the numbers in between would take many times their memory


class MeanIou(Metric):
    """Counts of pixels by true and predicted class, summed on the device; the host reads nothing before result()."""

    def __init__(self, classes: tuple[str, ...], dice_weight: float, device: torch.device):
        self.classes = classes
        self.dice_weight = dice_weight
        number = len(classes)
        self._device = torch.device("cpu") if device.type == "mps" else device  # which has no float64
        self._counts = torch.zeros(number**2 + 1, dtype=torch.int64, device=self._device)  # the last: images
        self._soft = torch.zeros(number * 3 + 1, dtype=torch.float64, device=self._device)  # the last: cross entropy
        self._worst = torch.full((WORST, 2), -1.0, dtype=torch.float64, device=self._device)  # 1 - IoU, index

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        logits, found = (predictions[key].to(self._device) for key in ("logits", "classes"))
        label, valid, index = (batch[key].to(self._device) for key in ("label", "valid", "index"))
        label = torch.where(valid[:, None, None], label, IGNORED)
        rows = []
        for scores, truth, guess in zip(logits, label, found, strict=True):
            counts = self._add(scores.flatten(1), truth.flatten(), guess.flatten())
            rows.append(1 - _mean_iou(counts))
        self._counts[-1] += valid.sum()
        # An image of which no pixel counts is none of the worst, and a perfect one neither.
        wrong = torch.stack(rows).nan_to_num(0.0)
        wrong = torch.where(wrong > 0, wrong, -1.0)
        self._worst = _largest(torch.cat([self._worst, torch.stack([wrong, index.to(wrong)], dim=1)]))

    def _add(self, scores: Tensor, truth: Tensor, guess: Tensor) -> Tensor:
        """Add the pixels of one image; return its confusion matrix."""
        number = len(self.classes)
        matrix = torch.zeros(number**2, dtype=torch.int64, device=self._device)
        parts = (scores.split(AT_ONCE, 1), truth.split(AT_ONCE), guess.split(AT_ONCE))
        for logits, true, found in zip(*parts, strict=True):
            counted = true != IGNORED
            cells = torch.where(counted, true.long() * number + found.long(), number**2)
            matrix += cells.bincount(minlength=number**2 + 1)[:-1]
            soft, cost = soft_sums(logits[None], true[None], "ce", counted[None], torch.float64, first=0)
            self._soft += torch.cat([soft.flatten(), cost])
        self._counts[:-1] += matrix
        return matrix.view(number, number)

    def merge(self, world: World) -> None:
        world.sum(self._counts)
        world.sum(self._soft)
        self._worst = _largest(world.gather(self._worst))

    def names(self) -> tuple[str, ...]:
        return ("miou", "dice", "pixel_accuracy", "loss", "samples")

    def result(self) -> Scores:
        number = len(self.classes)
        counts, images = self._counts[:-1].cpu().view(number, number).numpy(), int(self._counts[-1])
        pixels = int(counts.sum())
        if not images:
            raise BadData("nothing could be evaluated: not one image of the val split could be read")
        if not pixels:
            raise BadData("nothing could be evaluated: the masks of the val split ignore every pixel")
        shared, truth, found = np.diag(counts), counts.sum(1), counts.sum(0)
        iou, dice = _share(shared, truth + found - shared), _share(2 * shared, truth + found)
        sums, cost = self._soft[:-1].view(number, 3), float(self._soft[-1])
        values = {
            "miou": float(np.nanmean(iou)),
            "dice": float(np.nanmean(dice)),
            "pixel_accuracy": float(shared.sum() / pixels),
            "loss": cost / pixels + self.dice_weight * float(mean_dice_loss(sums)),
            "samples": float(images),
        }
        columns = zip(iou, dice, _share(shared, found), _share(shared, truth), strict=True)
        per_class = [
            {"class": name, **_scores(column), "pixels": count}
            for name, column, count in zip(self.classes, columns, truth.tolist(), strict=True)
        ]
        tables: dict[str, list[dict[str, Any]]] = {"classes": per_class}
        if 2 <= number <= MATRIX_MOST:
            named = zip(self.classes, counts.tolist(), strict=True)
            tables["matrix"] = [{"class": name, "predicted": row} for name, row in named]
        worst = [{"index": int(index), "iou": 1 - wrong} for wrong, index in self._worst.tolist() if wrong > 0]
        return Scores(values, tables, worst)


def mean_dice_loss(sums: Tensor) -> Tensor:
    """Return the mean soft Dice loss of class sums (classes, 3) over the classes that are true somewhere: of one that
    is nowhere the loss would be 1, whatever the network says."""
    is_there = sums[:, 2] > 0
    return torch.where(is_there, dice_loss(sums), 0.0).sum() / is_there.sum().clamp(min=1)


def _mean_iou(matrix: Tensor) -> Tensor:
    shared, union = matrix.diag(), matrix.sum(0) + matrix.sum(1) - matrix.diag()
    return (shared / union).double().nanmean()  # 0 / 0 of classes that are neither true nor found


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)


def _scores(column: tuple[float, ...]) -> dict[str, float | None]:
    names = ("miou", "dice", "precision", "recall")
    return {name: None if np.isnan(value) else float(value) for name, value in zip(names, column, strict=True)}


def _largest(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].topk(min(WORST, len(rows))).indices]
