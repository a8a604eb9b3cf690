"""The tasks as a recipe chooses them: their fields, their rules, and what is known of them without torch.

`build` imports the file of the task. Its class inherits the fields from here, after Task: a task builds itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from sightline.parts import Task, TaskConfig
from sightline.recipe.part import Above, AtLeast, AtMost, Below


@dataclass(frozen=True)
class ClassificationConfig(TaskConfig):
    """Cross entropy and top-k accuracy; of data with several labels per image binary ones."""

    label_smoothing: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """Share of the target spread evenly over all classes."""
    tta: bool = False
    """Mean of the logits of an image and of its mirror image, in evaluation and prediction; twice the work."""

    headline = "top1"
    peers = "classification"
    drawn = 12
    activation = "softmax"

    def build(self) -> Task:
        """Return the task with these fields."""
        from sightline.tasks.classification import Classification

        return Classification(**vars(self))


@dataclass(frozen=True)
class DetectionConfig(TaskConfig):
    """The loss of SSD and COCO's average precision."""

    lineage: Literal["tf", "mlperf"] = "tf"
    """Rules of matching. tf: an anchor matches from IoU 0.5 on, and one that two boxes claim goes to the first of them;
    mlperf: above 0.5, and to the last."""
    score_threshold: Annotated[float, AtLeast(0), Below(1, "the original has 0.05")] = 0.05
    """A detection needs a higher score than this."""
    nms_iou: Annotated[float, Above(0), AtMost(1, "the original has 0.5")] = 0.5
    """IoU from which on two detections of one class count as the same: the one with the lower score is dropped."""
    candidates: Annotated[int, AtLeast(1, "the original has 200")] = 200
    """Anchors with the highest scores that are looked at, per class and image."""
    per_image: Annotated[int, AtLeast(1, "the original has 200")] = 200
    """Detections that are kept per image; COCO's scores count the best 100."""

    headline = "ap"
    peers = "detection"
    drawn = 8

    def build(self) -> Task:
        """Return the task with these fields."""
        from sightline.tasks.detection import Detection

        return Detection(**vars(self))


@dataclass(frozen=True)
class SegmentationConfig(TaskConfig):
    """Soft Dice and cross entropy; Dice of whole volumes."""

    voxel_loss: Literal["ce", "focal"] = "ce"
    """Added to the Dice loss: cross entropy, or the focal loss with gamma 2; means over all voxels."""
    supervision: Literal["original", "exact"] = "original"
    """With deep supervision output i of n weighs 0.5^i: times 1 / (2 - 2^-n) as in the original, where n = 3 gives 0.93
    in all, or divided by their sum."""
    dice_over: Literal["local", "world"] = "local"
    """Samples over which the Dice of a batch sums: those of the device, as in the original, or of all devices."""
    tta: bool = False
    """Mean of the scores of the image and of all its mirror images; 4 times the work for slices, 8 for volumes."""
    overlap: Annotated[float, AtLeast(0), Below(1, "the original has 0.5")] = 0.5
    """Share of a window that the next one covers, for images larger than the network's patch."""
    blend: Literal["gaussian", "constant"] = "gaussian"
    """Average of overlapping windows: by a weight that falls towards their edges, or evenly."""
    window_batch: Annotated[int, AtLeast(1, "e.g. 64 for slices")] = 64
    """Windows that go through the network at once; where a split holds slices, its own batches count."""
    regions: Literal["none", "brats"] = "none"
    """brats also scores whole tumour, tumour core and enhancing tumour, in the labels of Decathlon task 01."""

    headline = "dice"
    batch_loss = "the Dice loss"
    peers = "segmentation"
    drawn = 6
    activation = "softmax"

    def build(self) -> Task:
        """Return the task with these fields."""
        from sightline.tasks.segmentation import Segmentation

        return Segmentation(**vars(self))


@dataclass(frozen=True)
class MaskConfig(TaskConfig):
    """Cross entropy and soft Dice; intersection over union of every class, over all pixels."""

    dice_weight: Annotated[float, AtLeast(0, "1 weighs it like the cross entropy")] = 1.0
    """Weight of the soft Dice loss beside the cross entropy. It is a mean over the classes that a batch shows."""
    whole_pixels: Annotated[int, AtLeast(0, "0 cuts all images into windows")] = 2**20
    """Images with more pixels go through the network in overlapping windows as large as a training crop; others
    whole."""
    overlap: Annotated[float, AtLeast(0), Below(1, "e.g. 0.25")] = 0.25
    """Share of a window that the next one covers."""
    blend: Literal["gaussian", "constant"] = "gaussian"
    """Average of overlapping windows: by a weight that falls towards their edges, or evenly."""
    window_batch: Annotated[int, AtLeast(1, "e.g. 16")] = 16
    """Windows that go through the network at once; of whole images, as many pixels."""

    headline = "miou"
    batch_loss = "the Dice loss"
    drawn = 6
    activation = "softmax"

    def build(self) -> Task:
        """Return the task with these fields."""
        from sightline.tasks.masks import Masks

        return Masks(**vars(self))
