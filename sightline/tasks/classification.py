"""Classification: the class of an image, or with multi-label data all of its classes.

Batch keys: image (after finish(): batch, 3, height, width), label (batch,), multi-label (batch, classes) of 0 and 1,
index (batch,); in evaluation valid (batch,); in training those of data.random_erase, data.mixup, data.cutmix and
data.class_weights, listed below.
"""

# random_erase   erase (batch, 4): the box of each image that is set to zero, as top, left, bottom, right (the last
#                two are outside); all zero where there is none
# mixup, cutmix  mix (), with mixup_per=sample (batch,): the share of each image against its partner in the batch;
#                partner (batch,), after finish(): which one that is, where it is not the one before;
#                mix_rank (batch,): random numbers whose order is a random partner's
# cutmix         cut_top, cut_left, cut_bottom, cut_right (): the box in which each image is its partner;
#                label_share (): the share of its own label. A batch is either mixed, then the box is empty and
#                label_share equals mix, or cut, then mix is 1.
# class_weights  class_weight (batch, classes): the weight of every class, the same in every row. Rows, because parts of
#                a batch are rows; not one weight each, because smoothed labels are of all classes.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.metrics.average_precision import AveragePrecision, binary_loss
from sightline.metrics.topk import TopK
from sightline.parts import Batch, DataSpec, Loss, Metric, Task
from sightline.tasks.config import ClassificationConfig
from sightline.tasks.mixing import partners_of, share_of


@dataclass(frozen=True)
class Classification(Task, ClassificationConfig):
    """Cross entropy and top-k accuracy."""

    def for_data(self, spec: DataSpec) -> Task:
        """Return the task for several labels per image if these data have them."""
        return MultiLabel(self.label_smoothing, self.tta) if spec.multi_label else self

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross entropy. With mixup or cutmix, accuracy counts the class that has the larger share."""
        logits = model(batch["image"]).float()  # (batch, classes)
        label, share = batch["label"], share_of(batch)
        # One share for all mixes two means; one for each image mixes its two losses before the mean.
        reduction = "none" if share is not None and share.ndim else "mean"
        total = self._cross_entropy(logits, label, batch, reduction)
        if share is not None:
            other = partners_of(label, batch)
            theirs = self._cross_entropy(logits, other, batch, reduction)
            total = (share * total + (1 - share) * theirs).mean()
            label = torch.where(share >= 0.5, label, other)
        correct = (logits.detach().argmax(1) == label).sum()
        return Loss(total, {"top1": correct})

    def _cross_entropy(self, logits: Tensor, label: Tensor, batch: Batch, reduction: str) -> Tensor:
        """Return torch's cross entropy. With class weights, whose mean over the training images is 1, the mean is the
        sum over the number of images: torch divides by the sum of their weights, which differs between ranks and parts
        of a batch."""
        weight = batch["class_weight"][0] if "class_weight" in batch else None
        is_weighted_mean = weight is not None and reduction == "mean"
        total = F.cross_entropy(
            logits,
            label,
            weight,
            label_smoothing=self.label_smoothing,
            reduction="sum" if is_weighted_mean else reduction,
        )
        return total / len(label) if is_weighted_mean else total

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return class scores; with tta the mean of those of the image and of its mirror image."""
        image = batch["image"]
        logits = model(image).float()
        return {"logits": (logits + model(image.flip(-1)).float()) / 2 if self.tta else logits}

    def metric(self, spec: DataSpec, device: torch.device) -> Metric:
        """Build the metric: top-1, top-5, loss."""
        return TopK(spec.classes, self.label_smoothing, device)


@dataclass(frozen=True)
class MultiLabel(Classification):
    """Binary cross entropy of every class and mean average precision, for multi-label data. Smoothing replaces a share
    of every target by one half."""

    headline = "map"
    peers = ""
    activation = "sigmoid"

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean over images and classes. With mixup or cutmix, targets are mixed."""
        logits = model(batch["image"]).float()  # (batch, classes)
        target, share = batch["label"].float(), share_of(batch)
        if share is not None:
            share = share[:, None] if share.ndim else share
            target = share * target + (1 - share) * partners_of(target, batch)
        total = binary_loss(logits, target, self.label_smoothing, batch.get("class_weight")).mean()
        right = ((logits.detach() >= 0) == (target >= 0.5)).all(1).sum()
        return Loss(total, {"exact": right})

    def metric(self, spec: DataSpec, device: torch.device) -> Metric:
        """Build the metric: mean average precision, F1, exact matches, loss."""
        return AveragePrecision(spec.classes, self.label_smoothing, device)
