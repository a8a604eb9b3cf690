"""Segmentation: the class of every pixel of a slice or voxel of a volume.

Batch keys: image (after finish(): batch, channels, *space), label (batch, *space); in evaluation index, valid, volume
(batch,) and, where whole volumes are padded to one shape, extent (batch, 3). The model answers logits (batch, classes,
*space), in training with deep supervision a tuple of them, full resolution first; model.patch is its window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.errors import UsageError
from sightline.metrics.dice import Dice, dice_loss, soft_sums
from sightline.parts import Batch, DataSpec, Loss, Task
from sightline.tasks.config import SegmentationConfig
from sightline.tasks.recomputed import recomputed
from sightline.tasks.sliding_window import sliding_windows

Forward = Callable[[Sequence[Tensor]], list[Tensor]]  # scores of each image or volume
BRATS_CLASSES = 4  # background, edema, non-enhancing tumour, enhancing tumour


@dataclass(frozen=True)
class Segmentation(Task, SegmentationConfig):
    """Soft Dice and cross entropy; Dice of whole volumes."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the Dice loss, background excluded, of sums over the whole batch, plus cross entropy or focal loss.

        With accumulation the Dice is that of each part. Shown are sums over slices (over patches in 3D) of what adds
        up to the loss: supervised outputs by their weight.
        """
        answer = model(batch["image"])
        outputs = answer if isinstance(answer, tuple | list) else (answer,)
        weights = _supervision_weights(len(outputs), self.supervision) if outputs is answer else [1.0]
        soft, voxel = [], []
        for logits in outputs:
            label = _nearest(batch["label"], logits.shape[2:])
            # Made again for the gradient from the logits, which are kept anyway: softmax and masks in fp32 are several
            # times their size.
            overlap, cost = recomputed(soft_sums, logits, label, self.voxel_loss)
            soft.append(overlap.sum(0))
            voxel.append(cost.sum() / label.numel())
        totals = torch.stack(soft)  # (outputs, classes - 1, 3)
        if self.dice_over == "world":
            totals = _over_ranks(totals)
        dice_part = _weighted(dice_loss(totals).mean(1).unbind(), weights)
        voxel_part = _weighted(voxel, weights)
        count = len(batch["label"])
        shown = {"dice_loss": dice_part.detach() * count, f"{self.voxel_loss}_loss": voxel_part.detach() * count}
        return Loss(dice_part + voxel_part, shown)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return logits (batch, classes, *space) in fp32 and classes (batch, *space) uint8; both 0 outside of a
        volume's extent."""
        image = batch["image"]
        if "extent" not in batch:
            (logits,) = self._flipped_means(lambda images: [model(each) for each in images], [image], image.ndim - 2)
            return {"logits": logits, "classes": logits.argmax(1).to(torch.uint8)}
        patch: tuple[int, ...] = tuple(model.patch)  # type: ignore[arg-type]  # what a module holds may be anything
        # The one synchronisation: where windows lie depends on each volume's size. What could not be read has none; one
        # voxel of it is predicted, for the shape of the answer.
        extents = torch.where(batch["valid"][:, None], batch["extent"], 1) if "valid" in batch else batch["extent"]
        volumes = [image[row, :, :d, :h, :w] for row, (d, h, w) in enumerate(extents.tolist())]
        found = self._flipped_means(
            lambda each: sliding_windows(model, each, patch, self.overlap, self.blend, self.window_batch),
            volumes,
            len(patch),
        )
        logits = found[0].new_zeros(len(image), len(found[0]), *image.shape[2:])
        classes = torch.zeros_like(logits[:, 0], dtype=torch.uint8)
        for row, scores in enumerate(found):
            _, d, h, w = scores.shape
            logits[row, :, :d, :h, :w] = scores
            classes[row, :d, :h, :w] = scores.argmax(0).to(torch.uint8)
        return {"logits": logits, "classes": classes}

    def metric(self, spec: DataSpec, device: torch.device) -> Dice:
        """Build the metric: Dice per volume and class, and the loss of whole volumes."""
        if self.regions == "brats" and len(spec.classes) != BRATS_CLASSES:
            raise UsageError(
                f"task.regions=brats knows the labels of Decathlon task 01 (background, edema, non-enhancing and "
                f"enhancing tumour), here are {len(spec.classes)} classes: {', '.join(spec.classes)}; use none"
            )
        return Dice(spec.classes, device, self.regions, self.voxel_loss)

    def _flipped_means(self, forward: Forward, images: Sequence[Tensor], axes: int) -> list[Tensor]:
        """Return the scores of each image in fp32; with tta their means over all mirror images along the last `axes`
        axes."""
        totals = [scores.float() for scores in forward(images)]
        if not self.tta:
            return totals
        flips = [axis for count in range(1, axes + 1) for axis in combinations(range(-axes, 0), count)]
        for flip in flips:
            flipped = forward([image.flip(flip) for image in images])
            totals = [total + scores.float().flip(flip) for total, scores in zip(totals, flipped, strict=True)]
        return [total / (len(flips) + 1) for total in totals]


def _supervision_weights(outputs: int, rule: Literal["original", "exact"]) -> list[float]:
    weights = [0.5**number for number in range(outputs)]
    # The original's factor would be that of one output more, so its weights do not add up to 1.
    scale = 1 / (2 - 2.0**-outputs) if rule == "original" else 1 / sum(weights)
    return [weight * scale for weight in weights]


def _weighted(values: list[Tensor] | tuple[Tensor, ...], weights: list[float]) -> Tensor:
    # By plain numbers: a tensor of weights would have to be copied to the device in every step.
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return torch.stack(products).sum()


def _nearest(label: Tensor, size: torch.Size) -> Tensor:
    """Return the label at the resolution of an output, by the voxels that F.interpolate(mode="nearest") takes."""
    strides = [have // want for have, want in zip(label.shape[1:], size, strict=True)]
    if all(have == want * stride for have, want, stride in zip(label.shape[1:], size, strides, strict=True)):
        return label[:, *(slice(None, None, stride) for stride in strides)]
    return F.interpolate(label[:, None].float(), size=tuple(size), mode="nearest")[:, 0].to(label.dtype)


def _over_ranks(sums: Tensor) -> Tensor:
    """Return the sums of all ranks, with the gradient of this rank's part times their number: DDP takes the mean over
    ranks, which then is the gradient of the whole batch."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return sums
    totals = sums.detach().clone()
    dist.all_reduce(totals)
    # The value is that of the totals, since the difference is 0; no collective is needed on the way back, where all
    # ranks hold the same gradient.
    return totals + dist.get_world_size() * (sums - sums.detach())
