"""What the report draws of a task: `tiles` of its worst samples, and `seen`, training samples with their labels.

Both choose by the type of the task, and so for tasks that inherit it; a task of one's own registers its own
(docs/howto/task.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sightline.errors import UsageError
from sightline.inference.by_task import boxes_in
from sightline.inference.findings import boxes_found, labels_of, true_boxes
from sightline.metrics.dice import within
from sightline.parts import IGNORED, Batch, DataSpec, Finding, TaskConfig
from sightline.report.tiles import Drawing, boxes_beside, image_alone, mask_colours, masks_beside, picture
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig, SegmentationConfig
from sightline.tasks.mixing import partners_of, share_of

Predicts = Callable[[], Mapping[str, Tensor]]  # runs the network on the batch, where the drawings need that


@dataclass(frozen=True)
class Tiles:
    """Drawings of samples, and the colours of classes in them that they do not name."""

    drawings: list[Drawing]
    colours: Mapping[str, str]


@dataclass(frozen=True)
class SeenSample:
    """One training sample as the network sees it, and its label."""

    image: np.ndarray  # (channels, height, width) float32, normalised; of a volume one slice
    labels: tuple[Finding, ...] = ()  # the score is the share of a label: below 1 if labels are mixed
    mask: np.ndarray | None = None  # (height, width): the class of every pixel, 0 is the background
    note: str = ""  # e.g. which slice it is


@functools.singledispatch
def tiles(task: TaskConfig, batch: Batch, predict: Predicts, spec: DataSpec, count: int) -> Tiles:
    """Draw the first `count` samples of a finished batch in fp32."""
    return Tiles([{}] * count, {})


@functools.singledispatch
def seen(task: TaskConfig, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    """Return every sample of a finished training batch with its label, to be drawn."""
    raise UsageError(
        f"{type(task).__name__} has no `seen`, so its samples cannot be drawn; register one with "
        "sightline.report.by_task.seen, see docs/howto/task.md"
    )


@tiles.register(ClassificationConfig)
def _images(task: TaskConfig, batch: Batch, predict: Predicts, spec: DataSpec, count: int) -> Tiles:
    """Draw the images; the scores name their classes."""
    return Tiles([image_alone(image.float().cpu().numpy(), spec) for image in batch["image"][:count]], {})


@seen.register(ClassificationConfig)
def _labelled_images(task: TaskConfig, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    """Return images with their classes, with those of the partner too where they are mixed."""
    label, share = batch["label"], share_of(batch)
    parts = label.float() if label.ndim > 1 else F.one_hot(label, len(spec.classes)).float()  # (batch, classes)
    if share is not None:
        share = share[:, None] if share.ndim else share
        parts = share * parts + (1 - share) * partners_of(parts, batch)
    found = labels_of(parts, spec)
    return [SeenSample(image.numpy(), tuple(row)) for image, row in zip(batch["image"], found, strict=True)]


@tiles.register(DetectionConfig)
def _boxes(task: TaskConfig, batch: Batch, predict: Predicts, spec: DataSpec, count: int) -> Tiles:
    """Draw true boxes beside those that `predict` shows."""
    found = boxes_in(predict(), spec, None, None)
    truths = true_boxes(batch["truth_boxes"], batch["truth_labels"], batch["height"], batch["width"], spec)
    sides = list(zip(batch["height"].tolist(), batch["width"].tolist(), strict=True))
    images = batch["image"].float().cpu().numpy()
    return Tiles([boxes_beside(images[n], sides[n], truths[n], found[n], spec) for n in range(count)], {})


@seen.register(DetectionConfig)
def _images_with_boxes(task: TaskConfig, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    """Return images with all of their boxes."""
    labels = batch["labels"]
    found = boxes_found(batch["boxes"], (labels > 0).float(), labels, spec, labels.shape[1], 1.0)
    return [SeenSample(image.numpy(), tuple(row)) for image, row in zip(batch["image"], found, strict=True)]


@tiles.register(SegmentationConfig)
def _slices(task: TaskConfig, batch: Batch, predict: Predicts, spec: DataSpec, count: int) -> Tiles:
    """Draw slices, of a volume the one with the most wrong voxels, in the first channel."""
    found, label, image = predict()["classes"], batch["label"], batch["image"][:, 0]
    if "extent" in batch:
        inside = within(batch["extent"], label.shape[1:])
        found, label = torch.where(inside, found, 0), torch.where(inside, label, 0)
    drawings = []
    for planes in zip(image[:count].float(), label[:count], found[:count], strict=True):
        if planes[0].ndim == 3:
            worst = int((planes[1] != planes[2]).flatten(1).sum(1).argmax())
            planes = tuple(plane[worst] for plane in planes)
        drawings.append(masks_beside(*(plane.cpu().numpy() for plane in planes)))
    return Tiles(drawings, mask_colours(spec.classes))


@seen.register(SegmentationConfig)
def _slices_with_classes(task: TaskConfig, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    """Return slices with their classes: of a volume the middle one, or where that has none the one with most."""
    samples = []
    for image, label in zip(batch["image"].numpy(), batch["label"].to(torch.uint8).numpy(), strict=True):
        if label.ndim == 2:
            samples.append(SeenSample(image, mask=label))
            continue
        labelled, at = (label > 0).sum((1, 2)), len(label) // 2
        at = at if labelled[at] or not labelled.any() else int(labelled.argmax())
        samples.append(SeenSample(image[:, at], mask=label[at], note=f"slice {at}"))
    return samples


@tiles.register(MaskConfig)
def _masks(task: TaskConfig, batch: Batch, predict: Predicts, spec: DataSpec, count: int) -> Tiles:
    """Draw images beside their true and their predicted classes; pixels that do not count have no colour."""
    found, label, drawings = predict()["classes"], batch["label"], []
    for row, (height, width) in enumerate(batch["extent"][:count].tolist()):
        truth, guess = (each[row, :height, :width].cpu().numpy() for each in (label, found))
        tile = picture(batch["image"][row, :, :height, :width].float().cpu().numpy(), spec)
        drawings.append(masks_beside(tile, truth * (truth != IGNORED), guess))
    return Tiles(drawings, mask_colours(spec.classes))


@seen.register(MaskConfig)
def _crops_with_masks(task: TaskConfig, batch: Batch, spec: DataSpec) -> list[SeenSample]:
    """Return crops with their classes; pixels that do not count are drawn as the first class."""
    label = torch.where(batch["label"] == IGNORED, 0, batch["label"]).to(torch.uint8)
    pairs = zip(batch["image"].numpy(), label.numpy(), strict=True)
    return [SeenSample(image, mask=mask) for image, mask in pairs]
