"""Top-1, top-5 and balanced accuracy, macro F1, loss; recall, precision and F1 per class; mistakes, worst samples.

`top1` of a class, its share of samples that are answered rightly, is its recall. Balanced accuracy is the mean recall
of the classes that occur, macro F1 that of the classes that occur or are predicted, as scikit-learn defines both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.metrics.precision_recall import curve_row, interpolated, mean, rates
from sightline.parts import Batch, Metric, Scores

WORST = 20
NO_CELL = -1  # of a row that is not valid; else true class * classes + predicted class
MATRIX_MOST = 40  # classes up to which the whole confusion matrix is kept
DENSE_MOST = 1000  # classes up to which mistakes are ranked among all pairs: ties keep the order of earlier versions
BINS = 1000  # of the probability of the predicted class, for precision over recall


class TopK(Metric):
    """Accuracy of a classifier, summed on the device; the host reads nothing before result()."""

    def __init__(self, classes: tuple[str, ...], label_smoothing: float, device: torch.device):
        self.classes = classes
        self.label_smoothing = label_smoothing
        self._sums = torch.zeros(4, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        # One number per sample, not one per pair of classes: 100,000 classes have 10,000,000,000 pairs.
        self._cells = [torch.zeros(0, dtype=torch.int64, device=self._sums.device)]
        self._sureness = torch.zeros(2, BINS, dtype=torch.int64, device=self._sums.device)  # of all samples, of hits
        self._worst = torch.full((WORST, 4), -1.0, dtype=torch.float64, device=self._sums.device)

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        # MPS has no float64, so the sums are on the CPU there.
        logits, label, valid, index = (
            t.to(self._sums.device) for t in (predictions["logits"], batch["label"], batch["valid"], batch["index"])
        )
        loss = F.cross_entropy(logits, label, label_smoothing=self.label_smoothing, reduction="none")
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        hits = (top == label[:, None]) & valid[:, None]
        # `where` removes the loss of padding rows; a product with 0 would keep inf and NaN.
        loss = torch.where(valid, loss.double(), 0.0)
        counts = [hits[:, 0].sum(), hits.sum(), loss.sum(), valid.sum()]
        self._sums += torch.stack([c.to(self._sums) for c in counts])
        self._cells.append(torch.where(valid, label * len(self.classes) + top[:, 0], NO_CELL))
        sure = (logits.float().softmax(1).amax(1).nan_to_num(0.0) * BINS).long().clamp(max=BINS - 1)
        for row, counted in enumerate((valid, hits[:, 0])):
            self._sureness[row].scatter_add_(0, sure, counted.to(torch.int64))
        wrong = torch.where(valid & ~hits[:, 0], loss, -1.0)
        rows = torch.stack([wrong, *(c.to(wrong) for c in (index, label, top[:, 0]))], dim=1)
        self._worst = _largest(torch.cat([self._worst, rows]))

    def merge(self, world: World) -> None:
        world.sum(self._sums)
        world.sum(self._sureness)
        self._cells = [world.gather(torch.cat(self._cells))]  # ranks have as many: batches are filled with padding
        self._worst = _largest(world.gather(self._worst))

    def names(self) -> tuple[str, ...]:
        top5 = ["top5"] if len(self.classes) > 5 else []
        return ("top1", *top5, "balanced_accuracy", "macro_f1", "loss", "samples")

    def result(self) -> Scores:
        top1, top5, loss, count = self._sums.tolist()
        if not count:
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        cells = torch.cat(self._cells).cpu()
        cells = cells[cells != NO_CELL]
        number = len(self.classes)
        true, predicted = cells // number, cells % number
        counted = (true[true == predicted], true, predicted)
        right, totals, found = (c.bincount(minlength=number).tolist() for c in counted)
        per_class = [
            {"class": name, **rates(r, n, f, recall="top1"), "samples": n}
            for name, r, n, f in zip(self.classes, right, totals, found, strict=True)
        ]
        values = {
            "top1": top1 / count,
            "top5": top5 / count,
            "balanced_accuracy": mean([row["top1"] for row in per_class]),
            "macro_f1": mean([row["f1"] for row in per_class]),
            "loss": loss / count,
            "samples": count,
        }
        if number <= 5:
            del values["top5"]
        worst = [
            {"index": int(i), "class": self.classes[int(y)], "predicted": self.classes[int(p)], "loss": value}
            for value, i, y, p in self._worst.tolist()
            if value >= 0
        ]
        tables: dict[str, list[dict[str, Any]]] = {
            "classes": per_class,
            "confusion": _pairs(cells[true != predicted], self.classes),
        }
        if 2 <= number <= MATRIX_MOST:
            matrix = cells.bincount(minlength=number**2).view(number, number)
            counts = zip(self.classes, matrix.tolist(), strict=True)
            tables["matrix"] = [{"class": name, "predicted": row} for name, row in counts]
        tables["precision_recall"] = [curve_row(None, self._curve(count))]
        return Scores(values, tables, worst)

    def _curve(self, count: float) -> np.ndarray:
        """Return the precision if only samples with a probability above a threshold are answered; their recall is the
        share of all samples that is answered rightly."""
        answered, right = self._sureness.cpu().flip(1).cumsum(1).numpy()
        is_some = answered > 0
        return interpolated(right[is_some] / count, right[is_some] / answered[is_some])


def _largest(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].topk(min(WORST, len(rows))).indices]


def _pairs(mistakes: Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """List the most frequent mistakes, given the cell of each one."""
    number = len(classes)
    if number <= DENSE_MOST:
        cells, counts = torch.arange(number**2), mistakes.bincount(minlength=number**2)
    else:
        cells, counts = mistakes.unique(return_counts=True)
    most, places = counts.topk(min(WORST, len(counts)))
    return [
        {"class": classes[cell // number], "predicted": classes[cell % number], "samples": count}
        for count, cell in zip(most.tolist(), cells[places].tolist(), strict=True)
        if count
    ]
