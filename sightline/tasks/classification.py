"""Classification: the class of an image.

Batch keys: image (after finish(): batch, 3, height, width), label (batch,), index (batch,); in evaluation valid
(batch,); in training those of data.random_erase, data.mixup and data.cutmix, listed below.
"""

# random_erase   erase (batch, 4): the box of each image that is set to zero, as top, left, bottom, right (the last
#                two are outside); all zero where there is none
# mixup, cutmix  mix (), with mixup_per=sample (batch,): the share of each image against its partner in the batch;
#                partner (batch,), after finish(): which one that is, where it is not the one before;
#                mix_rank (batch,): random numbers whose order is a random partner's
# cutmix         cut_top, cut_left, cut_bottom, cut_right (): the box in which each image is its partner;
#                label_share (): the share of its own label. A batch is either mixed, then the box is empty and
#                label_share equals mix, or cut, then mix is 1.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.errors import UsageError
from sightline.evaluate.topk import TopK
from sightline.parts import Batch, DataSpec, Finding, Loss, PredictJob, Reporter, Task
from sightline.report.findings import classes_found
from sightline.report.predictions import Predictions


@dataclass(frozen=True)
class Classification(Task):
    """Cross entropy and top-k accuracy."""

    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""

    headline = "top1"
    peers = "classification"

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"task.label_smoothing={self.label_smoothing} must be in [0, 1)")

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross entropy. With mixup or cutmix, accuracy counts the class that has the larger share."""
        logits = model(batch["image"]).float()  # (batch, classes)
        label, share = batch["label"], batch.get("label_share", batch.get("mix"))
        # One share for all mixes two means; one for each image mixes its two losses before the mean.
        reduction = "none" if share is not None and share.ndim else "mean"
        total = F.cross_entropy(logits, label, label_smoothing=self.label_smoothing, reduction=reduction)
        if share is not None:
            other = label[batch["partner"]] if "partner" in batch else label.roll(1, 0)
            theirs = F.cross_entropy(logits, other, label_smoothing=self.label_smoothing, reduction=reduction)
            total = (share * total + (1 - share) * theirs).mean()
            label = torch.where(share >= 0.5, label, other)
        correct = (logits.detach().argmax(1) == label).sum()
        return Loss(total, {"top1": correct})

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return class scores."""
        return {"logits": model(batch["image"]).float()}

    def metric(self, spec: DataSpec, device: torch.device) -> TopK:
        """Build the metric: top-1, top-5, loss."""
        return TopK(spec.classes, self.label_smoothing, device)

    def findings(
        self, predictions: Mapping[str, Tensor], spec: DataSpec, top: int | None, threshold: float | None
    ) -> list[list[Finding]]:
        """Return the most probable classes, by default five."""
        return classes_found(
            predictions["logits"], spec, 5 if top is None else top, 0.0 if threshold is None else threshold
        )

    def reporter(self, job: PredictJob) -> Reporter:
        """List findings, and draw them into their images."""
        return Predictions(self.findings, job)
