"""Top-1 and top-5 accuracy, loss, accuracy per class, the most frequent mistakes and the worst samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.parts import Batch, Metric, Scores

WORST = 20


class TopK(Metric):
    """Accuracy of a classifier, summed on the device; the host reads nothing before result()."""

    def __init__(self, classes: tuple[str, ...], label_smoothing: float, device: torch.device):
        self.classes = classes
        self.label_smoothing = label_smoothing
        self._sums = torch.zeros(4, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._confusion = torch.zeros(len(classes), len(classes), dtype=torch.int64, device=self._sums.device)
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
        cell = label * len(self.classes) + top[:, 0]
        self._confusion.view(-1).scatter_add_(0, cell, valid.to(torch.int64))
        wrong = torch.where(valid & ~hits[:, 0], loss, -1.0)
        rows = torch.stack([wrong, *(c.to(wrong) for c in (index, label, top[:, 0]))], dim=1)
        self._worst = _largest(torch.cat([self._worst, rows]))

    def merge(self, world: World) -> None:
        world.sum(self._sums)
        world.sum(self._confusion)
        self._worst = _largest(world.gather(self._worst))

    def names(self) -> tuple[str, ...]:
        return ("top1", *(["top5"] if len(self.classes) > 5 else []), "loss", "samples")

    def result(self) -> Scores:
        top1, top5, loss, count = self._sums.tolist()
        if not count:
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        confusion = self._confusion.cpu()
        right, totals = confusion.diagonal().tolist(), confusion.sum(1).tolist()
        values = {"top1": top1 / count, "top5": top5 / count, "loss": loss / count, "samples": count}
        if len(self.classes) <= 5:
            del values["top5"]
        per_class = [
            {"class": name, "top1": r / n if n else None, "samples": n}
            for name, r, n in zip(self.classes, right, totals, strict=True)
        ]
        worst = [
            {"index": int(i), "class": self.classes[int(y)], "predicted": self.classes[int(p)], "loss": value}
            for value, i, y, p in self._worst.tolist()
            if value >= 0
        ]
        return Scores(values, {"classes": per_class, "confusion": _pairs(confusion, self.classes)}, worst)


def _largest(rows: Tensor) -> Tensor:
    return rows[rows[:, 0].topk(min(WORST, len(rows))).indices]


def _pairs(confusion: Tensor, classes: tuple[str, ...]) -> list[dict[str, object]]:
    """List the most frequent mistakes."""
    mistakes = confusion.clone().fill_diagonal_(0).view(-1)
    counts, cells = mistakes.topk(min(WORST, len(mistakes)))
    return [
        {"class": classes[cell // len(classes)], "predicted": classes[cell % len(classes)], "samples": count}
        for count, cell in zip(counts.tolist(), cells.tolist(), strict=True)
        if count
    ]
