"""Detection by a single-shot detector: places and classes of objects.

Batch keys: image (after finish(): batch, 3, height, width), boxes (batch, n, 4) corner boxes, labels (batch, n) from
1, 0 where a row is padding, index (batch,); in evaluation valid (batch,) and those of metrics/coco_map.py.
The model answers (logits (batch, anchors, classes + 1), offsets (batch, anchors, 4), anchors (anchors, 4)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sightline import results
from sightline.boxes import decode
from sightline.export.nms_in_graph import best_boxes_in_graph
from sightline.inference.findings import boxes_found, true_boxes
from sightline.inference.predictions import Predictions
from sightline.metrics.coco_map import CocoMap
from sightline.parts import (
    Batch,
    DataSpec,
    Drawing,
    Finding,
    Loss,
    Prediction,
    PredictJob,
    PredictOptions,
    Reporter,
    SeenSample,
    Task,
)
from sightline.report.tiles import boxes_beside
from sightline.tasks.config import DetectionConfig
from sightline.tasks.matching import hard_negatives, match
from sightline.tasks.nms import best_boxes

BestBoxes = Callable[[Tensor, Tensor, float, float, int, int], tuple[Tensor, Tensor, Tensor]]


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
        cross_entropy = checkpoint(_cross_entropy, logits, classes, use_reentrant=False, preserve_rng_state=False)
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
        boxes, scores, labels = self._best(best_boxes, *model(batch["image"]))
        return {"boxes": boxes, "scores": scores, "labels": labels}

    def served_names(self, raw: bool) -> tuple[str, ...]:
        """Name the outputs of an exported network."""
        return ("logits", "offsets", "anchors") if raw else ("boxes", "scores", "labels", "count")

    def served(self, model: nn.Module, image: Tensor, raw: bool) -> tuple[Tensor, ...]:
        """Return what `predict` does and the number of detections of each image; raw: the answer of the model."""
        if raw:
            return model(image)
        boxes, scores, labels = self._best(best_boxes_in_graph, *model(image))
        return boxes, scores, labels, (labels > 0).sum(1)

    def _best(self, choose: BestBoxes, logits: Tensor, offsets: Tensor, anchors: Tensor) -> tuple[Tensor, ...]:
        scores = logits.float().softmax(2)[..., 1:]  # (batch, anchors, classes)
        boxes = decode(offsets.float(), anchors)
        return choose(boxes, scores, self.score_threshold, self.nms_iou, self.candidates, self.per_image)

    def metric(self, spec: DataSpec, device: torch.device) -> CocoMap:
        """Build the metric: COCO's twelve numbers."""
        return CocoMap(spec.classes, device)

    def draw(
        self, batch: Batch, predict: Callable[[], Mapping[str, Tensor]], spec: DataSpec, count: int
    ) -> list[Drawing]:
        """Draw true boxes beside those that `predict` shows."""
        found = self.findings(predict(), spec, None, None)
        truths = true_boxes(batch["truth_boxes"], batch["truth_labels"], batch["height"], batch["width"], spec)
        sides = list(zip(batch["height"].tolist(), batch["width"].tolist(), strict=True))
        images = batch["image"].float().cpu().numpy()
        return [boxes_beside(images[n], sides[n], truths[n], found[n], spec) for n in range(count)]

    def seen(self, batch: Batch, spec: DataSpec) -> list[SeenSample]:
        """Return images with all of their boxes."""
        labels = batch["labels"]
        found = boxes_found(batch["boxes"], (labels > 0).float(), labels, spec, labels.shape[1], 1.0)
        return [SeenSample(image.numpy(), tuple(row)) for image, row in zip(batch["image"], found, strict=True)]

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

    def findings(
        self, predictions: Mapping[str, Tensor], spec: DataSpec, top: int | None, threshold: float | None
    ) -> list[list[Finding]]:
        """Return the best boxes, by default 20 with scores from 0.3 on; the original shows 10 from 0.05 on."""
        boxes, scores, labels = (predictions[key] for key in ("boxes", "scores", "labels"))
        return boxes_found(boxes, scores, labels, spec, top or 20, 0.3 if threshold is None else threshold)

    def results(
        self,
        names: Sequence[str | None],
        predictions: Mapping[str, Tensor],
        batch: Batch,
        spec: DataSpec,
        options: PredictOptions,
    ) -> list[Prediction]:
        """Return the boxes that `findings` chooses, in pixels of their images."""
        found = self.findings(predictions, spec, options.top, options.threshold)
        sizes = zip(batch["width"].tolist(), batch["height"].tolist(), strict=True)
        return [
            results.Detection(
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

    def reporter(self, job: PredictJob) -> Reporter:
        """List findings, and draw them into their images."""
        return Predictions(self.findings, job)


def _cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross entropy of each anchor (batch, anchors)."""
    return F.cross_entropy(logits.float().flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
