"""Scores of images with any number of labels: average precision and F1 per class, exact matches, the worst samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics.precision_recall import curve_table, interpolated, mean, rates
from sightline.metrics.topk import WORST
from sightline.parts import Batch, Metric, Scores


def binary_loss(logits: Tensor, target: Tensor, smoothing: float, positive_weight: Tensor | None = None) -> Tensor:
    """Return (batch, classes) binary cross entropies; smoothing replaces a share of each target by one half, as Keras
    does."""
    target = target * (1 - smoothing) + smoothing / 2
    return F.binary_cross_entropy_with_logits(logits, target, pos_weight=positive_weight, reduction="none")


class AveragePrecision(Metric):
    """Keeps the logits and labels of all samples; they are ranked in result().

    Values are macro means: `map` over the classes that occur, `macro_f1` (at a probability of 0.5) over those that
    occur or are predicted; `f1` is its earlier name. `exact` is the share of samples with all classes right. `map` of a
    class is its average precision.
    """

    def __init__(self, classes: tuple[str, ...], label_smoothing: float, device: torch.device):
        self.classes = classes
        self.label_smoothing = label_smoothing
        self._samples: list[Tensor] = []  # (batch, 2) float64: index (-1 for padding) and loss
        self._logits: list[Tensor] = []  # (batch, classes)
        self._labels: list[Tensor] = []  # (batch, classes) bool
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        logits, label, valid, index = (
            t.to(self._device) for t in (predictions["logits"], batch["label"], batch["valid"], batch["index"])
        )
        loss = binary_loss(logits, label.float(), self.label_smoothing).mean(1)
        self._samples.append(torch.stack([torch.where(valid, index, -1).double(), loss.double()], dim=1))
        self._logits.append(logits)
        self._labels.append(label.bool())  # a copy: the loader reuses the batch

    def merge(self, world: World) -> None:
        for kept in (self._samples, self._logits, self._labels):
            whole = torch.cat(kept)
            is_bool = whole.dtype == torch.bool  # which not every backend sends
            gathered = world.gather(whole.to(torch.uint8) if is_bool else whole)
            kept[:] = [gathered.bool() if is_bool else gathered]

    def names(self) -> tuple[str, ...]:
        return ("map", "macro_f1", "f1", "exact", "loss", "samples")

    def result(self) -> Scores:
        samples, logits, labels = (
            torch.cat(kept).cpu().numpy() for kept in (self._samples, self._logits, self._labels)
        )
        valid = samples[:, 0] >= 0
        if not valid.any():
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        (index, loss), logits, labels = samples[valid].T, logits[valid], labels[valid]
        found = logits >= 0
        rows = [self._row(number, logits[:, number], labels[:, number]) for number in range(len(self.classes))]
        f1 = mean([row["f1"] for row in rows])
        values = {
            "map": mean([row["map"] for row in rows]),
            "macro_f1": f1,
            "f1": f1,
            "exact": float((found == labels).all(1).mean()),
            "loss": float(loss.mean()),
            "samples": float(len(loss)),
        }
        tables = {"classes": rows, "precision_recall": self._curves(rows, logits, labels)}
        return Scores(values, tables, self._worst(index, loss, found, labels))

    def _curves(self, rows: list[dict[str, Any]], logits: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
        curves = []
        for number, row in enumerate(rows):
            if row["samples"]:
                precision, right = _by_threshold(logits[:, number], labels[:, number])
                curves.append((row["class"], row["map"], interpolated(right / right[-1], precision)))
        return curve_table(curves)

    def _row(self, number: int, logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
        found = logits >= 0
        right, shown, wanted = (int(np.count_nonzero(each)) for each in (found & labels, found, labels))
        return {
            "class": self.classes[number],
            "map": average_precision(logits, labels) if wanted else None,
            **rates(right, wanted, shown),
            "samples": wanted,
        }

    def _worst(
        self, index: np.ndarray, loss: np.ndarray, found: np.ndarray, labels: np.ndarray
    ) -> list[dict[str, Any]]:
        """List samples with a wrong class, those with the largest losses first."""
        wrong = np.flatnonzero((found != labels).any(1))
        return [
            {
                "index": int(index[row]),
                "class": self._named(labels[row]),
                "predicted": self._named(found[row]),
                "loss": float(loss[row]),
            }
            for row in wrong[np.argsort(-loss[wrong], kind="stable")][:WORST]
        ]

    def _named(self, row: np.ndarray) -> str:
        return ";".join(self.classes[number] for number in np.flatnonzero(row))


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum of precision times the rise of recall over all thresholds, as scikit-learn defines it: equal
    scores share one threshold."""
    precision, right = _by_threshold(scores, labels)
    return float(np.sum(precision * np.diff(right, prepend=0)) / right[-1])


def _by_threshold(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return precision and the number of right answers at every distinct score as threshold, the highest first."""
    order = np.argsort(-scores)
    last = np.append(np.diff(scores[order]) != 0, True)  # of equal scores
    right = np.cumsum(labels[order])[last]
    return right / (np.flatnonzero(last) + 1), right
