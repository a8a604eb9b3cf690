"""Precision, recall and F1 of detections at the score threshold with the best F1, from COCO's own evaluation.

A detection finds a ground truth by COCO's rules at IoU 0.5: the surest first, each takes the free ground truth of its
class that it overlaps most. What lies in a crowd, or comes after the best 100 of an image and class, is not counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sightline.metrics.precision_recall import rates

NAMES = ("f1", "precision", "recall", "score_threshold")
IOU = 0.5
LIMIT = 100  # detections of a class in an image
NOTHING = -1.0  # COCO's score where there is nothing to measure


def best_f1(
    ious: Any, classes: int, detections: np.ndarray, truths: np.ndarray
) -> tuple[dict[str, float], list[dict[str, float | None]]]:
    """Return the scores of all classes together, and those of each class at the same threshold. `ious` are COCO's, by
    image and class; rows of detections begin with index, class and score, those of truths with index, class, crowd."""
    label, score, is_found = _outcomes(ious, detections, truths)
    totals = np.bincount(truths[truths[:, 2] == 0, 1].astype(int), minlength=classes + 1)[1:]
    threshold = _best_threshold(score, is_found, int(totals.sum()))
    chosen = score >= threshold
    shown = np.bincount(label[chosen], minlength=classes + 1)[1:]
    right = np.bincount(label[chosen & is_found], minlength=classes + 1)[1:]
    whole = rates(int(right.sum()), int(totals.sum()), int(shown.sum()))
    values = {**whole, "score_threshold": threshold} if totals.any() else {}
    rows = [rates(*counts) for counts in zip(right.tolist(), totals.tolist(), shown.tolist(), strict=True)]
    known = {name: value for name, value in values.items() if value is not None}
    return {name: known.get(name, NOTHING) for name in NAMES}, rows


def _best_threshold(score: np.ndarray, is_found: np.ndarray, truths: int) -> float:
    """Return the score at and above which F1 is best, the highest of several; NOTHING without detections."""
    if not len(score):
        return NOTHING
    order = np.argsort(-score, kind="stable")
    last = np.append(np.diff(score[order]) != 0, True)  # of equal scores
    right, shown = np.cumsum(is_found[order])[last], np.flatnonzero(last) + 1
    return float(score[order][last][np.argmax(2 * right / (shown + truths))])


def _outcomes(ious: Any, detections: np.ndarray, truths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return class, score, and whether it finds a ground truth, of every detection that counts."""
    detections = detections[np.lexsort((-detections[:, 2], detections[:, 1], detections[:, 0]))]
    starts = _starts(detections)
    rank = np.arange(len(detections)) - np.repeat(starts, np.diff(starts, append=len(detections)))
    is_found, counts = np.zeros(len(detections), bool), rank < LIMIT
    crowds = _crowds(truths)
    for (image, label), start in zip(detections[starts, :2].astype(int).tolist(), starts.tolist(), strict=True):
        is_crowd = crowds.get((image, label))
        if is_crowd is None:
            continue
        overlap = ious[image, label]
        taken = np.zeros(len(is_crowd), bool)
        for row in np.flatnonzero((overlap >= IOU).any(1)).tolist():
            free = np.where(taken | is_crowd, 0.0, overlap[row])
            # Of equal overlaps COCO takes the last.
            place = len(free) - 1 - int(free[::-1].argmax())
            if free[place] >= IOU:
                taken[place] = is_found[start + row] = True
            elif (overlap[row][is_crowd] >= IOU).any():
                counts[start + row] = False
    return detections[counts, 1].astype(int), detections[counts, 2], is_found[counts]


def _crowds(truths: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """Return by image and class which ground truths are crowds, in the order of their rows."""
    rows = truths[np.lexsort((truths[:, 1], truths[:, 0]))]
    starts = _starts(rows)
    names, parts = rows[starts, :2].astype(int).tolist(), np.split(rows[:, 2] > 0, starts)[1:]
    return {(image, label): part for (image, label), part in zip(names, parts, strict=True)}


def _starts(rows: np.ndarray) -> np.ndarray:
    """Return the place of the first row of each image and class, of rows in their order."""
    is_first = np.append(True, (np.diff(rows[:, :2], axis=0) != 0).any(1))
    return np.flatnonzero(is_first[: len(rows)])
