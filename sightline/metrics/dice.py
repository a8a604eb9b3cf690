"""Dice and IoU of whole volumes, whose slices may come in any order and on any rank; the sums for the soft Dice loss.

Batch keys: label (batch, *space); volume (batch,), its number in the split; index, valid (batch,); extent (batch, 3),
the true depth, height and width of padded volumes. Predictions: logits, classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import BadData
from sightline.hardware.world import World
from sightline.parts import Batch, Metric, Scores

WORST = 20
SMOOTH = 1e-5  # as in the original, in numerator and denominator: an absent class that is not predicted has no loss
REGIONS = {"wt": (1, 3), "tc": (2, 3), "et": (3, 3)}  # lowest and highest label: whole tumour, core, enhancing
VoxelLoss = Literal["ce", "focal"]
Regions = Literal["none", "brats"]


def soft_sums(
    logits: Tensor,
    label: Tensor,
    voxel_loss: VoxelLoss,
    inside: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    first: int = 1,
) -> tuple[Tensor, Tensor]:
    """Sum over the voxels of each sample that are `inside`; return class sums and the voxel loss.

    Class sums (batch, classes - first, 3) are, per class from `first` on, the probability where the class is true, the
    probability, and the truth. The voxel loss (batch,) is cross entropy or focal loss over all classes. The loop runs
    class by class, so that no one-hot tensor of floats is made.
    """
    scores = logits.float().flatten(2).log_softmax(1).unbind(1)  # per class (batch, voxels)
    label = label.flatten(1)
    if inside is not None:
        label = torch.where(inside.flatten(1), label, -1)  # no class
    true_score, sums = scores[0], []
    for number, score in enumerate(scores[first:], start=first):
        is_true = label == number
        true_score = torch.where(is_true, score, true_score)
        probability = score.exp()
        if inside is not None:
            probability = torch.where(inside.flatten(1), probability, 0.0)
        shared = torch.where(is_true, probability, 0.0)
        sums.append(torch.stack([part.sum(1, dtype=dtype) for part in (shared, probability, is_true)], dim=1))
    cost = -true_score
    if voxel_loss == "focal":
        cost = cost * (1 - true_score.exp()) ** 2
    if inside is not None:
        cost = torch.where(inside.flatten(1), cost, 0.0)
    return torch.stack(sums, dim=1), cost.sum(1, dtype=dtype)


def dice_loss(sums: Tensor) -> Tensor:
    """Return the soft Dice loss of class sums (..., 3) of `soft_sums`, which may be added up over samples."""
    shared, probability, truth = sums.unbind(-1)
    return 1 - (2 * shared + SMOOTH) / (probability + truth + SMOOTH)


class Dice(Metric):
    """Dice and IoU per class and volume, from one row of numbers per sample on the device: the index, or -1, first."""

    def __init__(self, classes: tuple[str, ...], device: torch.device, regions: Regions, voxel_loss: VoxelLoss):
        self.classes = classes[1:]
        self.regions = REGIONS if regions == "brats" else {}
        self.voxel_loss = voxel_loss
        # First and last label of each class and region.
        self._ranges = [*((n, n) for n in range(1, len(classes))), *self.regions.values()]
        # float64 holds an index and the voxel count of any volume exactly; MPS does not have it.
        self._like = torch.zeros(0, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self._rows: list[Tensor] = []

    def update(self, predictions: Mapping[str, Tensor], batch: Batch) -> None:
        logits, found = (predictions[key].to(self._like.device) for key in ("logits", "classes"))
        label, *numbers = (batch[key].to(self._like.device) for key in ("label", "valid", "index", "volume"))
        valid, index, volume = numbers
        inside, voxels = None, torch.full_like(index, label[0].numel())
        if "extent" in batch:
            extent = batch["extent"].to(self._like.device)
            inside, voxels = within(extent, label.shape[1:]), extent.prod(1)
            label, found = torch.where(inside, label, 0), torch.where(inside, found, 0)
        soft, cost = soft_sums(logits, label, self.voxel_loss, inside, torch.float64)
        columns = [torch.where(valid, index, -1), volume, (found != label).flatten(1).sum(1)]
        for low, high in self._ranges:
            is_true, is_found = (label >= low) & (label <= high), (found >= low) & (found <= high)
            columns += [mask.flatten(1).sum(1) for mask in (is_true & is_found, is_true, is_found)]
        columns += [*soft[:, :, 1].unbind(1), *soft[:, :, 0].unbind(1)]
        columns += [cost, voxels]
        self._rows.append(torch.stack([column.to(self._like) for column in columns], dim=1))

    def merge(self, world: World) -> None:
        rows = _present(torch.cat(self._rows))
        most = int(world.gather(torch.tensor([len(rows)], device=rows.device)).max())
        self._rows = [world.gather(F.pad(rows, (0, 0, 0, most - len(rows)), value=-1.0))]

    def names(self) -> tuple[str, ...]:
        return ("dice", "iou", "dice_sum", "val_loss", "samples", "volumes", *self.regions)

    def result(self) -> Scores:
        rows = _present(torch.cat(self._rows)).cpu().numpy() if self._rows else np.zeros((0, 0))
        if not len(rows):
            raise BadData("nothing could be evaluated: not one sample of the val split could be read")
        volumes, place = np.unique(rows[:, 1].astype(np.int64), return_inverse=True)
        sums = np.zeros((len(volumes), rows.shape[1] - 3))
        np.add.at(sums, place, rows[:, 3:])  # in sample order, whatever the number of ranks
        classes, counted = len(self.classes), 3 * len(self._ranges)
        dice = _dice(sums[:, :counted].reshape(len(volumes), -1, 3))  # (volumes, classes and regions)
        truth = sums[:, 1 : 3 * classes : 3]
        probability, shared = sums[:, counted : counted + classes], sums[:, counted + classes : counted + 2 * classes]
        soft = dice_loss(torch.from_numpy(np.stack([shared, probability, truth], axis=2))).numpy()
        iou = iou_of(dice[:, :classes])
        means, iou_means = dice.mean(0), iou.mean(0)
        voxels = sums[:, :counted].sum(0).reshape(-1, 3)  # of all volumes
        values = {
            "dice": float(means[:classes].mean()),
            "iou": float(iou_means.mean()),
            "dice_sum": float(means[:classes].sum()),
            "val_loss": float((soft.mean(1) + sums[:, -2] / sums[:, -1]).mean()),
            "samples": float(len(rows)),
            "volumes": float(len(volumes)),
            **{name: float(value) for name, value in zip(self.regions, means[classes:], strict=True)},
        }
        per_class = [
            {
                "class": name,
                "label": f"L{number}",
                "dice": float(means[number - 1]),
                "iou": float(iou_means[number - 1]),
                **_of_voxels(*voxels[number - 1].tolist()),
            }
            for number, name in enumerate(self.classes, start=1)
        ]
        scored = zip(volumes.tolist(), dice[:, :classes].tolist(), iou.mean(1).tolist(), strict=True)
        per_volume = [_volume_row(*each) for each in scored]
        worst = _worst(rows, place, volumes, dice[:, :classes].mean(1))
        return Scores(values, {"classes": per_class, "volumes": per_volume}, worst)


def within(extent: Tensor, shape: torch.Size) -> Tensor:
    """Return (batch, *shape): True for voxels that are not padding."""
    inside = torch.ones(len(extent), *shape, dtype=torch.bool, device=extent.device)
    for axis, size in enumerate(shape):
        place = torch.arange(size, device=extent.device).view(-1, *[1] * (len(shape) - axis - 1))
        inside &= place < extent[:, axis].view(-1, *[1] * len(shape))
    return inside


def _present(rows: Tensor) -> Tensor:
    """Return the rows that belong to a sample, sorted by its index, so that the number of ranks does not matter."""
    rows = rows[rows[:, 0] >= 0]
    return rows[rows[:, 0].argsort(stable=True)]


def _dice(counts: np.ndarray) -> np.ndarray:
    """Return 2 TP / (truth + found); 1 if a class is neither true nor found, so 0 if it is only one of them."""
    shared, truth, found = np.moveaxis(counts, -1, 0)
    return np.where(truth + found > 0, 2 * shared / np.maximum(truth + found, 1), 1.0)


def iou_of(dice: np.ndarray) -> np.ndarray:
    """Return TP / (truth + found - TP) of the same counts: Dice of one volume and class decides its IoU."""
    return dice / (2 - dice)


def _of_voxels(shared: float, truth: float, found: float) -> dict[str, float | None]:
    return {"precision": shared / found if found else None, "recall": shared / truth if truth else None}


def _volume_row(number: int, dice: list[float], iou: float) -> dict[str, Any]:
    by_label = {f"L{n}": value for n, value in enumerate(dice, start=1)}
    return {"volume": number, "dice": float(np.mean(dice)), "iou": iou, **by_label}


def _worst(rows: np.ndarray, place: np.ndarray, volumes: np.ndarray, dice: np.ndarray) -> list[dict[str, Any]]:
    """List the volumes with the lowest Dice, each with its sample of the most wrong voxels; ties go to the first."""
    worst = []
    for volume in np.argsort(dice, kind="stable")[:WORST]:
        if dice[volume] < 1:
            samples = rows[place == volume]
            index = int(samples[samples[:, 2].argmax(), 0])
            worst.append({"index": index, "dice": float(dice[volume]), "volume": int(volumes[volume])})
    return worst
