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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline import results
from sightline.inference.doubts import OneLabel, SeveralLabels
from sightline.inference.findings import classes_found, labels_found, labels_of
from sightline.inference.predictions import Predictions
from sightline.metrics.average_precision import AveragePrecision, binary_loss
from sightline.metrics.topk import TopK
from sightline.parts import (
    Batch,
    DataSpec,
    Doubts,
    Drawing,
    Finding,
    Loss,
    Metric,
    Prediction,
    PredictJob,
    PredictOptions,
    Reporter,
    SeenSample,
    Task,
)
from sightline.report.tiles import image_alone
from sightline.tasks.config import ClassificationConfig


@dataclass(frozen=True)
class Classification(Task, ClassificationConfig):
    """Cross entropy and top-k accuracy."""

    def for_data(self, spec: DataSpec) -> Task:
        """Return the task for several labels per image if these data have them."""
        return MultiLabel(self.label_smoothing) if spec.multi_label else self

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross entropy. With mixup or cutmix, accuracy counts the class that has the larger share."""
        logits = model(batch["image"]).float()  # (batch, classes)
        label, share = batch["label"], _share(batch)
        # One share for all mixes two means; one for each image mixes its two losses before the mean.
        reduction = "none" if share is not None and share.ndim else "mean"
        total = self._cross_entropy(logits, label, batch, reduction)
        if share is not None:
            other = _partners(label, batch)
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
        """Return class scores."""
        return {"logits": model(batch["image"]).float()}

    def metric(self, spec: DataSpec, device: torch.device) -> Metric:
        """Build the metric: top-1, top-5, loss."""
        return TopK(spec.classes, self.label_smoothing, device)

    def draw(
        self, batch: Batch, predict: Callable[[], Mapping[str, Tensor]], spec: DataSpec, count: int
    ) -> list[Drawing]:
        """Draw the images; the scores name their classes."""
        return [image_alone(image.float().cpu().numpy(), spec) for image in batch["image"][:count]]

    def seen(self, batch: Batch, spec: DataSpec) -> list[SeenSample]:
        """Return images with their classes, with those of the partner too where they are mixed."""
        label, share = batch["label"], _share(batch)
        parts = label.float() if label.ndim > 1 else F.one_hot(label, len(spec.classes)).float()  # (batch, classes)
        if share is not None:
            share = share[:, None] if share.ndim else share
            parts = share * parts + (1 - share) * _partners(parts, batch)
        found = labels_of(parts, spec)
        return [SeenSample(image.numpy(), tuple(row)) for image, row in zip(batch["image"], found, strict=True)]

    def doubts(self, spec: DataSpec, samples: int) -> Doubts:
        """Compare the most probable class with the label."""
        return OneLabel(spec)

    def label_note(self) -> str:
        """Say that labels are smoothed."""
        return f"label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""

    def findings(
        self, predictions: Mapping[str, Tensor], spec: DataSpec, top: int | None, threshold: float | None
    ) -> list[list[Finding]]:
        """Return the most probable classes, by default five."""
        return classes_found(
            predictions["logits"], spec, 5 if top is None else top, 0.0 if threshold is None else threshold
        )

    def results(
        self,
        names: Sequence[str | None],
        predictions: Mapping[str, Tensor],
        batch: Batch,
        spec: DataSpec,
        options: PredictOptions,
    ) -> list[Prediction]:
        """Return the probabilities of all classes, or of the `top` ones, and the labels that they make."""
        top = len(spec.classes) if options.top is None else options.top
        every = self.findings(predictions, spec, top, 0.0)
        chosen = self.findings(predictions, spec, 1 if not spec.multi_label else top, options.threshold)
        made: list[Prediction] = []
        for name, found, labels in zip(names, every, chosen, strict=True):
            if name is not None:
                probabilities = {each.name: each.score for each in found}  # none where they are not numbers
                label, probability = next(iter(probabilities.items()), ("", math.nan))
                given = tuple(each.name for each in labels)
                made.append(results.Classification(name, label, probability, probabilities, given))
        return made

    def reporter(self, job: PredictJob) -> Reporter:
        """List findings, and draw them into their images."""
        return Predictions(self.findings, job)


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
        target, share = batch["label"].float(), _share(batch)
        if share is not None:
            share = share[:, None] if share.ndim else share
            target = share * target + (1 - share) * _partners(target, batch)
        total = binary_loss(logits, target, self.label_smoothing, batch.get("class_weight")).mean()
        right = ((logits.detach() >= 0) == (target >= 0.5)).all(1).sum()
        return Loss(total, {"exact": right})

    def metric(self, spec: DataSpec, device: torch.device) -> Metric:
        """Build the metric: mean average precision, F1, exact matches, loss."""
        return AveragePrecision(spec.classes, self.label_smoothing, device)

    def doubts(self, spec: DataSpec, samples: int) -> Doubts:
        """Compare the answer to each class with the labels."""
        return SeveralLabels(spec, samples)

    def findings(
        self, predictions: Mapping[str, Tensor], spec: DataSpec, top: int | None, threshold: float | None
    ) -> list[list[Finding]]:
        """Return every class of at least the threshold, by default 0.5."""
        return labels_found(
            predictions["logits"],
            spec,
            len(spec.classes) if top is None else top,
            0.5 if threshold is None else threshold,
        )


def _share(batch: Batch) -> Tensor | None:
    """Return the share of an image's own label against its partner's; None without mixup and cutmix."""
    return batch.get("label_share", batch.get("mix"))


def _partners(label: Tensor, batch: Batch) -> Tensor:
    """Return the labels of the images that each one is mixed with."""
    return label[batch["partner"]] if "partner" in batch else label.roll(1, 0)
