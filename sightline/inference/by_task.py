"""What `predict` makes of a task's outputs: `results`, objects for Python, and `reporter`, which writes files.

Both choose by the type of the task, and so for tasks that inherit it; a task of one's own registers its own
(docs/howto/task.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from sightline.errors import UsageError
from sightline.inference.findings import boxes_found, classes_found, labels_found
from sightline.inference.mask_files import MaskPredictions, shares_of
from sightline.inference.predictions import Predictions
from sightline.inference.reporter import PredictJob, Reporter
from sightline.inference.volume_files import VolumePredictions, mask_of, probabilities, scores_of_row
from sightline.parts import Batch, DataSpec, Finding, Prediction, PredictOptions, TaskConfig
from sightline.results import Classification, Detection, Segmentation
from sightline.tasks.config import ClassificationConfig, DetectionConfig, MaskConfig, SegmentationConfig

Names = Sequence[str | None]  # of the rows of a batch; None for padding and files that cannot be read
Outputs = Mapping[str, Tensor]  # of Task.predict


@functools.singledispatch
def results(
    task: TaskConfig, names: Names, outputs: Outputs, batch: Batch, spec: DataSpec, options: PredictOptions
) -> list[Prediction]:
    """Return what a task's `predict` found in each row that has a name."""
    raise UsageError(
        f"{type(task).__name__} has no results, so there is no `api.predict` for it yet; register one with "
        "sightline.inference.by_task.results, see docs/howto/task.md"
    )


@functools.singledispatch
def reporter(task: TaskConfig, job: PredictJob) -> Reporter:
    """Return a reporter that writes the predictions of the job's files into its folder."""
    raise UsageError(
        f"{type(task).__name__} has no reporter, so there is no `predict` for it yet; register one with "
        "sightline.inference.by_task.reporter, see docs/howto/task.md"
    )


def has_reporter(task: TaskConfig) -> bool:
    """Return whether `sightline predict` can write what this task predicts."""
    return reporter.dispatch(type(task)) is not reporter.dispatch(object)


# Classes


def classes_in(
    task: TaskConfig, outputs: Outputs, spec: DataSpec, top: int | None, threshold: float | None
) -> list[list[Finding]]:
    """Return the most probable classes, by default five; of a task with several labels every class of at least the
    threshold, by default 0.5."""
    if task.activation == "sigmoid":
        most = len(spec.classes) if top is None else top
        return labels_found(outputs["logits"], spec, most, 0.5 if threshold is None else threshold)
    return classes_found(outputs["logits"], spec, 5 if top is None else top, 0.0 if threshold is None else threshold)


@results.register(ClassificationConfig)
def _classes(
    task: TaskConfig, names: Names, outputs: Outputs, batch: Batch, spec: DataSpec, options: PredictOptions
) -> list[Prediction]:
    """Return the probabilities of all classes, or of the `top` ones, and the labels that they make."""
    top = len(spec.classes) if options.top is None else options.top
    every = classes_in(task, outputs, spec, top, 0.0)
    chosen = classes_in(task, outputs, spec, top if task.activation == "sigmoid" else 1, options.threshold)
    made: list[Prediction] = []
    for name, found, labels in zip(names, every, chosen, strict=True):
        if name is not None:
            shares = {each.name: each.score for each in found}  # none where they are not numbers
            label, probability = next(iter(shares.items()), ("", math.nan))
            made.append(Classification(name, label, probability, shares, tuple(each.name for each in labels)))
    return made


@reporter.register(ClassificationConfig)
def _classes_in_files(task: TaskConfig, job: PredictJob) -> Reporter:
    """List classes, and write them below their images."""
    return Predictions(functools.partial(classes_in, task), job)


# Boxes


def boxes_in(outputs: Outputs, spec: DataSpec, top: int | None, threshold: float | None) -> list[list[Finding]]:
    """Return the best boxes, by default 20 with scores from 0.3 on; the original shows 10 from 0.05 on."""
    boxes, scores, labels = (outputs[key] for key in ("boxes", "scores", "labels"))
    return boxes_found(boxes, scores, labels, spec, top or 20, 0.3 if threshold is None else threshold)


@results.register(DetectionConfig)
def _boxes(
    task: TaskConfig, names: Names, outputs: Outputs, batch: Batch, spec: DataSpec, options: PredictOptions
) -> list[Prediction]:
    """Return the boxes that `boxes_in` chooses, in pixels of their images."""
    found = boxes_in(outputs, spec, options.top, options.threshold)
    sizes = zip(batch["width"].tolist(), batch["height"].tolist(), strict=True)
    return [
        Detection(
            name,
            np.array([each.box for each in boxes]).reshape(-1, 4) * (width, height, width, height),
            np.array([each.score for each in boxes]),
            tuple(each.name for each in boxes),
            tuple(each.class_id for each in boxes),
            width,
            height,
        )
        for name, boxes, (width, height) in zip(names, found, sizes, strict=True)
        if name is not None
    ]


@reporter.register(DetectionConfig)
def _boxes_in_files(task: TaskConfig, job: PredictJob) -> Reporter:
    """List boxes, and draw them into their images."""
    return Predictions(boxes_in, job)


# Masks of volumes


@results.register(SegmentationConfig)
def _volumes(
    task: TaskConfig, names: Names, outputs: Outputs, batch: Batch, spec: DataSpec, options: PredictOptions
) -> list[Prediction]:
    """Return masks in the geometry of their files."""
    found: list[Prediction] = []
    for row, name in enumerate(names):
        if name is None:
            continue
        scores, geometry = scores_of_row(outputs, batch, row)
        mask, counts = mask_of(scores, spec.classes, options.largest)
        shares = probabilities(scores, geometry) if options.probabilities else None
        if batch["flat"][row]:
            mask, shares = mask[0], shares[:, 0] if shares is not None else None
        voxels = dict(zip(spec.classes, counts, strict=True))
        found.append(Segmentation(name, mask, spec.classes, voxels, shares))
    return found


@reporter.register(SegmentationConfig)
def _volumes_in_files(task: TaskConfig, job: PredictJob) -> Reporter:
    """Write masks in the geometry of their files, and draw slices with outlines."""
    return VolumePredictions(job)


# Masks of images


@results.register(MaskConfig)
def _masks(
    task: TaskConfig, names: Names, outputs: Outputs, batch: Batch, spec: DataSpec, options: PredictOptions
) -> list[Prediction]:
    """Return masks of the numbers of classes."""
    found: list[Prediction] = []
    for row, name in enumerate(names):
        if name is not None:
            height, width = batch["extent"][row].tolist()
            mask = outputs["classes"][row, :height, :width].cpu()
            counts = mask.flatten().bincount(minlength=len(spec.classes)).tolist()
            shares = shares_of(outputs, row, height, width) if options.probabilities else None
            pixels = dict(zip(spec.classes, counts, strict=True))
            found.append(Segmentation(name, mask.numpy(), spec.classes, pixels, shares))
    return found


@reporter.register(MaskConfig)
def _masks_in_files(task: TaskConfig, job: PredictJob) -> Reporter:
    """Write masks as the files of the training had them, and draw outlines into the images."""
    return MaskPredictions(job)
