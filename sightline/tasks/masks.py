"""Segmentation of images: the class of every pixel, as masks have it.

Batch keys: image (after finish(): batch, channels, height, width), label (batch, height, width) or IGNORED; in
evaluation index, valid (batch,), extent (batch, 2): sides of an image without padding. The model answers logits (batch,
classes, height, width); model.patch is its window, model.any_size whether images may go through whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sightline.metrics.dice import soft_sums
from sightline.metrics.iou import MeanIou, mean_dice_loss
from sightline.parts import IGNORED, Batch, DataSpec, Loss, Task
from sightline.tasks.config import MaskConfig
from sightline.tasks.recomputed import recomputed
from sightline.tasks.sliding_window import sliding_windows


@dataclass(frozen=True)
class Masks(Task, MaskConfig):
    """Cross entropy and soft Dice; intersection over union of every class, over all pixels."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross entropy of the pixels that count, plus the Dice loss of sums over the whole batch. With
        accumulation both are those of each part."""
        label = batch["label"]
        counted = label != IGNORED
        # Made again for the gradient from the logits, which are kept anyway.
        sums, cost = recomputed(soft_sums, model(batch["image"]), label, "ce", counted, torch.float32, 0)
        cross_entropy = cost.sum() / counted.sum().clamp(min=1)
        dice = mean_dice_loss(sums.sum(0))
        shown = {"ce_loss": cross_entropy.detach() * len(label), "dice_loss": dice.detach() * len(label)}
        return Loss(cross_entropy + self.dice_weight * dice, shown)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return logits (batch, classes, height, width) in fp32 and classes (batch, height, width) uint8; both 0
        outside of an image's extent."""
        image, extent = batch["image"], batch["extent"]
        # The one synchronisation: what goes through the network together depends on sizes. What could not be read has
        # none; one pixel of it is predicted, for the shape of the answer.
        alike: dict[tuple[int, int], list[int]] = {}
        for row, (height, width) in enumerate(extent.clamp(min=1).tolist()):
            alike.setdefault((height, width), []).append(row)
        logits = torch.zeros(0)
        for (height, width), rows in alike.items():
            scores = self._scores(model, image[rows, :, :height, :width])
            if not logits.numel():
                logits = scores.new_zeros(len(image), scores.shape[1], *image.shape[2:])
            logits[rows, :, :height, :width] = scores
        return {"logits": logits, "classes": logits.argmax(1).to(torch.uint8)}

    def _scores(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the scores of images of one size."""
        patch: tuple[int, ...] = tuple(model.patch)  # type: ignore[arg-type]  # what a module holds may be anything
        pixels = images.shape[2] * images.shape[3]
        if pixels > self.whole_pixels or not getattr(model, "any_size", False):
            options = (patch, self.overlap, self.blend, self.window_batch)
            return torch.stack(sliding_windows(model, list(images), *options))
        at_once = max(1, self.window_batch * patch[0] * patch[1] // pixels)
        return torch.cat([model(part).float() for part in images.split(at_once)])

    def metric(self, spec: DataSpec, device: torch.device) -> MeanIou:
        """Build the metric: intersection over union and Dice of every class, pixel accuracy, loss."""
        return MeanIou(spec.classes, self.dice_weight, device)
