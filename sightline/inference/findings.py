"""Predictions as a person reads them: names, scores and places, between a task and what is drawn or written."""

from __future__ import annotations

import math

from torch import Tensor

from sightline.parts import DataSpec, Finding


def classes_found(logits: Tensor, spec: DataSpec, top: int, threshold: float) -> list[list[Finding]]:
    """Return the most probable classes of each sample; a score is a probability."""
    return _most_probable(logits.float().softmax(1), spec, top, threshold)


def labels_found(logits: Tensor, spec: DataSpec, top: int, threshold: float) -> list[list[Finding]]:
    """Return the classes of each sample that reach the threshold; a score is the probability of one class."""
    return _most_probable(logits.float().sigmoid(), spec, top, threshold)


def labels_of(parts: Tensor, spec: DataSpec) -> list[list[Finding]]:
    """Return the classes of each sample, the largest part first; `parts` (batch, classes) are 0 for all others."""
    found = [
        [Finding(spec.classes[at], at, row[at].item()) for at in row.nonzero().flatten().tolist()] for row in parts
    ]
    return [sorted(row, key=lambda label: -label.score) for row in found]


def _most_probable(probabilities: Tensor, spec: DataSpec, top: int, threshold: float) -> list[list[Finding]]:
    scores, labels = probabilities.topk(min(top, probabilities.shape[1]))  # (batch, top)
    return [
        [Finding(spec.classes[label], label, score) for score, label in rows if score >= threshold]
        for rows in _rows(scores, labels)
    ]


def boxes_found(
    boxes: Tensor, scores: Tensor, labels: Tensor, spec: DataSpec, top: int, threshold: float
) -> list[list[Finding]]:
    """Return the boxes with the highest scores of each sample, cut off at the edges of the image.

    `boxes` (batch, K, 4) are ymin, xmin, ymax, xmax as shares of the image; label n is class n - 1, 0 is none.
    """
    ids = spec.class_ids or range(1, len(spec.classes) + 1)
    found = []
    for sample, corners in zip(_rows(scores, labels), boxes.float().cpu().tolist(), strict=True):
        findings = []
        for (score, label), (top_edge, left, bottom, right) in zip(sample, corners, strict=True):
            edges = (left, top_edge, right, bottom)
            if label > 0 and score >= threshold and all(map(math.isfinite, edges)):
                box = tuple(min(max(edge, 0.0), 1.0) for edge in edges)
                findings.append(Finding(spec.classes[label - 1], ids[label - 1], score, box))
        found.append(sorted(findings, key=lambda finding: -finding.score)[:top])
    return found


def true_boxes(boxes: Tensor, labels: Tensor, height: Tensor, width: Tensor, spec: DataSpec) -> list[list[Finding]]:
    """Return the annotated boxes of each sample: (batch, K, 4) x, y, width, height in pixels of its file."""
    ids = spec.class_ids or range(1, len(spec.classes) + 1)
    rows = zip(*(each.tolist() for each in (boxes, labels, height, width)), strict=True)
    return [
        [
            Finding(spec.classes[label - 1], ids[label - 1], 1.0, (x / wide, y / tall, (x + w) / wide, (y + h) / tall))
            for (x, y, w, h), label in zip(its_boxes, its_labels, strict=True)
            if label > 0
        ]
        for its_boxes, its_labels, tall, wide in rows
    ]


def _rows(scores: Tensor, labels: Tensor) -> list[list[tuple[float, int]]]:
    pairs = zip(scores.float().cpu().tolist(), labels.cpu().tolist(), strict=True)
    return [list(zip(score, label, strict=True)) for score, label in pairs]
