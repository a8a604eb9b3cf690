"""Detection by a single-shot detector: places and classes of objects.

Batch keys: image (after finish(): batch, 3, height, width), boxes (batch, n, 4) corner boxes, labels (batch, n) from
1, 0 where a row is padding, index (batch,); in evaluation valid (batch,) and those of metrics/coco_map.py.
The model answers (logits (batch, anchors, classes + 1), offsets (batch, anchors, 4), anchors (anchors, 4)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sightline.metrics.coco_map import CocoMap
from sightline.parts import Batch, DataSpec, Loss, PredictOptions, Task
from sightline.tasks.config import DetectionConfig
from sightline.tasks.matching import hard_negatives, match
from sightline.tasks.nms import boxes_of
from sightline.tasks.recomputed import recomputed


@dataclass(frozen=True)
class Detection(Task, DetectionConfig):
    """The loss of SSD and COCO's average precision."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return, per image, cross entropy of matched anchors and hard negatives plus Huber loss of matched offsets,
        divided by the number of matched anchors; then the mean. An image without boxes adds nothing."""
        logits, offsets, anchors = model(batch["image"])
        classes, targets = match(batch["boxes"], batch["labels"], anchors, self.lineage)
        is_positive = classes > 0  # (batch, anchors)
        # Made again for the gradient: what that would keep, in fp32, is twice the size of half-precision logits (362 MB
        # more for 128 images), and whether a compiler sees it by itself depends on what stands around it.
        cross_entropy = recomputed(_cross_entropy, logits, classes)
        is_chosen = is_positive | hard_negatives(cross_entropy, is_positive)
        matched = is_positive.sum(1)  # (batch,)
        share = 1 / matched.clamp(min=1)
        class_loss = torch.where(is_chosen, cross_entropy, 0.0).sum(1) * share
        huber = F.huber_loss(offsets.float(), targets, reduction="none").sum(2)
        box_loss = torch.where(is_positive, huber, 0.0).sum(1) * share
        sums = {"class_loss": class_loss.detach().sum(), "box_loss": box_loss.detach().sum(), "matched": matched.sum()}
        return Loss((class_loss + box_loss).mean(), sums)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return boxes (batch, n, 4), corners, not clipped; scores (batch, n), descending; labels (batch, n) from 1, 0
        for no detection."""
        boxes, scores, labels = boxes_of(self, *model(batch["image"]))
        return {"boxes": boxes, "scores": scores, "labels": labels}

    def metric(self, spec: DataSpec, device: torch.device) -> CocoMap:
        """Build the metric: COCO's twelve numbers."""
        return CocoMap(spec.classes, device)

    def showing(self, options: PredictOptions) -> Detection:
        """Keep boxes below score_threshold, or more than per_image, where they are asked for; the others stay."""
        lowest = self.score_threshold if options.threshold is None else options.threshold
        most = options.top or 0
        return replace(
            self,
            score_threshold=min(self.score_threshold, lowest),
            candidates=max(self.candidates, most),
            per_image=max(self.per_image, most),
        )


def _cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross entropy of each anchor (batch, anchors)."""
    return F.cross_entropy(logits.float().flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
