"""Segmentation of images: the class of every pixel, as masks have it.

Batch keys: image (after finish(): batch, channels, height, width), label (batch, height, width) or IGNORED; in
evaluation index, valid (batch,), extent (batch, 2): sides of an image without padding. The model answers logits (batch,
classes, height, width); model.patch is its window, model.any_size whether images may go through whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sightline import results
from sightline.inference.mask_files import MaskPredictions, shares_of
from sightline.metrics.dice import soft_sums
from sightline.metrics.iou import MeanIou, mean_dice_loss
from sightline.parts import (
    IGNORED,
    Batch,
    DataSpec,
    Drawing,
    Loss,
    Prediction,
    PredictJob,
    PredictOptions,
    Reporter,
    SeenSample,
    Task,
)
from sightline.report.tiles import mask_colours, masks_beside, picture
from sightline.tasks.config import MaskConfig
from sightline.tasks.sliding_window import sliding_window


@dataclass(frozen=True)
class Masks(Task, MaskConfig):
    """Cross entropy and soft Dice; intersection over union of every class, over all pixels."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the mean cross entropy of the pixels that count, plus the Dice loss of sums over the whole batch. With
        accumulation both are those of each part."""
        label = batch["label"]
        counted = label != IGNORED
        # Made again for the gradient from the logits, which are kept anyway.
        sums, cost = checkpoint(
            soft_sums,
            model(batch["image"]),
            label,
            "ce",
            counted,
            torch.float32,
            0,
            use_reentrant=False,
            preserve_rng_state=False,
        )
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
            return torch.stack([sliding_window(model, image, *options) for image in images])
        at_once = max(1, self.window_batch * patch[0] * patch[1] // pixels)
        return torch.cat([model(part).float() for part in images.split(at_once)])

    def metric(self, spec: DataSpec, device: torch.device) -> MeanIou:
        """Build the metric: intersection over union and Dice of every class, pixel accuracy, loss."""
        return MeanIou(spec.classes, self.dice_weight, device)

    def draw(
        self, batch: Batch, predict: Callable[[], Mapping[str, Tensor]], spec: DataSpec, count: int
    ) -> list[Drawing]:
        """Draw images beside their true and their predicted classes; pixels that do not count have no colour."""
        found, label, drawings = predict()["classes"], batch["label"], []
        for row, (height, width) in enumerate(batch["extent"][:count].tolist()):
            truth, guess = (each[row, :height, :width].cpu().numpy() for each in (label, found))
            tile = picture(batch["image"][row, :, :height, :width].float().cpu().numpy(), spec)
            drawings.append(masks_beside(tile, truth * (truth != IGNORED), guess))
        return drawings

    def drawn_colours(self, spec: DataSpec) -> dict[str, str]:
        """Return the colours of the outlines."""
        return mask_colours(spec.classes)

    def seen(self, batch: Batch, spec: DataSpec) -> list[SeenSample]:
        """Return crops with their classes; pixels that do not count are drawn as the first class."""
        label = torch.where(batch["label"] == IGNORED, 0, batch["label"]).to(torch.uint8)
        pairs = zip(batch["image"].numpy(), label.numpy(), strict=True)
        return [SeenSample(image, mask=mask) for image, mask in pairs]

    def results(
        self,
        names: Sequence[str | None],
        predictions: Mapping[str, Tensor],
        batch: Batch,
        spec: DataSpec,
        options: PredictOptions,
    ) -> list[Prediction]:
        """Return masks of the numbers of classes."""
        found: list[Prediction] = []
        for row, name in enumerate(names):
            if name is not None:
                height, width = batch["extent"][row].tolist()
                mask = predictions["classes"][row, :height, :width].cpu()
                counts = mask.flatten().bincount(minlength=len(spec.classes)).tolist()
                shares = shares_of(predictions, row, height, width) if options.probabilities else None
                pixels = dict(zip(spec.classes, counts, strict=True))
                found.append(results.Segmentation(name, mask.numpy(), spec.classes, pixels, shares))
        return found

    def reporter(self, job: PredictJob) -> Reporter:
        """Write masks as the files of the training had them, and draw outlines into the images."""
        return MaskPredictions(job)
